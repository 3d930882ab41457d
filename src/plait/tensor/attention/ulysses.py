"""Ulysses attention: ranks of `cp` exchange positions for heads; each computes some heads for all positions.

    queries           [rows, all heads, own positions]  ─ all-to-all →  [rows, own heads, all positions]
    keys and values   [rows, all heads, own positions]  ─ all-to-all →  [rows, own heads, all positions]
    output            [rows, own heads, all positions]  ─ all-to-all →  [rows, all heads, own positions]

Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509). With fewer heads of keys and values than ranks, a
rank gets those that its query heads read. Unless the plan asks for one method, ulysses is taken where a rank
sends fewer bytes than with ring attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from plait.errors import PlanError
from plait.plan.context_parallel_heads import Heads, sending_less, vectors_sent
from plait.tensor.attention.block_attention import sinks_gradient
from plait.tensor.attention.fused_kernels import Attended
from plait.tensor.attention.ring import KeyBlocks, RankParts, start_exchange
from plait.tensor.autograd.kept_results import kept
from plait.tensor.running_sequence import ContextParallelism, LocalSequence


@dataclass(frozen=True)
class MethodChoice:
    """Whether an attention over `cp` runs as ring or as Ulysses (all-to-all), and what each would send."""

    query_heads: int
    """The number of query heads of this rank of `tp`."""
    kv_heads: int
    """The number of its heads of keys and values."""
    method: Literal["ring", "ulysses"]
    asked: bool
    """Whether the plan asks for the method; else it sends fewer bytes."""
    ring: float
    """The vectors, as wide as a head, that a rank sends for each of its positions, forward and backward."""
    ulysses: float | None
    """The same for the other method; None where the ranks do not divide the query heads."""

    def __str__(self) -> str:
        """Return a sentence for a report, without the final dot."""
        other = (
            "ulysses needs a multiple of the ranks" if self.ulysses is None else f"ulysses {self.ulysses:g}"
        )
        heads = f"{self.query_heads} query heads and {self.kv_heads} of keys"
        why = "as the plan asks" if self.asked else "which sends less"
        return (
            f"Attention with {heads}: {self.method}, {why} (vectors a position: ring {self.ring:g}, {other})"
        )


def method_choice(sequence: LocalSequence, query_heads: int, kv_heads: int) -> MethodChoice:
    """Return whether attention over `cp` runs as ring or Ulysses, as `sequence` asks or by bytes sent.

    Raises PlanError as `choose_method`.
    """
    choose = partial(choose_method, sequence.parallelism, query_heads, kv_heads)
    return sequence.result(("method", query_heads, kv_heads), choose)


def choose_method(parallelism: ContextParallelism, query_heads: int, kv_heads: int) -> MethodChoice:
    """Return whether attention with these heads runs as ring or as Ulysses; PlanError if impossible."""
    ranks, asked = parallelism.group.size, parallelism.method
    ring, ulysses = vectors_sent(query_heads, kv_heads, ranks, keeps_keys=parallelism.keeps_keys)
    if asked == "ulysses" and ulysses is None:
        raise PlanError(
            f"plan.context_parallel is 'ulysses', but {query_heads} heads do not divide over plan.cp = "
            f"{ranks} ranks: choose 'ring', or a divisor for cp."
        )
    method = sending_less(ring, ulysses) if asked == "auto" else asked
    return MethodChoice(query_heads, kv_heads, method, asked != "auto", ring, ulysses)


def evenly_shared(tensor: Tensor, query_heads: int, kv_heads: int, ranks: int, rank: int) -> Tensor:
    """Return keys or values, heads repeated if needed so that equally many of this rank's queries read each.

    `tensor` is the result of `to_heads`. Repeats heads where its query heads read them unequally often.
    """
    own, shared = query_heads // ranks, query_heads // kv_heads
    read = [(rank * own + head) // shared for head in range(own)]
    if len(set(Counter(read).values())) == 1:
        return tensor
    return torch.cat([tensor[:, one - read[0] : one - read[0] + 1] for one in read], 1)


def to_heads(sequence: LocalSequence, heads: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange positions for heads by an all-to-all: return all positions of this rank's heads.

    From `[rows, all heads, own positions, width]` to `[rows, own heads, length, width]`, with `heads` the
    heads of each rank, ascending; tensors differ in their width only. A head may be on several ranks:
    its gradient is then their sum. Communication: one all-to-all over `cp` for all tensors, and one in the
    backward.
    """
    result: tuple[Tensor, ...] = _ToHeads.apply(sequence, heads, *tensors)  # type: ignore[no-untyped-call]
    return result


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    blocks: KeyBlocks,
    sequence: LocalSequence,
    heads: Heads,
) -> Tensor:
    """Return Ulysses attention: all heads at this rank's positions, `[rows, all heads, own, width]`.

    `query`, `key`, `value`: results of `to_heads`, of which each query head is on one rank; `sinks`: of this
    rank's heads, see `plait.attention`; `blocks`: of a rank that holds whole sequences. Unless keys are kept,
    the output is kept by positions only, as the next layer keeps it, and sent again in the backward.
    Communication: one all-to-all over `cp`, and one in the backward, of twice the bytes where the output is
    sent again.
    """
    arguments = query, key, value, sinks, blocks, sequence, heads
    result: Tensor = _AttendByHeads.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequence: LocalSequence, heads: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sequence, ctx.heads, ctx.all_heads = sequence, heads, tensors[0].shape[1]
        return tuple(_heads_for_positions(tensors, sequence, heads))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = _positions_for_heads(gradients, ctx.sequence, ctx.heads, ctx.all_heads, overlaps=True)
        return None, None, *found


class _AttendByHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: KeyBlocks,
        sequence: LocalSequence,
        heads: Heads,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor, Tensor | None]:
            out, lse, _ = blocks.attend(query, key, value, sinks)
            (every,) = _positions_for_heads([out], sequence, heads, heads[-1][-1] + 1)
            return every, lse, out if sequence.parallelism.keeps_keys else None

        result, lse, out = kept(compute)
        ctx.blocks, ctx.sequence, ctx.heads = blocks, sequence, heads
        ctx.save_for_backward(query, key, value, lse, out, result if out is None else None, sinks)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, lse, out, by_positions, sinks = ctx.saved_tensors
        sent = [gradient, by_positions] if out is None else [gradient]
        gradient, *outs = _heads_for_positions(sent, ctx.sequence, ctx.heads, overlaps=True)
        attended = Attended(query, key, value, outs[0] if outs else out, lse)
        of_sinks = sinks_gradient(gradient, attended.out, lse, sinks)
        return *ctx.blocks.gradients(gradient, attended, None, returns=False), of_sinks, None, None, None


def _heads_for_positions(
    tensors: Sequence[Tensor], sequence: LocalSequence, heads: Heads, *, overlaps: bool = False
) -> list[Tensor]:
    """Send each rank its heads at this rank's positions; return this rank's heads at all positions."""
    layout, own = sequence.layout, len(heads[sequence.group.index])
    sent = RankParts.of(tensors, [(len(one), sequence.size) for one in heads])
    for one, parts in zip(heads, sent.parts, strict=True):
        for tensor, part in zip(tensors, parts, strict=True):
            torch.cat([tensor[:, run] for run in _runs(one)], 1, out=part)
    received = RankParts.of(tensors, [(own, layout.size(rank)) for rank in range(layout.ranks)])
    most = sum(map(len, heads)) * max(map(layout.size, range(layout.ranks)))
    _all_to_all(sent, received, most, sequence, overlaps=overlaps)
    return [layout.join(parts, 2) for parts in zip(*received.parts, strict=True)]


def _positions_for_heads(
    tensors: Sequence[Tensor],
    sequence: LocalSequence,
    heads: Heads,
    all_heads: int,
    *,
    overlaps: bool = False,
) -> list[Tensor]:
    """Send each rank its positions of this rank's heads; return all heads, each summed over its ranks.

    In memory the heads of the results lie within positions, as a linear reads them. Sums are in the wider one
    of float32 and the tensor's dtype.
    """
    layout, own = sequence.layout, len(heads[sequence.group.index])
    sent = RankParts.of(tensors, [(own, layout.size(rank)) for rank in range(layout.ranks)])
    for rank, parts in enumerate(sent.parts):
        for tensor, part in zip(tensors, parts, strict=True):
            layout.cut(tensor, rank, 2, out=part)
    received = RankParts.of(tensors, [(len(one), sequence.size) for one in heads])
    most = max(map(len, heads)) * sum(map(layout.size, range(layout.ranks)))
    _all_to_all(sent, received, most, sequence, overlaps=overlaps)
    return [_summed(parts, heads, all_heads) for parts in zip(*received.parts, strict=True)]


def _summed(parts: Sequence[Tensor], heads: Heads, all_heads: int) -> Tensor:
    """Return all heads, of which each rank has sent its own, `[rows, own heads, positions, width]`."""
    rows, _, size, width = parts[0].shape
    is_sum = sum(map(len, heads)) > all_heads
    dtype = torch.promote_types(parts[0].dtype, torch.float32) if is_sum else parts[0].dtype
    make = parts[0].new_zeros if is_sum else parts[0].new_empty
    total = make((rows, size, all_heads, width), dtype=dtype).transpose(1, 2)
    for one, part in zip(heads, parts, strict=True):
        first = 0
        for run in _runs(one):
            stop = first + run.stop - run.start
            if is_sum:
                total[:, run] += part[:, first:stop]
            else:
                total[:, run] = part[:, first:stop]
            first = stop
    return total.to(parts[0].dtype)


def _runs(heads: tuple[int, ...]) -> list[slice]:
    """Return heads as slices of consecutive ones, which a GPU reads without a tensor of indices."""
    ends = [0, *(n for n in range(1, len(heads)) if heads[n] != heads[n - 1] + 1), len(heads)]
    return [slice(heads[first], heads[stop - 1] + 1) for first, stop in pairwise(ends)]


def _all_to_all(
    sent: RankParts, received: RankParts, most: int, sequence: LocalSequence, *, overlaps: bool
) -> None:
    """Send each rank its part; `overlaps`: meanwhile compute queued weight gradients."""
    wait = start_exchange(sent, received, sequence.group, most, "all_to_all")
    if overlaps and not sent.flat.is_meta and sequence.parallelism.overlap is not None:
        sequence.parallelism.overlap()
    wait()
