"""Optimizers made of parameter groups, of which those that communicate are given the engine too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch.optim.optimizer import Optimizer

from plait.engine.engine import Engine
from plait.proof.optimizer_proof import communicating_class

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""An optimizer's class, or a function of parameter groups that returns one; `plait.Muon` and `plait.Owned`,
or a `partial` of them, are called with the engine and the groups."""


def class_of(make: MakeOptimizer) -> object:
    """Return the class, or function, that a `partial` calls."""
    return make.func if isinstance(make, partial) else make


def takes_engine(make: MakeOptimizer) -> bool:
    """Return whether `make` makes an optimizer that exchanges parameters between the ranks of an engine."""
    return communicating_class(make) is not None


def optimizer_for(engine: Engine, make: MakeOptimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that `make` makes of an engine's parameter groups."""
    return make(engine, list(groups)) if takes_engine(make) else make(list(groups))
