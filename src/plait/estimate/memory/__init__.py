"""Predicted memory of a plan: a step's program is simulated on a ledger of allocations, without tensors."""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
