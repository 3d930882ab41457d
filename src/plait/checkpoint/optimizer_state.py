"""The state of optimizers in a checkpoint: its layouts, the description of its groups, and empty state.

`layout_of_state` says where the optimizer's state of a parameter is: sharded as its parameter, if it has the
same shape. A tensor without dims, such as the step count, is a number that is equal on all ranks. State of
any other shape must belong to a parameter that is not sharded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer_set import OptimizerSet
from plait.errors import CheckpointError
from plait.plan.layout.layout import Layout

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of numbers in torch's optimizers, which the shape does not show for parameters without dims."""


NOT_RESTORED = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Implementation options of an optimizer, which loading does not change."""


NOT_SAVED = frozenset({"params", "param_names"})
"""Entries of a group that are not options."""


def state_of(
    optimizers: OptimizerSet, name: str, shard: nn.Parameter, layout: Layout
) -> dict[str, tuple[Layout, Tensor]]:
    """Return a parameter's state tensors by key, each with its layout.

    Raises CheckpointError for a tensor of another shape than the shard, unless the parameter is not sharded.
    """
    found: dict[str, tuple[Layout, Tensor]] = {}
    for key, value in optimizers.state_of(shard).items():
        _require_no_dot(key, name)
        if not isinstance(value, Tensor):
            continue
        number = _is_number(key, value.shape, layout.shape)
        if value.shape == shard.shape and not number:
            found[key] = layout, value
        elif number or tuple(shard.shape) == layout.shape:
            found[key] = layout_of_state(key, tuple(value.shape), layout), value
        elif value.dim() == 0 and layout.shape == ():
            continue  # this rank's shard of the parameter is empty; another rank saves the state
        else:
            raise CheckpointError(
                f"the optimizer keeps {key} of {name} as {list(value.shape)}, where this rank has a shard "
                f"{list(shard.shape)} of {list(layout.shape)}: only state of the same shape can be saved."
            )
    return found


def whole_state_of(
    optimizers: OptimizerSet, name: str, shard: nn.Parameter, layout: Layout
) -> Iterator[tuple[str, Layout, Tensor]]:
    """Yield key, layout and value of the state tensors of a parameter that only this rank has, whole."""
    for key, value in optimizers.state_of(shard).items():
        _require_no_dot(key, name)
        if isinstance(value, Tensor):
            yield key, Layout(value.shape, layout.axis_degrees), value.detach()


def layout_of_state(key: str, shape: tuple[int, ...], parameter: Layout) -> Layout:
    """Return the layout of optimizer state of a global `shape`: its parameter's, or whole on each rank."""
    alike = shape == parameter.shape and not _is_number(key, shape, parameter.shape)
    return parameter if alike else Layout(shape, parameter.axis_degrees)


def _require_no_dot(key: object, name: str) -> None:
    if "." in str(key):
        raise CheckpointError(f"the optimizer's state of {name} has a key {key!r}: it must have no dot.")


def _is_number(key: str, shape: Iterable[int], parameter: tuple[int, ...]) -> bool:
    """Return whether a state tensor is one number for the whole parameter, such as its step count."""
    return not tuple(shape) and (parameter != () or key in NUMBERS)


def describe(optimizers: OptimizerSet, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the optimizers' classes, parameter groups and other state by parameter name, as JSON values.

    `names`: of this rank's parameters, by `id`. Raises CheckpointError for values that JSON cannot hold.
    """
    optimizers.require_own_parameters(names)
    group_of: dict[str, int] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(optimizers.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            group_of[name] = number
            state = optimizers.state_of(parameter)
            values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if values:
                plain[name] = {key: _plain(value, f"{key} of {name}") for key, value in values.items()}
    groups = [
        {key: _plain(value, f"option {key}") for key, value in group.items() if key not in NOT_SAVED}
        for group in optimizers.param_groups
    ]
    found = {"class": optimizers.kind, "groups": groups, "group_of": group_of, "plain": plain}
    return found if len(optimizers.members) == 1 else found | {"class_of": optimizers.members_of(names)}


def merge_optimizers(
    optimizers: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[list[int]]]:
    """Merge all ranks' optimizer descriptions; return also the indices of each rank's groups in it.

    Groups of two ranks are the same if their options are. Where one rank has several groups with the same
    options, the first of them is the first of every rank, and so on.
    """
    groups: list[Any] = []
    numbers_of: dict[str, list[int]] = {}
    group_of: dict[str, int] = {}
    plain: dict[str, Any] = {}
    class_of: dict[str, Any] = {}
    numbers_by_rank = []
    for optimizer in optimizers:
        numbers, seen = list[int](), Counter[str]()
        for group in optimizer["groups"]:
            options = json.dumps(group, sort_keys=True)
            same = numbers_of.setdefault(options, [])
            if seen[options] == len(same):
                same.append(len(groups))
                groups.append(group)
            numbers.append(same[seen[options]])
            seen[options] += 1
        group_of |= {name: numbers[number] for name, number in optimizer["group_of"].items()}
        plain |= optimizer["plain"]
        class_of |= optimizer.get("class_of", {})
        numbers_by_rank.append(numbers)
    merged = {"class": optimizers[0]["class"], "groups": groups, "group_of": group_of, "plain": plain}
    return merged | ({"class_of": class_of} if class_of else {}), numbers_by_rank


def number_device(key: str, group: Mapping[str, Any], shard: Tensor) -> torch.device:
    """Return the device of a scalar state tensor: the CPU for step counts, unless fused or capturable."""
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return shard.device if on_device else torch.device("cpu")


def empty_state(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shard: nn.Parameter,
    layout: Layout,
    group: Mapping[str, Any],
    *,
    same_dtype: bool,
    whole: bool = False,
) -> tuple[Tensor, Layout]:
    """Return an empty tensor for this rank's optimizer state `key` of a global `shape`, and its layout.

    `same_dtype`: whether it had its parameter's dtype where it was `dtype`. `whole`: whether this rank has
    all of it, however its parameter is sharded.
    """
    found = Layout(shape, layout.axis_degrees) if whole else layout_of_state(key, shape, layout)
    if _is_number(key, shape, layout.shape):
        return torch.empty((), dtype=dtype, device=number_device(key, group, shard)), found
    dtype = shard.dtype if same_dtype else dtype
    if found is layout:
        return torch.empty_like(shard, dtype=dtype, requires_grad=False), found
    assert whole or tuple(shard.shape) == layout.shape, "see require_states_shardable"
    return torch.empty(found.shape, dtype=dtype, device=shard.device), found


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
