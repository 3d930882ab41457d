"""The configuration: typed sections, read from TOML and the command line."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
