"""Simulated costs of a schedule: exact times, bubble and memory from action costs, and pictures of them."""

from typing import Any

from plait.submodules import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
