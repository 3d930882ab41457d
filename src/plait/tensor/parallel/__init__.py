"""Parallel layers over `tp`, and the rules that put them in the place of a model's modules."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
