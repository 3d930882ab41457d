"""Timelines of schedules as text, SVG, HTML and Chrome traces; `plait.simulate` makes them."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
