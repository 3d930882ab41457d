"""Training from a configuration: data, loop, metrics, progress and checkpoints."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
