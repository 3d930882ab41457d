"""The plan of a run and what it decides before there are ranks: rules, axes, units, layouts."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
