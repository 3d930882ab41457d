"""An optimizer's state by the names of parameters, and not by their numbers, which differ from rank to rank.

Of a parameter's state, a tensor of the shape of this rank's piece is cut as the parameter is; one without
dims, such as the count of steps, is a number that all have alike; any other belongs to a whole parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import CheckpointError
from plait.layout import Layout

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of torch's optimizers that have no dims: of a parameter without dims one could not tell them."""
OWN_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How an optimizer computes, and not what: that of the optimizer at hand stays."""
_NO_OPTIONS = frozenset({"params", "param_names"})
_OF_SCHEDULERS = frozenset({"initial_lr"})


def state_of(
    optimizer: torch.optim.Optimizer, name: str, piece: nn.Parameter, layout: Layout
) -> dict[str, tuple[tuple[int, ...] | None, Tensor]]:
    """The tensors that are kept for a parameter: the global shape (None: cut as the parameter is), and here.

    CheckpointError for what has neither the shape of the piece, nor that of anything whole.
    """
    found: dict[str, tuple[tuple[int, ...] | None, Tensor]] = {}
    for key, value in optimizer.state.get(piece, {}).items():
        if "." in str(key):
            raise CheckpointError(f"the optimizer's state of {name} has a key {key!r}: it must have no dot.")
        if not isinstance(value, Tensor):
            continue
        if is_number(key, value.shape, layout.shape):
            found[key] = (), value
        elif value.shape == piece.shape:
            found[key] = None, value
        elif tuple(piece.shape) == layout.shape:
            found[key] = tuple(value.shape), value
        elif value.dim() == 0 and layout.shape == ():
            continue  # nothing of a number lies here; the rank that has it writes what belongs to it
        else:
            raise CheckpointError(
                f"the optimizer keeps {key} of {name} as {list(value.shape)}, where this rank has a piece "
                f"{list(piece.shape)} of {list(layout.shape)}: only what is cut alike can be saved."
            )
    return found


def is_number(key: str, shape: Iterable[int], parameter: tuple[int, ...]) -> bool:
    """Whether a tensor of a state is a number, alike wherever the parameter is."""
    return not tuple(shape) and (parameter != () or key in NUMBERS)


def described(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """What is no tensor: the class, the options of its groups, the group of each parameter, plain values.

    `names`: of this rank's parameters, by `id`. CheckpointError for what JSON cannot hold.
    """
    require_own(optimizer, names)
    group_of: dict[str, int] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            group_of[name] = number
            state = optimizer.state.get(parameter, {})
            values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if values:
                plain[name] = {key: _plain(value, f"{key} of {name}") for key, value in values.items()}
    groups = [
        {key: _plain(value, f"option {key}") for key, value in group.items() if key not in _NO_OPTIONS}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups, "group_of": group_of, "plain": plain}


def require_own(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise CheckpointError for a parameter that is not among `names` (of this rank's, by `id`)."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter {list(parameter.shape)} that is not "
                    "the engine's: give an optimizer of engine.parameters(), and save others by yourself."
                )


def restore_options(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
) -> None:
    """Give the groups the options that they had, such as the learning rate; group by what is in them.

    That they are the same groups was checked before (`require_same_groups`).
    """
    for group in optimizer.param_groups:
        for number in {saved["group_of"].get(names[id(parameter)]) for parameter in group["params"]}:
            if number is not None:
                options = {k: v for k, v in saved["groups"][number].items() if k not in OWN_OPTIONS}
                group.update({key: _like(value, group.get(key)) for key, value in options.items()})


def require_same_class(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """CheckpointError where the state is another optimizer's.

    A class "" is not known, where others wrote it: then it is told by the names of options, if there are any.
    """
    kind = type(optimizer).__name__
    if not saved["class"]:
        there = {key for group in saved["groups"] for key in group} - OWN_OPTIONS - _OF_SCHEDULERS
        wanted = optimizer.defaults.keys() - OWN_OPTIONS
        if there - wanted and wanted - there:  # versions of torch differ in one direction
            raise CheckpointError(
                f"the checkpoint holds the state of an optimizer with {', '.join(sorted(there))}, which "
                f"{kind} is not: give one of the class that was saved, or None for one that starts anew."
            )
    elif kind != saved["class"]:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['class']}, and the optimizer is {kind}: give one of "
            "the same class, or None for an optimizer that starts anew."
        )


def place_of_number(key: str, group: Mapping[str, Any], piece: Tensor) -> torch.device:
    """Where torch's optimizers keep a number: counts of steps on the CPU, unless they compute elsewhere."""
    elsewhere = key != "step" or group.get("fused") or group.get("capturable")
    return piece.device if elsewhere else torch.device("cpu")


def _like(value: Any, now: Any) -> Any:
    """A value of JSON as the type that stands there now."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"the optimizer has {what} = {value!r}, which JSON cannot hold: a checkpoint holds tensors, "
            "numbers and text."
        ) from None
    return value
