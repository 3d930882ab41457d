"""The engine that `parallelize` returns, and the runner that carries out the programs of its steps."""

from typing import Any

from plait.engine.engine import Engine
from plait.engine.runner import InstructionObserver, Runtime
from plait.engine.step_recorder import Recording
from plait.package import submodule

__all__ = ["Engine", "InstructionObserver", "Recording", "Runtime"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
