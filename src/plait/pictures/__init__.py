"""All drawing, without torch: timelines of schedules, and the page of a training run."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
