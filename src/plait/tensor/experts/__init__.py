"""Mixtures of experts: routing of tokens, their exchange between the ranks of experts, grouped products."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
