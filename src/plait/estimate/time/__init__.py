"""Predicted times on given hardware: of operations, layers and steps, from sizes alone, without torch."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
