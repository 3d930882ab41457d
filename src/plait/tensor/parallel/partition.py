"""Partitions over the ranks of `tp`: of a linear's features, and of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError, PlanError, listed
from plait.plan.layout.layout import Layout, Shard, divide
from plait.plan.layout.shards import shard
from plait.ranks.group import Group, alone

AXIS = "tp"
Axes = Mapping[str, int]
"""Degrees by mesh axis, including `tp`."""
Layers = Sequence[tuple[str, nn.Module]]
"""The layers of a model with their paths."""


@dataclass(frozen=True)
class Partition:
    """The division of a weight's dim between ranks: equal parts, unless `uneven`.

    `parts`: the dim consists of that many equal parts (heads), none of which is divided. `repeated`: there
    may be fewer parts than ranks; neighbouring ranks then hold the same part. `uneven`: the first ranks may
    hold one row more. `blocks`: the dim consists of that many equal blocks, each partitioned by itself;
    `parts` are those of one block. Or the number of parts of each block, where blocks differ.
    """

    parts: int | None = None
    repeated: bool = False
    uneven: bool = False
    blocks: int | tuple[int, ...] = 1


EVEN = Partition()
UNEVEN = Partition(uneven=True)


def column_layouts(
    outputs: int, inputs: int, partition: Partition, axes: Axes, path: str, *, transposed: bool = False
) -> dict[str, Layout]:
    """Return the layouts of a linear with partitioned outputs: weight `[outputs, inputs]` and bias by dim 0.

    `transposed`: the weight is `[inputs, outputs]`, sharded by dim 1. PlanError where `partition` does not
    fit.
    """
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    bias = _shard(outputs, shape, partition, axes[AXIS], path)
    weight = replace(bias, dim=1 if transposed else 0)
    return {"weight": Layout(shape, axes, {AXIS: weight}), "bias": Layout((outputs,), axes, {AXIS: bias})}


def row_layouts(
    outputs: int, inputs: int, partition: Partition, axes: Axes, path: str, *, transposed: bool = False
) -> dict[str, Layout]:
    """Return layouts of a linear with partitioned inputs: weight `[outputs, inputs]` by dim 1, bias whole.

    `transposed`: the weight is `[inputs, outputs]`, sharded by dim 0. `repeated` is ignored, because the sum
    over the ranks would count a part once for each rank that holds it. Raises PlanError as above.
    """
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    copies = _copies(inputs, shape, replace(partition, repeated=False), axes[AXIS], path)
    weight = {AXIS: Shard(0 if transposed else 1, copies)}
    return {"weight": Layout(shape, axes, weight), "bias": Layout((outputs,), axes)}


def is_sharded(layout: Layout) -> bool:
    """Return whether a parameter is sharded over more than one rank of `tp`."""
    if AXIS not in layout.axes:
        return False
    tp = layout.axes.index(AXIS)
    return layout.degrees[tp] > 1 and isinstance(layout.placements[tp], Shard)


def local_shard(parameter: Tensor, layout: Layout, group: Group) -> nn.Parameter:
    """Return this rank's shard of a whole parameter, as a parameter."""
    return nn.Parameter(shard(parameter, layout, {AXIS: group.index}), parameter.requires_grad)


def norm_layouts(features: int, partition: Partition, axes: Axes, path: str) -> dict[str, Layout]:
    """Return the layout of the weight of a norm over partitioned features. PlanError as `column_layouts`."""
    return {"weight": column_layouts(features, features, partition, axes, path)["bias"]}


def partitioned_layouts(module: nn.Module, partition: Partition, axes: Axes, path: str) -> dict[str, Layout]:
    """Return layouts of a module's own parameters, partitioned by dim 0. PlanError as `column_layouts`."""
    found = dict[str, Layout]()
    for name, parameter in module.named_parameters(recurse=False):
        rows = Shard(0, _copies(len(parameter), (len(parameter), 1), partition, axes[AXIS], f"{path}.{name}"))
        found[name] = Layout(parameter.shape, axes, {AXIS: rows})
    return found


def _shard(features: int, shape: tuple[int, int], partition: Partition, ranks: int, path: str) -> Shard:
    """Return the sharding of a column linear's bias. Raises PlanError unless `partition` fits."""
    if not isinstance(partition.blocks, tuple):
        return Shard(0, _copies(features, shape, partition, ranks, path), partition.blocks)
    refused = f"{path} with a weight of shape {list(shape)} cannot be partitioned over tp = {ranks}:"
    parts = sum(partition.blocks)
    if min(partition.blocks) < 1 or features % parts:
        raise PlanError(
            f"{refused} its {features} features are not {parts} equal parts (heads); name attributes that "
            "divide them."
        )
    smallest = math.gcd(*partition.blocks)
    if smallest % ranks:
        fitting = [str(n) for n in range(1, smallest + 1) if smallest % n == 0]
        counts = listed([str(count) for count in partition.blocks])
        raise PlanError(
            f"{refused} its blocks of {counts} parts (heads) do not divide into {ranks}; "
            f"set tp to {' or '.join(fitting)}, or change the model's sizes."
        )
    return Shard(0, blocks=tuple(features // parts * one for one in partition.blocks))


def _copies(features: int, shape: tuple[int, int], partition: Partition, ranks: int, path: str) -> int:
    """Return how many ranks hold each part of the features. Raises PlanError unless `partition` fits."""
    assert isinstance(partition.blocks, int)
    if partition.uneven and features >= ranks:
        return 1
    refused = f"{path} with a weight of shape {list(shape)} cannot be partitioned over tp = {ranks}:"
    if partition.blocks < 1 or features % partition.blocks:
        raise PlanError(
            f"{refused} its {features} features are not {partition.blocks} equal blocks: correct their "
            "number."
        )
    features //= partition.blocks
    parts = features if partition.parts is None else partition.parts
    if parts < 1 or features % parts:
        raise PlanError(
            f"{refused} its {features} features are not {parts} equal parts (heads); name an attribute that "
            "divides them."
        )
    if parts % ranks == 0:
        return 1
    if partition.repeated and ranks % parts == 0:
        return ranks // parts
    what = f"{features} features" if partition.parts is None else f"{parts} parts (heads)"
    fitting = [
        n
        for n in range(1, ranks)
        if parts % n == 0 or partition.uneven or (partition.repeated and n % parts == 0)
    ]
    raise PlanError(
        f"{refused} its {what} do not divide into {ranks}; set tp to {' or '.join(map(str, fitting))}, or "
        "change the model's sizes."
    )


@dataclass(frozen=True)
class Vocabulary:
    """The `classes` of the logits, divided between the ranks of `group`; a rank may have none.

    Each rank has a range of them, from `layout.divide`.
    """

    classes: int
    group: Group

    @staticmethod
    def of_one_rank(classes: int) -> Vocabulary:
        """Return a `Vocabulary` all of whose classes are on this rank, over a group of one rank."""
        return Vocabulary(classes, alone("tp"))

    @cached_property
    def own(self) -> range:
        """This rank's class numbers: the indices of its rows of the last linear's weight."""
        return divide(self.classes, self.group.size)[self.group.index]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each rank of the group."""
        return tuple(map(len, divide(self.classes, self.group.size)))

    def require_vocabulary_shard(self, output: Any) -> Tensor:
        """Return `output` if its shape is this rank's logits', `[..., len(own)]`; else raise ModelError."""
        if isinstance(output, Tensor) and output.dim() and output.shape[-1] == len(self.own):
            return output
        given = f"of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"the model's output on rank {self.group.rank} is {given}: with its head partitioned by "
            f"vocabulary over {self.group.name} it has to be one tensor of logits [..., {len(self.own)}], "
            f"{len(self.own)} of the {self.classes} classes, so make the head the model's last operation."
        )
