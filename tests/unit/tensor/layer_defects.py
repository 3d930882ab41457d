"""Parallel layers, broken on purpose as earlier systems were: each defect lasts while it is entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.ranks import Group, Handle, all_gather, all_reduce
from plait.tensor.autograd import paired_collectives
from plait.tensor.autograd.deferred_weight_gradients import embedding, linear
from plait.tensor.autograd.paired_collectives import reduce
from plait.tensor.parallel import embedding_and_norm as embedding_module
from plait.tensor.parallel import linear as linear_module
from plait.tensor.parallel import linear as region_boundary
from plait.tensor.parallel.embedding_and_norm import VocabParallelEmbedding
from plait.tensor.parallel.linear import RowParallelLinear


@contextmanager
def bias_added_by_every_rank() -> Iterator[None]:
    def forward(self: RowParallelLinear, input: Tensor) -> Tensor:
        return reduce(linear(input, self.weight, self.bias, self.queue), self.group)

    with patch.object(RowParallelLinear, "forward", forward):
        yield


@contextmanager
def average_instead_of_sum() -> Iterator[None]:
    def mean(tensor: Tensor, group: Group, **options: Any) -> Handle[Tensor]:
        return all_reduce(tensor, group, "mean", **options)

    with patch.object(paired_collectives, "all_reduce", mean):
        yield


@contextmanager
def reduction_scaled_backward() -> Iterator[None]:
    def reduce_scaled(tensor: Tensor, group: Group) -> Tensor:
        output = reduce(tensor, group)
        return output * group.size - (output * (group.size - 1)).detach()

    with (
        patch.object(region_boundary, "reduce", reduce_scaled),
        patch.object(embedding_module, "reduce", reduce_scaled),
    ):
        yield


@contextmanager
def reduction_summed_again_backward() -> Iterator[None]:
    def reduce_twice(tensor: Tensor, group: Group) -> Tensor:
        return paired_collectives.copy(reduce(tensor, group), group).clone()  # which may be written to

    with (
        patch.object(region_boundary, "reduce", reduce_twice),
        patch.object(embedding_module, "reduce", reduce_twice),
    ):
        yield


@contextmanager
def input_gradient_not_summed() -> Iterator[None]:
    with patch.object(region_boundary, "copy", lambda tensor, *_: tensor):
        yield


@contextmanager
def weight_without_gradient() -> Iterator[None]:
    def detached(input: Tensor, weight: Tensor, bias: Any, queue: Any, **options: Any) -> Tensor:
        return linear(input, weight.detach(), bias, queue, **options)

    with patch.object(linear_module, "linear", detached):
        yield


@contextmanager
def bias_without_gradient() -> Iterator[None]:
    def detached(input: Tensor, weight: Tensor, bias: Any, queue: Any, **options: Any) -> Tensor:
        return linear(input, weight, None if bias is None else bias.detach(), queue, **options)

    with patch.object(linear_module, "linear", detached):
        yield


@contextmanager
def gathered_along_the_first_dim() -> Iterator[None]:
    """The elements of a square tensor arrive, in another order."""

    def gather_first(tensor: Tensor, group: Group, dim: int, size: int) -> Tensor:
        if tensor.shape[dim] == size:
            return tensor
        parts = all_gather(tensor.detach().contiguous(), group).wait()
        own = paired_collectives.gather(tensor, group, dim, size)
        return own + (parts.reshape(own.shape) - own).detach()

    with patch.object(linear_module, "gather", gather_first):
        yield


@contextmanager
def input_cut_along_the_first_dim() -> Iterator[None]:
    """Fits a square input, once transposed."""

    def split_first(tensor: Tensor, group: Group, dim: int) -> Tensor:
        if tensor.dim() == 1:
            return paired_collectives.split(tensor, group, dim)
        return paired_collectives.split(tensor, group, 0).movedim(0, -1)

    with patch.object(linear_module, "split", split_first):
        yield


@contextmanager
def table_without_gradient() -> Iterator[None]:
    def detached(tokens: Tensor, weight: Tensor, padding: Any, queue: Any) -> Tensor:
        return embedding(tokens, weight.detach(), padding, queue).requires_grad_()

    with patch.object(embedding_module, "embedding", detached):
        yield


@contextmanager
def last_rows_lost() -> Iterator[None]:
    """Each rank knows as many rows as an even cut, rounded down, would give it."""
    original = VocabParallelEmbedding.forward

    def forward(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        even = self.num_embeddings // self.group.size

        def lookup(local: Tensor, weight: Tensor, padding: Any, queue: Any) -> Tensor:
            rows = embedding(local, weight, padding, queue)
            return rows.masked_fill((local >= even).unsqueeze(-1), 0)

        with patch.object(embedding_module, "embedding", lookup):
            return original(self, tokens)

    with patch.object(VocabParallelEmbedding, "forward", forward):
        yield


@contextmanager
def first_row_for_strangers() -> Iterator[None]:
    """A token of another rank gives this rank's first row."""
    with patch.object(torch.Tensor, "masked_fill", _fill_numbers_only(torch.Tensor.masked_fill)):
        yield


def _fill_numbers_only(original: Any) -> Any:
    def masked_fill(tensor: Tensor, mask: Tensor, value: Any) -> Tensor:
        return tensor if tensor.is_floating_point() else original(tensor, mask, value)

    return masked_fill


@contextmanager
def padding_learns() -> Iterator[None]:
    def without(tokens: Tensor, weight: Tensor, padding: Any, queue: Any) -> Tensor:
        return embedding(tokens, weight, None, queue)

    with patch.object(embedding_module, "embedding", without):
        yield


@contextmanager
def padding_on_every_rank() -> Iterator[None]:
    """The number of the padding row is taken for one of this rank's, whoever holds it."""
    original = VocabParallelEmbedding.forward

    def forward(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        def lookup(local: Tensor, weight: Tensor, padding: Any, queue: Any) -> Tensor:
            return embedding(local, weight, min(self.padding_idx, len(weight) - 1), queue)

        with patch.object(embedding_module, "embedding", lookup):
            return original(self, tokens)

    with patch.object(VocabParallelEmbedding, "forward", forward):
        yield
