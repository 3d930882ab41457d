"""Tensor parallelism, broken on purpose as earlier systems were: each defect lasts while it is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import parallelize as composer
from plait.engine.sharding.reducer import Reducer
from plait.ranks.collectives import all_reduce
from plait.ranks.handle import Handle
from plait.tensor import losses as softmax_terms
from plait.tensor import sampling
from plait.tensor.autograd import paired_collectives
from plait.tensor.autograd.deferred_weight_gradients import linear
from plait.tensor.autograd.paired_collectives import copy, reduce
from plait.tensor.parallel import embedding_and_norm as embedding
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear
from plait.tensor.parallel.partition import Vocabulary


def replaced_backward(operation: Callable[..., Tensor] | None, change: Callable[..., Tensor]) -> Any:
    """Gradients that `operation` would compute become what `change` gives; None: those of `reduce`."""
    original = paired_collectives._Paired.backward

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if getattr(ctx.gradient_of, "func", None) is not operation:
            return original(ctx, gradient)
        return change(gradient, *getattr(ctx.gradient_of, "args", ())), None, None

    return patch.object(paired_collectives._Paired, "backward", staticmethod(backward))


@contextmanager
def bias_added_by_every_rank() -> Iterator[None]:
    """The bias of a row-parallel linear counts once for each rank."""

    def forward(self: RowParallelLinear, input: Tensor) -> Tensor:
        output = reduce(linear(input, self.weight, None, self.queue), self.group)
        return output + self.bias * self.group.size

    with patch.object(RowParallelLinear, "forward", forward):
        yield


@contextmanager
def average_instead_of_sum() -> Iterator[None]:
    """What regions sum is averaged, as a gradient over data-parallel ranks might be."""

    def mean(tensor: Tensor, group: Any, **options: Any) -> Handle[Tensor]:
        return all_reduce(tensor, group, "mean", **options)

    with patch.object(paired_collectives, "all_reduce", mean):
        yield


@contextmanager
def backward_of_the_reduction_scaled() -> Iterator[None]:
    """The gradient of a sum over T ranks is taken T times."""

    with replaced_backward(None, lambda gradient: gradient * 2):
        yield


@contextmanager
def entrance_without_sum() -> Iterator[None]:
    """The gradient of a region's input stays each rank's own part."""

    with replaced_backward(paired_collectives._sum, lambda gradient, group, overlap: gradient):
        yield


@contextmanager
def columns_learn_nothing() -> Iterator[None]:
    """The weights of column-parallel linears get no gradient."""

    def forward(self: ColumnParallelLinear, input: Tensor) -> Tensor:
        entered = copy(input, self.group) if self.enters else input
        return linear(entered, self.weight.detach(), self.bias, self.queue)

    with patch.object(ColumnParallelLinear, "forward", forward):
        yield


@contextmanager
def last_row_of_each_shard_lost() -> Iterator[None]:
    """A token whose row is the last that a rank holds is looked up as if nobody held it."""

    def lookup(tokens: Tensor, weight: Tensor, padding: int | None, queue: Any) -> Tensor:
        lost = (tokens == len(weight) - 1).unsqueeze(-1)
        return torch.nn.functional.embedding(tokens, weight, padding).masked_fill(lost, 0)

    with patch.object(embedding, "embedding", lookup):
        yield


@contextmanager
def targets_off_by_the_remainder() -> Iterator[None]:
    """The loss takes the vocabulary as cut evenly, where the first ranks hold one row more."""

    def own(self: Vocabulary) -> range:
        each = self.classes // self.group.size
        first = self.group.index * each
        return range(first, first + self.sizes[self.group.index])

    with patch.object(Vocabulary, "own", property(own)):
        yield


@contextmanager
def maximum_of_own_logits() -> Iterator[None]:
    """Each rank subtracts its own largest logit before the exponentials are summed."""

    def skip_maximum(tensor: Tensor, group: Any, op: Any = "sum", **options: Any) -> Handle[Tensor]:
        return Handle.done(tensor, group) if op == "max" else all_reduce(tensor, group, op, **options)

    with patch.object(softmax_terms, "all_reduce", skip_maximum):
        yield


@contextmanager
def copies_not_summed() -> Iterator[None]:
    """Ranks that hold the same key and value heads keep what their own query heads gave."""
    original = Reducer.reduce

    def reduce_others(self: Reducer, name: str) -> None:
        kept = {
            buffer: buffer.replica_group
            for buffer in self.units[name].buffers
            if buffer.replica_group is not None and buffer.replica_group.name == "copies"
        }
        for buffer in kept:
            buffer.replica_group = None
        original(self, name)
        for buffer, group in kept.items():
            buffer.replica_group = group

    with patch.object(Reducer, "reduce", reduce_others):
        yield


@contextmanager
def whole_parameters_counted_by_every_rank() -> Iterator[None]:
    """The norm counts what every rank of `tp` holds alike once for each of them."""
    original = composer.counted_parameters

    def counted(owners: Any, layouts: Any, mesh: Any, axis: str) -> frozenset[str]:
        own = original(owners, layouts, mesh, axis)
        return own | {name for name in owners if "norm" in name and owners[name][0] == mesh.index("pp")}

    with patch.object(composer, "counted_parameters", counted):
        yield


@contextmanager
def each_rank_takes_its_own_best() -> Iterator[None]:
    """The token is the best of a rank's own classes, without asking the others."""

    def own_only(own: Tensor, vocabulary: Any, device: Any) -> Tensor:
        return own[None]

    with patch.object(sampling, "_all_gathered", own_only):
        yield


TENSOR_DEFECTS = {
    bias_added_by_every_rank: "the gradient of",
    average_instead_of_sum: "the gradient of",
    backward_of_the_reduction_scaled: "the gradient of",
    entrance_without_sum: "the gradient of|another gradient of",
    columns_learn_nothing: "the gradient of",
    last_row_of_each_shard_lost: "the gradient of",
    targets_off_by_the_remainder: "the gradient of",
    maximum_of_own_logits: "the gradient of|another loss",
    copies_not_summed: "another gradient of",
    whole_parameters_counted_by_every_rank: "the loss of call 1",  # after a step that was clipped too much
}
"""Each defect, and what the check has to say about it."""
