"""Predictions before a run: the time and memory of a step of any model under a plan, on given hardware."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
