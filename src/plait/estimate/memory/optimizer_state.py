"""The memory of an optimizer: tensors of the size of each parameter, and the buffers of Muon's exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from plait.engine.blueprint import Blueprint
from plait.errors import PlanError
from plait.optimizers.matrix_work import found_matrices, work_of_stages
from plait.plan.argument_checks import require_whole

Moments: TypeAlias = int | Literal["muon"]
"""How many tensors of a parameter's size an optimizer keeps for it; "muon": one for hidden matrices, which
are exchanged in bf16, two for others."""
EXCHANGED_BYTES = 2
"""Of an element of a matrix that Muon sends, in bf16; no parameter's dtype is narrower."""
OF_MATRICES, OF_OTHERS = 1, 2
"""Tensors that Muon keeps for a hidden matrix, its momentum, and AdamW for other parameters."""


def require_moments(moments: object) -> None:
    """Raise PlanError unless `moments` is a number of tensors, or "muon"."""
    if isinstance(moments, str) and moments != "muon":
        raise PlanError(f"moments is {moments!r}: give a whole number of at least 0, or 'muon'.")
    if moments != "muon":
        require_whole("moments", moments, PlanError, least=0)


@dataclass(frozen=True)
class OptimizerState:
    """The tensors that an optimizer keeps on the ranks of a plan."""

    of_all: int
    of_parameters: Mapping[str, int]
    """How many tensors of its size a parameter has, by name; `of_all` without an entry."""
    buffers: Mapping[int, int]
    """By rank of `pp`, bytes of buffers on the rank of that stage that has most; none without an entry."""

    def tensors_of(self, name: str) -> int:
        """Return how many tensors of its size are kept for a parameter."""
        return self.of_parameters.get(name, self.of_all)


def optimizer_state(blueprint: Blueprint, moments: Moments) -> OptimizerState:
    """Return what the optimizer of a model keeps under a plan."""
    if moments != "muon":
        return OptimizerState(moments, {}, {})
    found = found_matrices(blueprint)
    of_parameters = {name: OF_MATRICES for name, one in found.items() if one.parts}
    buffers = {
        stage: EXCHANGED_BYTES * max(one.buffered for one in ranks)
        for stage, ranks in enumerate(work_of_stages(blueprint, found))
    }
    return OptimizerState(OF_OTHERS, of_parameters, buffers)
