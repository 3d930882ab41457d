"""Attention with heads in place of positions: each rank of `cp` computes some heads for all positions.

    queries, keys, values   [rows, all heads, own positions]  ─ all-to-all →  [rows, own heads, all positions]
    output                  [rows, own heads, all positions]  ─ all-to-all →  [rows, all heads, own positions]

Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509). With fewer heads of keys and values than ranks, a
rank gets those that its query heads read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plait.attention_heads import Heads
from plait.autograd.kept_results import kept
from plait.autograd.running_sequence import LocalSequence
from plait.comm.collectives import all_to_all_uneven
from plait.context_attention.blocks import SavedAttention, attend_blocks, attention_gradients
from plait.context_attention.kernels import Scaling
from plait.context_attention.key_exchange import KeyExchange
from plait.context_attention.weight_dropout import WeightDropoutMask


def evenly_shared(tensor: Tensor, query_heads: int, kv_heads: int, ranks: int, rank: int) -> Tensor:
    """Return a rank's heads of keys or values so that equally many of its query heads read each.

    `tensor` is the result of `to_heads`. Repeats heads where its query heads read them unequally often.
    """
    own, shared = query_heads // ranks, query_heads // kv_heads
    read = [(rank * own + head) // shared for head in range(own)]
    if len(set(Counter(read).values())) == 1:
        return tensor
    return torch.cat([tensor[:, one - read[0] : one - read[0] + 1] for one in read], 1)


def to_heads(tensor: Tensor, sequence: LocalSequence, heads: Heads) -> Tensor:
    """Return this rank's `heads` for all positions, ascending: `[rows, own heads, length, width]`.

    `tensor` `[rows, all heads, own positions, width]`. A head may be on several ranks: its gradient is then
    their sum. Communication: one all-to-all over `cp`, and one in the backward.
    """
    result: Tensor = _ToHeads.apply(tensor, sequence, heads)  # type: ignore[no-untyped-call]
    return result


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exchange: KeyExchange,
    scaling: Scaling,
    dropout_mask: WeightDropoutMask | None,
    sequence: LocalSequence,
    heads: Heads,
) -> Tensor:
    """Return attention of all heads at this rank's positions: `[rows, all heads, own positions, width]`.

    `query`, `key`, `value`: results of `to_heads`, of which each query head is on one rank; `exchange`: of
    a rank that holds whole sequences. Unless keys are kept, the output is kept by positions only, as the next
    layer keeps it, and sent again in the backward. Communication: one all-to-all over `cp`, and one in the
    backward, of twice the bytes where the output is sent again.
    """
    arguments = query, key, value, exchange, scaling, dropout_mask, sequence, heads
    result: Tensor = _AttendByHeads.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sequence: LocalSequence, heads: Heads) -> Tensor:
        ctx.sequence, ctx.heads, ctx.all_heads = sequence, heads, tensor.shape[1]
        return _heads_for_positions(tensor, sequence, heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found = _positions_for_heads(gradient, ctx.sequence, ctx.heads, ctx.all_heads, overlaps=True)
        return found, None, None


class _AttendByHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: KeyExchange,
        scaling: Scaling,
        dropout_mask: WeightDropoutMask | None,
        sequence: LocalSequence,
        heads: Heads,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor, Tensor | None]:
            out, lse, _ = attend_blocks(query, key, value, exchange, scaling, dropout_mask)
            every = _positions_for_heads(out, sequence, heads, heads[-1][-1] + 1)
            return every, lse, out if sequence.parallelism.keeps_keys else None

        result, lse, out = kept(compute)
        ctx.arguments = exchange, scaling, dropout_mask
        ctx.sequence, ctx.heads = sequence, heads
        ctx.save_for_backward(query, key, value, lse, out, result if out is None else None)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lse, out, by_positions = ctx.saved_tensors
        if out is None:
            both = torch.cat([gradient, by_positions], 3)
            both = _heads_for_positions(both, ctx.sequence, ctx.heads, overlaps=True)
            gradient, out = both.chunk(2, 3)
        else:
            gradient = _heads_for_positions(gradient, ctx.sequence, ctx.heads, overlaps=True)
        saved = SavedAttention(query, key, value, out, lse, None)
        found = attention_gradients(gradient, saved, *ctx.arguments, returns=False)
        return *found, *[None] * 5


def _heads_for_positions(
    tensor: Tensor, sequence: LocalSequence, heads: Heads, *, overlaps: bool = False
) -> Tensor:
    """Send each rank its heads at this rank's positions; return this rank's heads at all positions."""
    rows, width = tensor.shape[0], tensor.shape[3]
    layout, mine = sequence.layout, heads[sequence.group.index]
    pieces = [torch.cat([tensor[:, run] for run in _runs(one)], 1).reshape(-1) for one in heads]
    shapes = [(rows, len(mine), layout.size(rank), width) for rank in range(layout.ranks)]
    return layout.join(_all_to_all(pieces, sequence, shapes, overlaps=overlaps), 2)


def _positions_for_heads(
    tensor: Tensor, sequence: LocalSequence, heads: Heads, all_heads: int, *, overlaps: bool = False
) -> Tensor:
    """Send each rank its positions of this rank's heads; return all heads, each summed over its ranks.

    In memory the heads of the result lie within positions, as a linear reads them. Sums are in the wider one
    of float32 and the tensor's dtype.
    """
    rows, width = tensor.shape[0], tensor.shape[3]
    layout, size = sequence.layout, sequence.size
    pieces = [layout.cut(tensor, rank, 2).reshape(-1) for rank in range(layout.ranks)]
    shapes = [(rows, len(one), size, width) for one in heads]
    arrived = _all_to_all(pieces, sequence, shapes, overlaps=overlaps)
    is_sum = sum(map(len, heads)) > all_heads
    dtype = torch.promote_types(tensor.dtype, torch.float32) if is_sum else tensor.dtype
    total = tensor.new_zeros(rows, size, all_heads, width, dtype=dtype).transpose(1, 2)
    for one, part in zip(heads, arrived, strict=True):
        first = 0
        for run in _runs(one):
            stop = first + run.stop - run.start
            total[:, run] += part[:, first:stop]
            first = stop
    return total.to(tensor.dtype)


def _runs(heads: tuple[int, ...]) -> list[slice]:
    """Return heads as slices of consecutive ones, which a GPU reads without a tensor of indices."""
    ends = [0, *(n for n in range(1, len(heads)) if heads[n] != heads[n - 1] + 1), len(heads)]
    return [slice(heads[first], heads[stop - 1] + 1) for first, stop in pairwise(ends)]


def _all_to_all(
    pieces: Sequence[Tensor], sequence: LocalSequence, shapes: Sequence[tuple[int, ...]], *, overlaps: bool
) -> list[Tensor]:
    """Send each rank its flat piece; return what each rank sent, in `shapes`.

    `overlaps`: meanwhile compute queued weight gradients.
    """
    flat, sent = torch.cat(tuple(pieces)), [len(piece) for piece in pieces]
    received = [torch.Size(shape).numel() for shape in shapes]
    if flat.is_meta:
        result = flat.new_empty(sum(received))
    else:
        pending = all_to_all_uneven(flat, sequence.group, sent, received, checked=False)
        if overlaps and sequence.parallelism.overlap is not None:
            sequence.parallelism.overlap()
        result = pending.wait()
    return [part.view(shape) for part, shape in zip(torch.split(result, received), shapes, strict=True)]
