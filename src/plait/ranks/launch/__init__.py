"""The start of ranks: as processes of this host, as threads, or under a launcher; their rendezvous."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
