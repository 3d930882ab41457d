"""Makes optimizers from parameter groups; optimizers that communicate are given the engine too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch.optim.optimizer import Optimizer

from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.optimizers.matrix_parts import sent_dtype
from plait.optimizers.newton_schulz import ITERATIONS
from plait.plan.parameter_units import PRECISIONS, Dtype
from plait.proof.optimizer_proof import communicating_class
from plait.tensor.dtypes import named_dtype

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""An optimizer's class, or a function of parameter groups that returns one; `plait.Muon` and `plait.Owned`,
or a `partial` of them, are called with the engine and the groups."""


def class_of(make: MakeOptimizer) -> object:
    """Return the optimizer class or function that `make` is, or that it calls if it is a `partial`."""
    return make.func if isinstance(make, partial) else make


def takes_engine(make: MakeOptimizer) -> bool:
    """Return whether `make` makes an optimizer that exchanges parameters between the ranks of an engine."""
    return communicating_class(make) is not None


def optimizer_for(engine: Engine, make: MakeOptimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that `make` makes of an engine's parameter groups."""
    return make(engine, list(groups)) if takes_engine(make) else make(list(groups))


def class_and_settings_of_owned(make: MakeOptimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and the settings in a `partial` of `plait.Owned`. Raises PlanError without a class."""
    if not (isinstance(make, partial) and make.args and isinstance(make.args[0], type)):
        raise PlanError(
            "the optimizer is plait.Owned without a class: give functools.partial(plait.Owned, CLASS, ...)."
        )
    return make.args[0], dict(make.keywords)


@dataclass(frozen=True)
class MuonSettings:
    """The settings of Muon on which its memory and step time depend; the defaults are Muon's own."""

    per_head: bool = False
    """Whether each head of query, key and value is a matrix of its own."""
    routers: bool = False
    """Whether weights of routers are hidden matrices."""
    dtype: Dtype = PRECISIONS["bf16"]
    """In which matrices are orthogonalized."""
    iterations: int = ITERATIONS
    """Iterations of Newton–Schulz."""

    def sent_dtype(self, own: Dtype) -> Dtype:
        """Return the dtype in which matrices of a parameter are exchanged; `own`: that of the parameter."""
        return sent_dtype(own, self.dtype)


def muon_settings(make: MakeOptimizer) -> MuonSettings:
    """Return the settings of `plait.Muon`, or of a `partial` of it."""
    given: Mapping[str, Any] = make.keywords if isinstance(make, partial) else {}
    known = {name: given[name] for name in ("per_head", "routers") if name in given}
    if "dtype" in given:
        known["dtype"] = named_dtype(given["dtype"])
    return MuonSettings(**known, iterations=given.get("ns_steps", ITERATIONS))
