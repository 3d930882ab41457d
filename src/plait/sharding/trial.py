"""An optimizer is tried out: does another one of its class do the same to pieces as to whole tensors?

A matrix and a vector go through a few steps whole, then cut between two ranks, between rows and inside a row,
with an optimizer for each rank. An optimizer that looks at its tensors' norms, rows, shapes or sizes, or at
all its parameters together, changes some elements otherwise.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

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
"""Of the largest change; the second for those that cannot take double precision."""
LEARNING_RATE = 0.01
"""In place of zero, where a warm-up begins."""
PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))
"""Arguments that another optimizer can be given without any effect on the first."""

Settings: TypeAlias = Mapping[str, Any]
Make: TypeAlias = Callable[[Sequence[nn.Parameter]], Optimizer]
Tensors: TypeAlias = Sequence[Tensor]
Cut: TypeAlias = Callable[[Tensors], Sequence[Tensors]]
"""From the matrix and the vector to what each rank has of them."""


def doubt(optimizer: Optimizer) -> str | None:
    """What speaks against giving pieces to an optimizer, as the end of a sentence about it, if anything does.

    Tried for the settings of each of its groups, on the device of its first parameter. The optimizer itself
    and random states are left as they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        warnings.simplefilter("ignore")
        reasons = (_doubt_of(optimizer, settings, device) for settings in _settings_of(optimizer))
        return next((reason for reason in reasons if reason is not None), None)


def _doubt_of(optimizer: Optimizer, settings: Settings, device: torch.device) -> str | None:
    failures = []
    for dtype, tolerance in TOLERANCES.items():
        try:
            whole, *others = _changes(partial(_twin, optimizer, settings), dtype, device)
        except Exception as failure:  # of any kind, when it wants to be made or used in another way
            failures.append(f"{type(failure).__name__}: {failure}".partition("\n")[0])
            continue
        largest = whole.abs().max()
        if largest == 0 or not largest.isfinite():
            return f"cannot be tried out (its largest change is {largest.item()})"
        if all((other - whole).abs().max() <= tolerance * largest for other in others):
            return None
        return "updates an element by more than that element's own gradient and state"
    return f"cannot be tried out ({failures[0]})"


def _changes(make: Make, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """What some steps change, element by element: of whole tensors, and of those cut in several ways."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensors:
        """Of very different size from row to row, so that all norms differ."""
        matrix = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
        matrix *= torch.logspace(-1, 1, ROWS, dtype=torch.float64)[:, None]
        vector = torch.randn(COLUMNS, generator=generator, dtype=torch.float64)
        return matrix.to(device, dtype), vector.to(device, dtype)

    start, scales = draw(), [GRADIENT_SCALES[step % len(GRADIENT_SCALES)] for step in range(STEPS)]
    gradients = [[scale * tensor for tensor in draw()] for scale in scales]
    cuts: tuple[Cut, ...] = (_uncut, _cut_between_rows, _cut_inside_a_row)
    return [_change(make, cut(start), [cut(step) for step in gradients]) for cut in cuts]


def _change(make: Make, start: Sequence[Tensors], gradients: Sequence[Sequence[Tensors]]) -> Tensor:
    """What the optimizers of all ranks change by taking these steps, as one flat tensor."""
    changes = []
    for rank, tensors in enumerate(start):
        parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        optimizer = make(parameters)
        for step in gradients:
            for parameter, gradient in zip(parameters, step[rank], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        changes += [(now.detach() - then).view(-1) for now, then in zip(parameters, tensors, strict=True)]
    return torch.cat(changes)


def _uncut(tensors: Tensors) -> Sequence[Tensors]:
    return [tensors]


def _cut_between_rows(tensors: Tensors) -> Sequence[Tensors]:
    matrix, vector = tensors
    return [[matrix[:ROW_CUT]], [matrix[ROW_CUT:], vector]]


def _cut_inside_a_row(tensors: Tensors) -> Sequence[Tensors]:
    matrix, vector = tensors
    elements = matrix.view(-1)
    return [[elements[:ELEMENT_CUT]], [elements[ELEMENT_CUT:], vector]]


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


def _twin(optimizer: Optimizer, settings: Settings, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Another optimizer of the same class, with the settings of one of its groups, for other parameters."""
    settings = copy.deepcopy(dict(settings))
    known = {**optimizer.defaults, **settings}
    names = _arguments(type(optimizer), optimizer.defaults)
    arguments = {name: known[name] if name in known else _attribute(optimizer, name) for name in names}
    return type(optimizer)([{**settings, "params": list(parameters)}], **arguments)


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
