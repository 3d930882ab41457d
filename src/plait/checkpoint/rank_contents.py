"""The tensors that a rank holds, of model and optimizer, as shards of global tensors, and who saves which.

`layout_of_state` says where the optimizer's state of a parameter is: sharded as its parameter, if it has the
same shape. A tensor without dims, such as the step count, is a number that is equal on all ranks. State of
any other shape must belong to a parameter that is not sharded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint.optimizer_set import OptimizerSet
from plait.errors import CheckpointError
from plait.plan.axes import layout_degrees
from plait.plan.layout.layout import Layout
from plait.plan.shard_plan import ShardPlan, replica_ranks
from plait.ranks.mesh import Mesh

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


class Checkpointable(Protocol):
    """The interface of an engine that `save` and `load` use."""

    mesh: Mesh
    run_state: Mapping[str, Any]

    @property
    def shard_plan(self) -> ShardPlan:
        """The distribution of parameters and buffers over ranks, with all names of shared parameters."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError if the optimizer's update of a parameter depends on parameters of another rank."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name and this rank's shard of each parameter of the rank's stages."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each saved buffer of this rank's stages; buffers are not sharded."""


def require_engine(engine: object) -> None:
    """Raise CheckpointError for an object that is no engine, such as its model."""
    if not hasattr(engine, "shard_plan") or not hasattr(engine, "mesh"):
        raise CheckpointError(
            f"the engine is an object of {type(engine).__name__}: give what plait.parallelize returns."
        )


@dataclass(frozen=True)
class RankShard:
    """A rank's shard of a global tensor, and all ranks that hold the same one."""

    name: str
    layout: Layout
    shard: Tensor
    ranks: tuple[int, ...]
    """All ranks that hold the same shard."""


def parameter_key(name: str) -> str:
    """Return the key of a parameter or buffer in a checkpoint."""
    return f"model.{name}"


def state_key(name: str, key: str = "") -> str:
    """Return the checkpoint's key for the entry `key` of a parameter's optimizer state."""
    return f"optim.state.{name}.{key}"


def state_keys(tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return, by parameter name, the optimizer state entries (such as `exp_avg`) among the keys `tensors`."""
    prefix = "optim.state."
    found: dict[str, list[str]] = {}
    for full in tensors:
        if full.startswith(prefix):
            name, _, key = full.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(key)
    return found


def rank_contents(engine: Checkpointable, optimizers: OptimizerSet | None) -> Iterator[RankShard]:
    """Yield this rank's shards of the tensors to save; ranks that hold the same shards use the same order."""
    mesh, shard_plan = engine.mesh, engine.shard_plan

    def held(name: str, layout: Layout, shard: Tensor, stages: Iterable[int]) -> RankShard:
        return RankShard(name, layout, shard, replica_ranks(layout, mesh.coordinate, stages, mesh.sizes))

    for name, shard in engine.named_parameters():
        layout, stages = shard_plan.layouts[name], shard_plan.owners[name]
        yield held(parameter_key(name), layout, shard.detach(), stages)
        if optimizers is not None and (rank := optimizers.state_rank(shard)) is not None:
            for key, state_layout, tensor in whole_state_of(optimizers, name, shard, layout):
                yield RankShard(state_key(name, key), state_layout, tensor, (rank,))
        elif optimizers is not None:
            for key, (state_layout, tensor) in state_of(optimizers, name, shard, layout).items():
                yield held(state_key(name, key), state_layout, tensor.detach(), stages)
    for name, buffer in engine.named_buffers():
        layout = Layout(tuple(buffer.shape), layout_degrees(mesh.sizes))
        yield held(parameter_key(name), layout, buffer.detach().contiguous(), shard_plan.owners[name])


class WriterAssignment:
    """Assigns each shard to one of the ranks that hold it, so that they write equally many bytes.

    Needs no communication: all ranks that hold a shard assign the same shards in the same order before it.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[int]] = {}

    def assign(self, ranks: tuple[int, ...], size: int) -> int:
        """Return which of `ranks` writes the next shard that they hold, of `size` bytes."""
        load = self._loads.setdefault(ranks, [0] * len(ranks))
        least = load.index(min(load))
        load[least] += size
        return ranks[least]


def written_by(shards: Iterable[RankShard], rank: int) -> Iterator[RankShard]:
    """Yield the shards that `rank` writes, out of those it holds; other holders write the rest."""
    writers = WriterAssignment()
    return (shard for shard in shards if writers.assign(shard.ranks, shard.shard.nbytes) == rank)
