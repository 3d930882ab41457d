"""Check that an optimizer does to what each rank has of the parameters what it would do to all of them.

Where parameters are cut a rank's optimizer has pieces of them, so the update of an element may depend on that
element alone; under `pp` it has the parameters of its own stages, so the update of a parameter may depend on
that parameter alone. Any other optimizer would compute something else, unnoticed: so each is checked before
its first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait.errors import PlanError
from plait.plan import Plan
from plait.sharding.optimizer_probe import Reach, probe

ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
"""Exactly these classes: one that inherits from them may do anything."""
PARAMETERWISE = {
    torch.optim.Adafactor: "divides an element by the mean squares of its row and its column",
    torch.optim.Muon: "makes the update of a whole matrix orthogonal",
}
"""Those of torch that look at a whole parameter, and what they do."""
COUPLING = {torch.optim.LBFGS: "moves all parameters along one line"}
"""Those of torch that look at all their parameters together, and what they do."""


@dataclass(frozen=True)
class Partitioning:
    """How a plan spreads parameters over ranks, as far as optimizers can tell."""

    pp: int
    """Ranks of `pp`: each has the parameters of its own stages."""
    cut: bool
    """Whether a rank has pieces of parameters."""

    @staticmethod
    def of(plan: Plan) -> Partitioning:
        """That of a plan; `offload` alone cuts nothing."""
        return Partitioning(plan.pp, plan.tp > 1 or (plan.strategy != "none" and plan.shard > 1))


def require_elementwise(optimizer: Optimizer, partitioning: Partitioning) -> None:
    """Raise PlanError where an update would depend on what another rank has.

    A class can vouch for itself with `elementwise = True` or `parameterwise = True` (for itself, not for one
    that inherits from it). What is neither vouched for nor torch's own is tried out, see `probe`.
    """
    kind = type(optimizer)
    if not partitioning.cut and partitioning.pp == 1:
        return
    if kind is torch.optim.SparseAdam:
        raise PlanError("SparseAdam takes sparse gradients, but plait's are dense: take torch.optim.AdamW.")
    reach, reason = _reach_of(optimizer, partitioning)
    if not reason:
        return
    if partitioning.cut:
        where = "where tensors are cut an optimizer has pieces of them only"
    else:
        where = f"with plan.pp = {partitioning.pp} an optimizer has the parameters of its own stages only"
    way_out = f"{_plan_for(reach, partitioning)}, or take torch.optim.AdamW"
    if kind not in PARAMETERWISE.keys() | COUPLING.keys():
        word = "elementwise" if partitioning.cut else "parameterwise"
        way_out += f", or vouch for it with `{word} = True` in class {kind.__name__}"
    raise PlanError(f"{kind.__name__} {reason}, but {where}: {way_out}.")


def _reach_of(optimizer: Optimizer, partitioning: Partitioning) -> tuple[Reach, str]:
    """What the update of an element depends on, and why that is too much; "" where it is not."""
    kind = type(optimizer)
    if kind in ELEMENTWISE or vars(kind).get("elementwise") is True:
        return "element", ""
    if kind in COUPLING:
        return "all", COUPLING[kind]
    if kind in PARAMETERWISE:
        return "parameter", PARAMETERWISE[kind] if partitioning.cut else ""
    reason = None if vars(kind).get("parameterwise") is True else probe(optimizer, "parameter")
    if reason is not None:
        return "all", reason
    return "parameter", (probe(optimizer, "element") or "") if partitioning.cut else ""


def _plan_for(reach: Reach, partitioning: Partitioning) -> str:
    """The plan under which an optimizer has all that it looks at."""
    if not partitioning.cut:
        return "set plan.pp to 1 and leave plan.tp at 1 and plan.strategy at 'none'"
    if reach == "parameter":
        return "set plan.strategy to 'none' and plan.tp to 1"
    return "set plan.strategy to 'none', and plan.tp and plan.pp to 1"


class OptimizerGuard:
    """Has each optimizer of an engine's parameters asked before its first step; the engine holds the guard.

    It hangs on torch's hook before every optimizer's step as long as it lives, and keeps nothing else alive.
    """

    def __init__(self, pieces: Iterable[nn.Parameter], partitioning: Partitioning) -> None:
        """`pieces`: what this rank's optimizer updates."""
        watched = {id(piece): weakref.ref(piece) for piece in pieces}
        checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # A hook that led back to the guard would keep it for ever: torch keeps the hook.
        self._ask = partial(_ask, watched, checked, partitioning)
        handle = register_optimizer_step_pre_hook(self._ask)
        weakref.finalize(self, handle.remove)

    def ask(self, optimizer: Optimizer) -> None:
        """Raise PlanError as `require_elementwise` does, if the optimizer has some of the parameters."""
        self._ask(optimizer, (), {})


def _ask(
    watched: Mapping[int, weakref.ref[nn.Parameter]],
    checked: weakref.WeakKeyDictionary[Optimizer, int],
    partitioning: Partitioning,
    optimizer: Optimizer,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Before a step: of optimizers of watched parameters, each once, and again when it has more groups."""
    groups = getattr(optimizer, "param_groups", ())
    if checked.get(optimizer) == len(groups):
        return
    parameters = (parameter for group in groups for parameter in group["params"])
    if any(id(one) in watched and watched[id(one)]() is one for one in parameters):
        require_elementwise(optimizer, partitioning)
        checked[optimizer] = len(groups)
