"""Which rows of tokens each expert computes: pairs of a token and an expert, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from plait.plan.layout.layout import divide
from plait.tensor.experts.grouped_products import Groups


@dataclass(frozen=True)
class Assignments:
    """The pairs of a token and one of its experts; in order of the expert, and for one expert of the token.

    A pair is a row of the products. Letters: T tokens, k experts of a token, A pairs. All tensors are int32.
    """

    groups: Groups
    """The pairs of each expert."""
    top_k: int
    """k."""
    slots: Tensor
    """`[A]`: the index of each pair in the flattened `[T, k]`."""
    by_token: Tensor
    """`[A]`: numbers of pairs in order of the token, and for one token of the expert."""
    firsts: Tensor
    """`[T]`: where in `by_token` each token's pairs begin."""

    @property
    def tokens(self) -> Tensor:
        """The token of each pair: `[A]`."""
        return self.slots // self.top_k

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return a row for each pair, `[A, width]`, of `[T, width]`."""
        return tokens.index_select(0, self.tokens)

    def weights_of(self, weights: Tensor) -> Tensor:
        """Return the weight of each pair, `[A, 1]`, of `[T, k]`."""
        return weights.reshape(-1, 1).index_select(0, self.slots)

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum over each token's pairs, in order of the expert: `[T, width]` of `[A, width]`."""
        return functional.embedding_bag(self.by_token, rows, self.firsts, mode="sum")

    def in_slots(self, values: Tensor, like: Tensor) -> Tensor:
        """Return values of pairs, `[A]`, in a tensor like `[T, k]`; zero where a slot is no pair."""
        result = torch.zeros_like(like)
        result.view(-1).index_copy_(0, self.slots.long(), values.to(like.dtype))
        return result


def assign(indices: Tensor, experts: range, sizes: tuple[int, ...] | None = None) -> Assignments:
    """Return the pairs of tokens and `experts`, given the experts' numbers `[T, k]` of each token.

    Other numbers, of experts elsewhere or -1 for none, are no pairs. `sizes`: how many pairs each expert has,
    where that is known; else it is read from the device. On meta every expert gets as many.
    """
    tokens, top_k = indices.shape
    local = indices - experts.start
    is_pair = (local >= 0) & (local < len(experts))
    keys, slots = local.masked_fill(~is_pair, len(experts)).flatten().sort(stable=True)
    numbers = torch.arange(len(experts), device=indices.device)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    if sizes is None and indices.is_meta:
        sizes = tuple(map(len, divide(tokens * top_k, len(experts))))
    elif sizes is None:
        sizes = tuple(end - start for start, end in pairwise([0, *ends.tolist()]))
    slots = slots[: sum(sizes)].int()
    of_token = is_pair.sum(1, dtype=torch.int32)
    firsts = of_token.cumsum(0, dtype=torch.int32) - of_token
    by_token = (slots // top_k).argsort(stable=True).int()
    return Assignments(Groups(sizes, ends), top_k, slots, by_token, firsts)
