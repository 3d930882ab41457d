"""Try an optimizer out: does another one of its class do the same to parts as to all parameters at once?

Matrices and vectors go through a few steps together, then divided between ranks with an optimizer each: whole
parameters apart, or cut between rows and inside a row. An optimizer that looks at norms, rows, shapes or
sizes, or at all its parameters together, changes some elements otherwise.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

ROWS, COLUMNS = 96, 64
"""Of the matrix: some optimizers let tensors of less than 4096 elements alone."""
ROW_CUT, ELEMENT_CUT = 40, 1616
"""Where it is cut: between two rows, or inside one."""
STEPS = 12
"""Some do their particular thing every tenth step only."""
GRADIENT_SCALES = (1.0, 1e-3, 1e3)
"""In turn: some do it to large gradients only."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the largest change in a group; the second for those that cannot take double precision."""
LEARNING_RATE = 0.01
"""In place of zero, where a warm-up begins."""
PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))
"""Arguments that another optimizer can be given without any effect on the first."""

Reach: TypeAlias = Literal["element", "parameter", "all"]
"""What the update of an element may depend on: that element, its parameter, or all parameters together."""
Settings: TypeAlias = Mapping[str, Any]
GroupTensors: TypeAlias = Mapping[str, Tensor]
"""The matrix and the vector of a parameter group, or what a rank has of them."""
RankTensors: TypeAlias = Sequence[GroupTensors]
Make: TypeAlias = Callable[[Sequence[Sequence[nn.Parameter]]], Optimizer]
"""An optimizer of the parameters of each group."""
Cut: TypeAlias = Callable[[RankTensors], Sequence[RankTensors]]
"""From all groups to those of each rank."""


def probe(optimizer: Optimizer, reach: Reach) -> str | None:
    """Return why updates depend on more than `reach`, as the end of a sentence on the optimizer, or None.

    Tried for the settings of all of its groups together, on the device of its first parameter. The optimizer
    itself and random states are left as they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    settings = list(_settings_of(optimizer))
    make = partial(_twin, optimizer, settings)
    failures = []
    with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        warnings.simplefilter("ignore")
        for dtype, tolerance in TOLERANCES.items():
            try:
                return _judged(_changes(make, len(settings), reach, dtype, device), tolerance, reach)
            except Exception as failure:  # of any kind, when it wants to be made or used in another way
                failures.append(f"{type(failure).__name__}: {failure}".partition("\n")[0])
    return f"cannot be tried out ({failures[0]})"


def _judged(changes: Sequence[RankTensors], tolerance: float, reach: Reach) -> str | None:
    """What changes say: of all parameters together first, then of those divided in several ways."""
    whole, *others = changes
    for number, group in enumerate(whole):
        largest = max(change.abs().max() for change in group.values())
        if largest == 0 or not largest.isfinite():
            return f"cannot be tried out (its largest change is {largest.item()})"
        pairs = ((change, other[number][name]) for name, change in group.items() for other in others)
        if not all((mine - theirs).abs().max() <= tolerance * largest for mine, theirs in pairs):
            what = "an element" if reach == "element" else "a parameter"
            return f"updates {what} by more than that {what.split()[1]}'s own gradient and state"
    return None


def _changes(
    make: Make, groups: int, reach: Reach, dtype: torch.dtype, device: torch.device
) -> list[RankTensors]:
    """What some steps change: of all parameters together, and of those divided in several ways."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> GroupTensors:
        """Of very different size from row to row, so that all norms differ."""
        matrix = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
        matrix *= torch.logspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
        vector = torch.randn(COLUMNS, generator=generator, dtype=torch.float64)
        return {"matrix": matrix.to(device, dtype), "vector": vector.to(device, dtype)}

    start = [draw() for _ in range(groups)]
    gradients = []
    for step in range(STEPS):
        scale = GRADIENT_SCALES[step % len(GRADIENT_SCALES)]
        gradients.append([{name: scale * one for name, one in draw().items()} for _ in range(groups)])
    cuts = [_together, *CUTS[reach]]
    if reach == "parameter" and groups > 1:
        cuts.append(_groups_apart)
    return [_change(make, cut(start), [cut(step) for step in gradients]) for cut in cuts]


def _change(
    make: Make, start: Sequence[RankTensors], gradients: Sequence[Sequence[RankTensors]]
) -> RankTensors:
    """What the optimizers of all ranks change by taking these steps: per group and parameter, flat."""
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
    return [{name: torch.cat(pieces) for name, pieces in group.items()} for group in changes]


def _together(groups: RankTensors) -> Sequence[RankTensors]:
    return [groups]


def _parameters_apart(groups: RankTensors) -> Sequence[RankTensors]:
    return [[{name: group[name]} for group in groups] for name in ("matrix", "vector")]


def _groups_apart(groups: RankTensors) -> Sequence[RankTensors]:
    """Each rank has the parameters of one group, and nothing in the others."""
    return [
        [group if number == rank else {} for number, group in enumerate(groups)]
        for rank in range(len(groups))
    ]


def _cut_between_rows(groups: RankTensors) -> Sequence[RankTensors]:
    first = [{"matrix": group["matrix"][:ROW_CUT]} for group in groups]
    return first, [{**group, "matrix": group["matrix"][ROW_CUT:]} for group in groups]


def _cut_inside_a_row(groups: RankTensors) -> Sequence[RankTensors]:
    """Such pieces are one row long, as those of a `Layout` are."""
    elements = [group["matrix"].view(1, -1) for group in groups]
    first = [{"matrix": matrix[:, :ELEMENT_CUT]} for matrix in elements]
    pairs = zip(groups, elements, strict=True)
    return first, [{**group, "matrix": matrix[:, ELEMENT_CUT:]} for group, matrix in pairs]


CUTS: Mapping[Reach, tuple[Cut, ...]] = {
    "element": (_cut_between_rows, _cut_inside_a_row),
    "parameter": (_parameters_apart,),
}


def _settings_of(optimizer: Optimizer) -> Iterable[Settings]:
    """The settings of its groups, those that differ by more than the learning rate."""
    found: dict[str, Settings] = {}
    for group in optimizer.param_groups:
        settings = {key: group[key] for key in group if key not in ("params", "param_names", "initial_lr")}
        if "lr" in settings and settings["lr"] == 0:
            settings["lr"] = settings["lr"] + LEARNING_RATE
        others = {key: value for key, value in settings.items() if key != "lr"}
        found.setdefault(repr(others), settings)
    return found.values()


def _twin(
    optimizer: Optimizer, settings: Sequence[Settings], parameters: Sequence[Sequence[nn.Parameter]]
) -> Optimizer:
    """Another optimizer of the same class, whose groups have these settings and parameters."""
    settings = copy.deepcopy([dict(group) for group in settings])
    known = {**optimizer.defaults, **settings[0]}
    names = _arguments(type(optimizer), optimizer.defaults)
    arguments = {name: known[name] if name in known else _attribute(optimizer, name) for name in names}
    groups = [{**group, "params": list(members)} for group, members in zip(settings, parameters, strict=True)]
    return type(optimizer)(groups, **arguments)


def _arguments(kind: type[Optimizer], defaults: Iterable[str]) -> set[str]:
    """By name what a class is made of besides its parameters, with what it hands on to its bases."""
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
    """What the optimizer was given as `name`, if it has kept that."""
    for kept in (name, f"_{name}"):
        if kept in vars(optimizer) and isinstance(vars(optimizer)[kept], PLAIN):
            return vars(optimizer)[kept]
    raise LookupError(f"it does not keep what it was given as {name}")
