"""Schedules to programs of instructions: lowering, messages, and checks of what the ranks then run."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
