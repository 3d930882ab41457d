"""Estimates before a run: memory, time, the search for plans; measurements of this machine for them."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
