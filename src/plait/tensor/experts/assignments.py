"""Which tokens each expert computes: pairs of a token and an expert, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.plan.layout.layout import divide
from plait.tensor.experts.copies_of_tokens import TokenRows
from plait.tensor.experts.grouped_products import Groups


@dataclass(frozen=True)
class Assignments:
    """The pairs of a token and one of its experts; in order of the expert, and for one expert of the token.

    Letters: T tokens, k experts of a token, A pairs, each a row of the products.
    """

    groups: Groups
    """The pairs of each expert."""
    rows: TokenRows
    """The token of each pair."""
    slots: Tensor
    """int32 `[A]`: the index of each pair in the flattened `[T, k]`."""

    def weights_of(self, weights: Tensor) -> Tensor:
        """Return the weight of each pair, `[A, 1]`, of `[T, k]`."""
        return weights.reshape(-1, 1).index_select(0, self.slots)

    def in_slots(self, values: Tensor, like: Tensor) -> Tensor:
        """Return values of pairs, `[A]`, in a tensor like `[T, k]`; zero where a slot is no pair."""
        result = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        result.view(-1).index_copy_(0, self.slots.long(), values.to(like.dtype))
        return result


def assign(
    indices: Tensor, experts: range, sizes: tuple[int, ...] | None = None, *, all_chosen: bool = False
) -> Assignments:
    """Return the pairs of a token and an expert, given the experts' numbers `[T, k]` of each token.

    Other numbers, of experts elsewhere or -1 for none, are no pairs. `sizes`: how many pairs each expert has,
    where that is known. `all_chosen`: whether no index is another number; else, without `sizes`, the host
    waits for the number of pairs. On meta every expert gets as many.
    """
    count, local = len(experts), indices - experts.start
    is_pair = (local >= 0) & (local < count)
    narrow = torch.uint8 if count < 2**8 else torch.int16 if count < 2**15 else torch.int64  # sorted sooner
    keys, slots = torch.where(is_pair, local, count).to(narrow).flatten().sort(stable=True)
    numbers = torch.arange(count, dtype=narrow, device=indices.device)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    if sizes is None and indices.is_meta:
        sizes = tuple(map(len, divide(indices.numel(), count)))
    groups = Groups(indices.numel(), ends) if sizes is None else Groups.of(sizes, ends)
    if sizes is None and not all_chosen:
        groups = Groups.of(groups.sizes, ends)
    slots = slots[: groups.rows]
    return Assignments(groups, TokenRows.of(slots, *indices.shape), slots.int())
