"""Models as sequences of layers: names, nested values, shapes on the meta device, and their checks."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
