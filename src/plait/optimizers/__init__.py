"""Optimizers that need whole matrices or whole parameters, where a rank holds shards of them."""

from typing import Any

from plait.optimizers.hidden_matrices import listed_matrices
from plait.optimizers.muon import Muon
from plait.optimizers.owned_optimizer import Owned
from plait.package import submodule

__all__ = ["Muon", "Owned", "listed_matrices"]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
