"""Predictions before a run: the time and memory of a step of a plan on given hardware; no ranks, no torch."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
