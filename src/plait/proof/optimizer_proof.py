"""Proof that an optimizer on one rank updates its parameters as an optimizer of the whole model would.

Where parameters are sharded a rank's optimizer has shards of them, so the update of an element may depend on
that element alone; under `pp` it has the parameters of its own stages, so the update of a parameter may
depend on that parameter alone. Any other optimizer would silently compute something else: so each is checked
before its first step.

Matrices and vectors take a few steps together, then divided between optimizers: whole parameters apart, or
cut between rows and inside a row. An optimizer that depends on norms, rows, shapes or sizes, or on all its
parameters together, updates some elements differently.
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from plait.errors import PlanError
from plait.plan.parameter_units import BufferKind, shards_of
from plait.plan.plan import Plan
from plait.ranks.accelerator import keep_random_state

ROWS, COLUMNS = 96, 64
"""Of the matrix: some optimizers treat tensors of less than 4096 elements differently."""
ROW_CUT, ELEMENT_CUT = 40, 1616
"""The row, and the element inside a row, at which it is cut."""
STEPS = 12
"""Some optimizers differ in every tenth step only."""
GRADIENT_SCALES = (1.0, 1e-3, 1e3)
"""Used in turn: some optimizers differ for large gradients only."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative to the largest change in a group; float32 for optimizers without double precision."""
LEARNING_RATE = 0.01
"""Replaces a learning rate of zero, as at the start of a warm-up."""
PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))
"""Types of arguments that two optimizers can share."""

Reach: TypeAlias = Literal["element", "parameter", "all"]
"""What the update of an element may depend on: that element, its parameter, or all parameters together."""
Settings: TypeAlias = Mapping[str, Any]
GroupTensors: TypeAlias = Mapping[str, Tensor]
"""The matrix and the vector of a parameter group, or a rank's part of them."""
RankTensors: TypeAlias = Sequence[GroupTensors]
OptimizerFactory: TypeAlias = Callable[[Sequence[Sequence[nn.Parameter]]], Optimizer]
"""Returns an optimizer for the parameters of each group."""
Division: TypeAlias = Callable[[RankTensors], Sequence[RankTensors]]
"""Divides all groups between ranks."""


def probe(optimizer: Optimizer, reach: Reach, given: Settings | None = None) -> str | None:
    """Return None if updates of `optimizer` depend on no more than `reach` allows, else the reason as text.

    Tested with the settings of all of its groups together, on the device of its first parameter. Neither the
    optimizer nor random states change. `given`: the arguments with which it was made, beside parameters;
    None: not known, so they are sought among its defaults and attributes.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    settings = list(_settings_of(optimizer))
    make = partial(_copy_of, optimizer, settings, given)
    failures = []
    with warnings.catch_warnings(), keep_random_state(device):
        warnings.simplefilter("ignore")
        for dtype, tolerance in TOLERANCES.items():
            try:
                return _difference(_changes(make, len(settings), reach, dtype, device), tolerance, reach)
            except Exception as failure:  # of any kind: it needs other arguments or another use
                failures.append(f"{type(failure).__name__}: {failure}".partition("\n")[0])
    return f"cannot be tested ({failures[0]})"


def _difference(changes: Sequence[RankTensors], tolerance: float, reach: Reach) -> str | None:
    """Return why the test steps' `changes` differ between divisions or cannot be compared; None if equal."""
    whole, *others = changes
    for number, group in enumerate(whole):
        largest = max(change.abs().max() for change in group.values())
        if largest == 0 or not largest.isfinite():
            return f"cannot be tested (its largest change is {largest.item()})"
        pairs = ((change, other[number][name]) for name, change in group.items() for other in others)
        if not all((mine - theirs).abs().max() <= tolerance * largest for mine, theirs in pairs):
            what = "an element" if reach == "element" else "a parameter"
            return f"updates {what} by more than that {what.split()[1]}'s own gradient and state"
    return None


def _changes(
    make: OptimizerFactory, groups: int, reach: Reach, dtype: torch.dtype, device: torch.device
) -> list[RankTensors]:
    """Return the parameters' changes in test steps: all on one rank, then in each division between ranks."""
    generator = torch.Generator().manual_seed(0)

    def random_group() -> GroupTensors:
        """Return random tensors whose rows have very different magnitudes, so that all norms differ."""
        matrix = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
        matrix *= torch.logspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
        vector = torch.randn(COLUMNS, generator=generator, dtype=torch.float64)
        return {"matrix": matrix.to(device, dtype), "vector": vector.to(device, dtype)}

    start = [random_group() for _ in range(groups)]
    gradients = []
    for step in range(STEPS):
        scale = GRADIENT_SCALES[step % len(GRADIENT_SCALES)]
        gradients.append([{name: scale * one for name, one in random_group().items()} for _ in range(groups)])
    cuts = [lambda groups: [groups], *CUTS[reach]]
    if reach == "parameter" and groups > 1:
        cuts.append(_groups_apart)
    return [_change(make, cut(start), [cut(step) for step in gradients]) for cut in cuts]


def _change(
    make: OptimizerFactory, start: Sequence[RankTensors], gradients: Sequence[Sequence[RankTensors]]
) -> RankTensors:
    """Run the test steps with one optimizer per rank; return by parameter group each parameter's change."""
    changes: list[dict[str, list[Tensor]]] = [{} for _ in start[0]]
    for rank, groups in enumerate(start):
        held = [{name: nn.Parameter(tensor.clone()) for name, tensor in group.items()} for group in groups]
        optimizer = make([list(group.values()) for group in held])
        for step in gradients:
            for mine, theirs in zip(held, step[rank], strict=True):
                for name, parameter in mine.items():
                    parameter.grad = theirs[name].clone()
            optimizer.step()
        for found, now, then in zip(changes, held, groups, strict=True):
            for name, parameter in now.items():
                found.setdefault(name, []).append((parameter.detach() - then[name]).view(-1))
    return [{name: torch.cat(found) for name, found in group.items()} for group in changes]


def _parameters_apart(groups: RankTensors) -> Sequence[RankTensors]:
    return [[{name: group[name]} for group in groups] for name in ("matrix", "vector")]


def _groups_apart(groups: RankTensors) -> Sequence[RankTensors]:
    """Divide parameter groups between ranks: rank i gets the tensors of group i and of no other."""
    return [
        [group if number == rank else {} for number, group in enumerate(groups)]
        for rank in range(len(groups))
    ]


def _cut_between_rows(groups: RankTensors) -> Sequence[RankTensors]:
    first = [{"matrix": group["matrix"][:ROW_CUT]} for group in groups]
    return first, [{**group, "matrix": group["matrix"][ROW_CUT:]} for group in groups]


def _cut_inside_a_row(groups: RankTensors) -> Sequence[RankTensors]:
    """Divide tensors between two ranks, with the matrix cut inside a row, as a `Layout` may cut it."""
    elements = [group["matrix"].view(1, -1) for group in groups]
    first = [{"matrix": matrix[:, :ELEMENT_CUT]} for matrix in elements]
    pairs = zip(groups, elements, strict=True)
    return first, [{**group, "matrix": matrix[:, ELEMENT_CUT:]} for group, matrix in pairs]


CUTS: Mapping[Reach, tuple[Division, ...]] = {
    "element": (_cut_between_rows, _cut_inside_a_row),
    "parameter": (_parameters_apart,),
}


def _settings_of(optimizer: Optimizer) -> Iterable[Settings]:
    """Return the settings of the parameter groups, once for groups that differ in learning rate only."""
    found: dict[str, Settings] = {}
    for group in optimizer.param_groups:
        settings = {key: group[key] for key in group if key not in ("params", "param_names", "initial_lr")}
        if "lr" in settings and settings["lr"] == 0:
            settings["lr"] = settings["lr"] + LEARNING_RATE
        others = {key: value for key, value in settings.items() if key != "lr"}
        found.setdefault(repr(others), settings)
    return found.values()


def _copy_of(
    optimizer: Optimizer,
    settings: Sequence[Settings],
    given: Settings | None,
    parameters: Sequence[Sequence[nn.Parameter]],
) -> Optimizer:
    """Return a new optimizer of the same class, whose parameter groups have these settings and parameters."""
    settings = copy.deepcopy([dict(group) for group in settings])
    arguments = given
    if arguments is None:
        known = {**optimizer.defaults, **settings[0]}
        names = _arguments(type(optimizer), optimizer.defaults)
        arguments = {name: known[name] if name in known else _attribute(optimizer, name) for name in names}
    groups = [{**group, "params": list(members)} for group, members in zip(settings, parameters, strict=True)]
    return type(optimizer)(groups, **arguments)


def _arguments(kind: type[Optimizer], defaults: Iterable[str]) -> set[str]:
    """Return the names of the constructor arguments of an optimizer class and its bases, without `params`."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base is Optimizer:
            return names.union(defaults)
        if "__init__" not in vars(base):
            continue
        _, *taken = inspect.signature(vars(base)["__init__"]).parameters.values()
        if taken and taken[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            del taken[0]  # the parameters
        gathering = [one for one in taken if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        names.update(one.name for one in taken if one not in gathering)
        if not any(one.kind is one.VAR_KEYWORD for one in gathering):
            break
    return names


def _attribute(optimizer: Optimizer, name: str) -> Any:
    """Return constructor argument `name` from attribute `name` or `_name`; LookupError if neither has it."""
    for kept in (name, f"_{name}"):
        if kept in vars(optimizer) and isinstance(vars(optimizer)[kept], PLAIN):
            return vars(optimizer)[kept]
    raise LookupError(f"it does not keep what it was given as {name}")


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
    """How a plan divides the parameters between the ranks' optimizers: by stage, and into shards."""

    pp: int
    """Ranks of `pp`, each with the parameters of its own stages."""
    sharded: bool
    """Whether a rank has shards of parameters, over `shard`, `cp` or `tp`."""

    @staticmethod
    def of(plan: Plan, kinds: Iterable[BufferKind]) -> Partitioning:
        """Return how `plan` divides parameters of `kinds`; offload without sharding divides none."""
        return Partitioning(plan.pp, plan.tp > 1 or any(shards_of(kind, plan) > 1 for kind in kinds))


def communicating_class(make: object) -> type[Any] | None:
    """Return the optimizer class that `make` is, or a `partial` of, if its steps communicate; else None."""
    kind = make.func if isinstance(make, partial) else make
    return kind if isinstance(kind, type) and vars(kind).get("communicates") is True else None


def require_elementwise(optimizer: Optimizer, partitioning: Partitioning) -> None:
    """Raise PlanError if `optimizer`'s updates depend on parameters or elements that other ranks hold.

    A class can declare `elementwise = True` or `parameterwise = True` (for itself, not for subclasses), or
    `communicates = True`, where its steps get from other ranks what they need. A class that does not, and is
    none of torch's, is tested, see `probe`.
    """
    kind = type(optimizer)
    if communicating_class(kind) is not None or (not partitioning.sharded and partitioning.pp == 1):
        return
    if kind is torch.optim.SparseAdam:
        raise PlanError("SparseAdam takes sparse gradients, but plait's are dense: take torch.optim.AdamW.")
    reach, reason = _reach_of(optimizer, partitioning)
    if not reason:
        return
    if partitioning.sharded:
        where = "where tensors are sharded an optimizer has shards of them only"
        way_out = "set plan.strategy to 'none', and plan.tp and plan.pp to 1"
        if reach == "parameter":
            owned = "Muon(" if kind is torch.optim.Muon else f"Owned({kind.__name__}, "
            way_out = f"take plait.{owned}engine, ...), set plan.strategy to 'none' and plan.tp to 1"
    else:
        where = f"with plan.pp = {partitioning.pp} an optimizer has the parameters of its own stages only"
        way_out = "set plan.pp to 1 and leave plan.tp at 1 and plan.strategy at 'none'"
    way_out += ", or take torch.optim.AdamW"
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


def require_parameterwise(optimizer: Optimizer, given: Settings) -> None:
    """Raise PlanError if `optimizer` updates a parameter by more than that parameter's gradient and state.

    For optimizers that have whole parameters, but not all of the model's. What a class may declare, and how
    others are tested, is as for `require_elementwise`. `given`: its arguments, beside parameters.
    """
    kind = type(optimizer)
    declared = any(vars(kind).get(name) is True for name in ("elementwise", "parameterwise"))
    if declared or kind in ELEMENTWISE or kind in PARAMETERWISE:
        return
    reason = COUPLING[kind] if kind in COUPLING else probe(optimizer, "parameter", given)
    if reason:
        way_out = "take an optimizer that updates each parameter by itself"
        if kind not in COUPLING:
            way_out += f", or declare `parameterwise = True` in class {kind.__name__}"
        raise PlanError(
            f"{kind.__name__} {reason}, but with plait.Owned an optimizer has the parameters that its rank "
            f"owns only: {way_out}."
        )


def is_free_of_order(optimizer: Optimizer) -> bool:
    """Return whether the order of the parameters is known not to matter to the updates of `optimizer`."""
    kind = type(optimizer)
    names = ("elementwise", "parameterwise", "communicates")
    declared = any(vars(kind).get(name) is True for name in names)
    return declared or kind in ELEMENTWISE or kind in PARAMETERWISE


class OptimizerGuard:
    """Raises PlanError before the first step of an optimizer that needs elements which other ranks hold.

    As long as the guard is alive, which the engine holds. Its parameters refer to it, and one hook of torch
    for the process asks them: hooks that come and go would disturb other threads' steps.
    """

    def __init__(
        self,
        shards: Iterable[nn.Parameter],
        partitioning: Partitioning,
        note_step: Callable[[Optimizer], None] = lambda optimizer: None,
        originals: Iterable[nn.Parameter] = (),
    ) -> None:
        """`shards`: the parameters that this rank's optimizer updates. `note_step` is called before steps.

        `originals`: parameters of the user's model, of which the engine has copies; they are not kept alive.
        """
        self._partitioning = partitioning
        self._originals = [weakref.ref(one) for one in originals]
        self.note_step = note_step
        self._checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many parameter groups each optimizer had when it was checked."""
        reference = _GuardReference(self)
        for shard in shards:
            setattr(shard, _ATTRIBUTE, reference)

    def check(self, optimizer: Optimizer) -> None:
        """Raise PlanError if updates of the engine's parameters would need elements that other ranks hold.

        Also if it would update parameters of the user's model, and none of the engine's.
        """
        if isinstance(optimizer, Sequence):
            raise PlanError(
                f"the optimizer is a {type(optimizer).__name__}: give one; with several call "
                "engine.clip_grad_norm_ once, and step() of each."
            )
        if self in _guards_of(optimizer):
            self.check_once(optimizer)
            return
        held = {id(one) for group in getattr(optimizer, "param_groups", ()) for one in group["params"]}
        if any(id(one()) in held for one in self._originals):
            raise PlanError(
                f"{type(optimizer).__name__} has parameters of the model, of which the engine has copies: "
                "make it of engine.parameters()."
            )

    def check_once(self, optimizer: Optimizer) -> None:
        """Raise PlanError as `check` does, but test each optimizer once, and again after new groups."""
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
    groups = getattr(optimizer, "param_groups", ())
    held = (getattr(parameter, _ATTRIBUTE, None) for group in groups for parameter in group["params"])
    found = {reference.guard() for reference in held if isinstance(reference, _GuardReference)}
    return {guard for guard in found if guard is not None}


def _check_before_step(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Check `optimizer` with the guards of its parameters. A hook of torch, called before each step."""
    for guard in _guards_of(optimizer):
        guard.check_once(optimizer)
        guard.note_step(optimizer)


register_optimizer_step_pre_hook(_check_before_step)
