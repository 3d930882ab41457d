"""Restores and compares the options of parameter groups, such as `lr`, when a checkpoint is loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.compatibility import Sources
from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.optimizer_state import NOT_RESTORED
from plait.errors import CheckpointError

Options = Literal["saved", "given"]
"""Which options a loaded optimizer has: those in the checkpoint, as torch's `load_state_dict`, or its own."""
_MOST, _MOST_SHOWN = 1e300, 80
"""Numbers of options are smaller; characters that are shown of one."""
_CYCLED = ("momentum", "betas")
"""Options that schedulers with `max_momentum` change, too."""


def options_set_by_schedulers(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options of a group that torch's learning-rate schedulers set, such as `lr`.

    Also `initial_lr`, `max_lr` and the like. Nothing where the group starts from another rate than when it
    was saved.
    """
    initial = saved.get("initial_lr")
    if initial is None or initial != now.get("initial_lr", now.get("lr")):
        return {}
    cycled = _CYCLED if "max_momentum" in saved else ()
    own = {"initial_lr", "lr", *cycled, *(key for key in saved if key.startswith(("max_", "min_", "base_")))}
    return {key: value for key, value in saved.items() if key in own}


@torch.no_grad()
def restore_options(
    optimizers: OptimizerSet, names: Mapping[int, str], saved: Mapping[str, Any], options: Options
) -> None:
    """Set the options of each parameter group, such as `lr`, to those saved for the group's parameters.

    With `options` "given" only what `options_set_by_schedulers` has. `names`: this rank's parameters, by id.
    `require_same_groups` has checked that all parameters of a group have the same saved ones.
    """
    for group, _, kept in _to_restore(optimizers, names, saved, options):
        set_options(group, kept)


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options of a parameter group, as read from JSON, each in the type of its current value."""
    group.update({key: _like(value, group.get(key)) for key, value in options.items()})


def require_option_types(
    optimizers: OptimizerSet, names: Mapping[int, str], saved: Mapping[str, Any], options: Options
) -> None:
    """Raise CheckpointError if a saved option, to be restored, has another type than the current one."""
    for group, number, kept in _to_restore(optimizers, names, saved, options):
        for key, value in kept.items():
            if key in group and not _is_alike(group[key], value):
                raise CheckpointError(
                    f"the checkpoint has {key} = {repr(value)[:_MOST_SHOWN]} for group {number} of the "
                    f"optimizer, where {group[key]!r} is given: take another checkpoint, or None for an "
                    "optimizer that starts anew."
                )


def _to_restore(
    optimizers: OptimizerSet, names: Mapping[int, str], saved: Mapping[str, Any], options: Options
) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]]]:
    """Yield each group with the saved ones that had its parameters: their number, and the options to set."""
    for group in optimizers.param_groups:
        for number in {saved["group_of"].get(names[id(parameter)]) for parameter in group["params"]} - {None}:
            of_group = saved["groups"][number]
            kept = of_group if options == "saved" else options_set_by_schedulers(of_group, group)
            yield group, number, {key: value for key, value in kept.items() if key not in NOT_RESTORED}


def _is_alike(now: Any, value: Any) -> bool:
    """Return whether `value`, read from JSON, may stand for an option that is `now`; None may for all."""
    if now is None or value is None:
        return True
    if isinstance(now, list | tuple):
        return isinstance(value, list) and len(value) == len(now) and all(map(_is_alike, now, value))
    if isinstance(now, bool | str):
        return type(value) is type(now)
    if isinstance(now, int | float | Tensor):
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
    return True  # of a kind that JSON lacks


def _like(value: Any, now: Any) -> Any:
    """Return the option `value`, read from JSON, converted to the type of its current value `now`."""
    if isinstance(now, Tensor):
        return now.fill_(value)
    if not isinstance(now, tuple) or not isinstance(value, list):
        return value
    pairs = zip_longest(value, now[: len(value)])
    return tuple(_like(one, before) for one, before in pairs)


def differences(ranks: Iterable[Sources], saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options, by name, that differ from the saved ones: the value now, and the saved value.

    `ranks`: the `group_sources` of each rank. Left out is what a scheduler goes on with. Of several groups
    the first value counts.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for groups in ranks:
        for now, sources in groups:
            for number in sources:
                before = saved["groups"][int(number)]
                for key in before.keys() - options_set_by_schedulers(before, now).keys() - NOT_RESTORED:
                    if key in now and now[key] != before[key]:
                        found.setdefault(key, (now[key], before[key]))
    return dict(sorted(found.items()))


def option_line(found: Mapping[str, tuple[Any, Any]], options: Options) -> str:
    """Return a sentence on options that differ from the saved ones: which values are used."""
    kept = 1 if options == "saved" else 0
    each = ", ".join(f"{key} {both[kept]} in place of {both[1 - kept]}" for key, both in found.items())
    whose = "of the checkpoint" if options == "saved" else "given, not those of the checkpoint"
    return f"The optimizer's settings are those {whose}: {each}."


def require_state_for_options(
    optimizers: OptimizerSet,
    names: Mapping[int, str],
    saved: Mapping[str, Any],
    keys: Mapping[str, Sequence[str]],
) -> None:
    """Raise CheckpointError if an option set anew, such as `amsgrad`, needs state that was not saved.

    AMSGrad's maximum is such state; SGD begins a momentum by itself. `keys`: saved state by parameter.
    """
    for member in optimizers.members:
        for group in member.param_groups:
            tried: set[frozenset[str]] = set()
            for parameter in group["params"]:
                name = names[id(parameter)]
                known = frozenset((*keys.get(name, ()), *saved["plain"].get(name, {})))
                is_new = known and known not in tried
                if is_new and (missing := _missing_state(member, group, parameter, known)):
                    raise CheckpointError(
                        f"the optimizer keeps {missing} for each parameter with its options, which the "
                        f"checkpoint does not hold for {name}: give the options as they were, or None for an "
                        "optimizer that starts anew."
                    )
                tried.add(known)


def _missing_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, known: frozenset[str]
) -> str:
    """Return the state that a step needs and `known` lacks, found by steps of a small copy, or ""."""
    tiny = nn.Parameter(torch.ones((2,) * max(1, parameter.dim())))
    trial = copy.copy(optimizer)
    options = {key: False if key in NOT_RESTORED and value else value for key, value in group.items()}
    trial.param_groups = [copy.deepcopy({**options, "params": []}) | {"params": [tiny]}]
    trial.state = defaultdict(dict)
    try:
        with torch.enable_grad():
            _step(trial, tiny)
    except Exception:  # of any kind: it needs other arguments, and cannot be tried
        return ""
    missing = [key for key in trial.state[tiny] if key not in known]
    for key in missing:
        del trial.state[tiny][key]
    try:
        _step(trial, tiny)
    except Exception:  # a KeyError of torch's optimizers
        return " and ".join(missing)
    return ""


def _step(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
