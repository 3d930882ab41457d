"""Optimizers that may update pieces of tensors: their update of an element depends on that element alone.

Where tensors are cut a rank's optimizer has pieces of them, some flat. One that looks at whole tensors would
go on without a word and compute something else. So each is asked before its first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait.errors import PlanError
from plait.sharding.trial import doubt

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
LOOKS_AROUND = {
    torch.optim.Adafactor: "divides an element by the mean squares of its row and its column",
    torch.optim.Muon: "makes the update of a whole matrix orthogonal",
    torch.optim.LBFGS: "moves all parameters along one line",
}
"""Those of torch that do not, and what they do instead."""


def require_elementwise(optimizer: Optimizer) -> None:
    """PlanError unless the optimizer's update of an element depends on that element alone.

    A class can vouch for itself with `elementwise = True` (for itself, not for those that inherit from it).
    What is neither vouched for nor torch's own is tried out, see `doubt`.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE or vars(kind).get("elementwise") is True:
        return
    if kind is torch.optim.SparseAdam:
        raise PlanError("SparseAdam takes sparse gradients, but plait's are dense: take torch.optim.AdamW.")
    way_out = "set plan.strategy to 'none' and plan.tp to 1, or take torch.optim.AdamW"
    reason = LOOKS_AROUND.get(kind)
    if reason is None:
        reason = doubt(optimizer)
        way_out += f", or vouch for it with `elementwise = True` in class {kind.__name__}"
    if reason is not None:
        raise PlanError(
            f"{kind.__name__} {reason}, but where tensors are cut an optimizer has pieces of them only: "
            f"{way_out}."
        )


class Guard:
    """Has each optimizer of an engine's parameters asked before its first step; the engine holds the guard.

    It hangs on torch's hook before every optimizer's step as long as it lives, and keeps nothing else alive.
    """

    def __init__(self, pieces: Iterable[nn.Parameter]) -> None:
        """`pieces`: what this rank's optimizer updates."""
        watched = {id(piece): weakref.ref(piece) for piece in pieces}
        checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # A hook that led back to the guard would keep it for ever: torch keeps the hook.
        handle = register_optimizer_step_pre_hook(partial(_ask, watched, checked))
        weakref.finalize(self, handle.remove)


def _ask(
    watched: Mapping[int, weakref.ref[nn.Parameter]],
    checked: weakref.WeakKeyDictionary[Optimizer, int],
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
        require_elementwise(optimizer)
        checked[optimizer] = len(groups)
