"""Measurement of the machine that it runs on, as a hardware file for predictions."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
