"""The engine that `parallelize` returns, and the runner that carries out the programs of its steps."""

from plait.engine.engine import Engine
from plait.engine.recorder import Recording
from plait.engine.runtime_objects import InstructionObserver, Runtime

__all__ = ["Engine", "InstructionObserver", "Recording", "Runtime"]
