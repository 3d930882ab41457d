"""Lowering of schedules to programs of instructions: messages, gathers, reductions, and their checks."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
