"""Check that an optimizer on one rank updates its parameters as an optimizer of the whole model would.

Where parameters are sharded a rank's optimizer has pieces of them, so the update of an element may depend on
that element alone; under `pp` it has the parameters of its own stages, so the update of a parameter may
depend on that parameter alone. Any other optimizer would silently compute something else: so each is checked
before its first step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait.errors import PlanError
from plait.plan.parameter_units import kind_of, shards_of
from plait.plan.plan import Plan
from plait.proof.optimizer_probe import Reach, probe

ELEMENTWISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad),
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
        torch.optim.Adadelta,
    }
)
"""Optimizer classes that update elementwise; does not include their subclasses."""
PARAMETERWISE = {
    torch.optim.Adafactor: "divides an element by the mean squares of its row and its column",
    torch.optim.Muon: "makes the update of a whole matrix orthogonal",
}
"""Optimizers of torch whose update of an element depends on its whole parameter, and how."""
COUPLING = {torch.optim.LBFGS: "moves all parameters along one line"}
"""Optimizers of torch whose update depends on all their parameters together, and how."""


@dataclass(frozen=True)
class Partitioning:
    """How a plan divides the parameters between the ranks' optimizers: by stage, and into pieces."""

    pp: int
    """Ranks of `pp`, each with the parameters of its own stages."""
    sharded: bool
    """Whether a rank has pieces of parameters, over `shard`, `cp` or `tp`."""

    @staticmethod
    def of(plan: Plan) -> Partitioning:
        """Return the partitioning under `plan`; offload without sharding divides no parameter."""
        return Partitioning(plan.pp, plan.tp > 1 or shards_of(kind_of(plan), plan) > 1)


def require_elementwise(optimizer: Optimizer, partitioning: Partitioning) -> None:
    """Raise PlanError if `optimizer`'s updates depend on parameters or elements that other ranks hold.

    A class can declare `elementwise = True` or `parameterwise = True` (for itself, not for subclasses). A
    class that does not, and is none of torch's, is tested, see `probe`.
    """
    kind = type(optimizer)
    if not partitioning.sharded and partitioning.pp == 1:
        return
    if kind is torch.optim.SparseAdam:
        raise PlanError("SparseAdam takes sparse gradients, but plait's are dense: take torch.optim.AdamW.")
    reach, reason = _reach_of(optimizer, partitioning)
    if not reason:
        return
    if partitioning.sharded:
        where = "where tensors are sharded an optimizer has pieces of them only"
    else:
        where = f"with plan.pp = {partitioning.pp} an optimizer has the parameters of its own stages only"
    way_out = f"{_plan_for(reach, partitioning)}, or take torch.optim.AdamW"
    if kind not in PARAMETERWISE.keys() | COUPLING.keys():
        word = "elementwise" if partitioning.sharded else "parameterwise"
        way_out += f", or declare `{word} = True` in class {kind.__name__}"
    raise PlanError(f"{kind.__name__} {reason}, but {where}: {way_out}.")


def _reach_of(optimizer: Optimizer, partitioning: Partitioning) -> tuple[Reach, str]:
    """Return the `Reach` of `optimizer`, and why the plan does not allow it, or "" if it does."""
    kind = type(optimizer)
    if kind in ELEMENTWISE or vars(kind).get("elementwise") is True:
        return "element", ""
    if kind in COUPLING:
        return "all", COUPLING[kind]
    if kind in PARAMETERWISE:
        return "parameter", PARAMETERWISE[kind] if partitioning.sharded else ""
    reason = None if vars(kind).get("parameterwise") is True else probe(optimizer, "parameter")
    if reason is not None:
        return "all", reason
    return "parameter", (probe(optimizer, "element") or "") if partitioning.sharded else ""


def is_free_of_order(optimizer: Optimizer) -> bool:
    """Return whether the order of the parameters is known not to matter to the updates of `optimizer`."""
    kind = type(optimizer)
    declared = any(vars(kind).get(name) is True for name in ("elementwise", "parameterwise"))
    return declared or kind in ELEMENTWISE or kind in PARAMETERWISE


def _plan_for(reach: Reach, partitioning: Partitioning) -> str:
    """Return, for an error message, the change of the plan with which an optimizer of this `reach` works."""
    if not partitioning.sharded:
        return "set plan.pp to 1 and leave plan.tp at 1 and plan.strategy at 'none'"
    if reach == "parameter":
        return "set plan.strategy to 'none' and plan.tp to 1"
    return "set plan.strategy to 'none', and plan.tp and plan.pp to 1"


class OptimizerGuard:
    """Raises PlanError before the first step of an optimizer that needs elements which other ranks hold.

    As long as the guard is alive, which the engine holds. Its parameters refer to it, and one hook of torch
    for the process asks them: hooks that come and go would disturb other threads' steps.
    """

    def __init__(
        self,
        pieces: Iterable[nn.Parameter],
        partitioning: Partitioning,
        note_step: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        """`pieces`: the parameters that this rank's optimizer updates. `note_step` is called before steps."""
        self._partitioning = partitioning
        self.note_step = note_step
        self._checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many parameter groups each optimizer had when it was checked."""
        reference = _GuardReference(self)
        for piece in pieces:
            setattr(piece, _ATTRIBUTE, reference)

    def check(self, optimizer: Optimizer) -> None:
        """Raise PlanError if updates of the engine's parameters would need elements that other ranks hold."""
        if isinstance(optimizer, Sequence):
            raise PlanError(
                f"the optimizer is a {type(optimizer).__name__}: give one; with several call "
                "engine.clip_grad_norm_ once, and step() of each."
            )
        if self in _guards_of(optimizer):
            self.check_once(optimizer)

    def check_once(self, optimizer: Optimizer) -> None:
        """Raise PlanError as `check`; an optimizer is checked once, and again after groups were added."""
        groups = len(optimizer.param_groups)
        if self._checked.get(optimizer) != groups:
            require_elementwise(optimizer, self._partitioning)
            self._checked[optimizer] = groups


_ATTRIBUTE = "plait_optimizer_guard"
"""Name of the attribute of a parameter that refers to its guard."""


class _GuardReference:
    """A weak reference to a guard; pickled as an empty dict, so that parameters can be saved."""

    def __init__(self, guard: OptimizerGuard) -> None:
        self.guard = weakref.ref(guard)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # which `torch.load` reads also with `weights_only`


def _guards_of(optimizer: Optimizer) -> set[OptimizerGuard]:
    """Return the guards of the optimizer's parameters."""
    found = set()
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            reference = getattr(parameter, _ATTRIBUTE, None)
            if isinstance(reference, _GuardReference):
                found.add(reference.guard())
    return {guard for guard in found if guard is not None}


def _check_before_step(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Check `optimizer` with the guards of its parameters. A hook of torch, called before each step."""
    for guard in _guards_of(optimizer):
        guard.check_once(optimizer)
        guard.note_step(optimizer)


register_optimizer_step_pre_hook(_check_before_step)
