"""Check that an optimizer has the parameters and groups that the saved one had, and can have its state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer_state import OWN_OPTIONS, is_number, require_own
from plait.errors import CheckpointError, listed
from plait.layout import Layout

Sources = Sequence[tuple[dict[str, Any], dict[str, str]]]
"""Of each group of this rank's optimizer: its options now, and the saved groups that its parameters come
from, by number (as text, for JSON), each with the name of one of these parameters."""


def require_same_parameters(
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
    with_state: Iterable[str],
) -> None:
    """Raise CheckpointError unless the optimizer has the trainable parameters that the saved one had.

    `pieces`: this rank's parameters. `with_state`: names for which the checkpoint holds tensors of a state.
    """
    require_own(optimizer, {id(piece): name for name, piece in pieces.items()})
    given = {id(one) for group in optimizer.param_groups for one in group["params"]}
    trained = {name: id(piece) in given for name, piece in pieces.items() if piece.requires_grad}
    had = {*saved["group_of"], *saved["plain"], *with_state}
    left_out = [name for name, is_given in trained.items() if name in had and not is_given]
    if left_out:
        raise CheckpointError(
            f"the checkpoint's optimizer had {listed(left_out)}, and the optimizer has not: give one of the "
            "same parameters, or None for an optimizer that starts anew."
        )
    added = [name for name, is_given in trained.items() if is_given and name not in had]
    if added and saved["group_of"]:
        raise CheckpointError(
            f"the optimizer has {listed(added)}, and the checkpoint's had not: give one of the same "
            "parameters, or None for an optimizer that starts anew."
        )


def require_states_fit(
    pieces: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    states: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> None:
    """Raise CheckpointError where a state cannot be cut as its parameter is here.

    `states`: the shapes in the checkpoint, by parameter and key.
    """
    for name, piece in pieces.items():
        whole = layouts[name].shape
        for key, shape in states.get(name, {}).items():
            if not is_number(key, shape, whole) and shape != whole != tuple(piece.shape):
                raise CheckpointError(
                    f"the optimizer kept {key} of {name} as {list(shape)}, which cannot be cut as the "
                    "parameter is here: load it where parameters are whole (strategy none, tp 1)."
                )


def group_sources(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
) -> Sources:
    """Return where the parameters of this rank's groups come from; `names`: of its parameters, by `id`."""
    found = []
    for group in optimizer.param_groups:
        members = [names[id(one)] for one in group["params"]]
        of: dict[str, str] = {}
        for name in members:
            if name in saved["group_of"]:
                of.setdefault(str(saved["group_of"][name]), name)
        left_out = {"params", "param_names", *OWN_OPTIONS}
        options = {key: value for key, value in group.items() if key not in left_out}
        found.append((json.loads(json.dumps(options, default=_as_json)), of))
    return found


def require_same_groups(ranks: Iterable[Sources], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError where groups with other options come from one, or one from groups with others.

    `ranks`: what `group_sources` gives on each of them.
    """
    into: dict[str, tuple[dict[str, Any], str]] = {}
    for sources in ranks:
        for number, (options, of) in enumerate(sources):
            first = next(iter(of), "")
            for other in of:
                apart = _difference(saved["groups"][int(first)], saved["groups"][int(other)])
                if apart:
                    raise CheckpointError(
                        f"group {number} of the optimizer has {of[first]} and {of[other]}, which were in "
                        f"different groups when the checkpoint was written ({apart}): group parameters as "
                        "then."
                    )
            for one, name in of.items():
                known, example = into.setdefault(one, (options, name))
                apart = _difference(known, options)
                if apart:
                    raise CheckpointError(
                        f"the optimizer has {example} and {name} in different groups ({apart}), which were "
                        "in one when the checkpoint was written: group parameters as then, or give both "
                        "groups the same options."
                    )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first option of which two groups have different values, with these; "" where there is none."""
    missing = object()
    for key in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(key, missing), other.get(key, missing)
        if key not in OWN_OPTIONS and missing not in (mine, theirs) and mine != theirs:
            return f"{key} {mine} and {theirs}"
    return ""


def _as_json(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value)
