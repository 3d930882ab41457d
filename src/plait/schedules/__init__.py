"""Schedules as data: actions, placement of stages, policies, rules, and the lowering to programs."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
