"""Ring attention: of a rank's queries to its own keys, then to those that other ranks of `cp` have sent.

    share     keys, values: sent to the ranks whose queries see them, while queries are projected
    attend    own block, then each rank's block in turn; merged by log-sum-exp

Keys and values go straight to the ranks whose queries see them, in one uneven all-to-all. The gradients of
those keys return the same way, and are added at home in the order of the ranks: `cp - 1` messages each way.
The gradients take the merged output and log-sum-exp, so that the gradient of each block is part of the whole
softmax's; sums over blocks are the gradients of the whole. Where keys are kept, the backward computes the
other ranks' blocks first: their gradients travel while it computes its own.

Liu et al. 2023, "Ring Attention" (arXiv:2310.01889), with messages straight from rank to rank instead of hop
by hop, as in the training of Llama 3 (arXiv:2407.21783, section 3.3.2), and only of keys that a query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from plait.ranks.collectives import all_to_all_uneven
from plait.ranks.group import Group
from plait.tensor.attention.block_attention import (
    Scaling,
    WeightDropout,
    WeightDropoutMask,
    block_backward,
    block_forward,
    empty_result,
    merge,
    merge_sinks,
    sinks_gradient,
)
from plait.tensor.attention.fused_kernels import Attended, PackedCall
from plait.tensor.attention.kernel_calls import BlockCall
from plait.tensor.attention.key_exchange_plan import Mask, PeerBlock, add_selected, exchange_plan, selected
from plait.tensor.autograd.kept_results import kept, next_result_is_kept
from plait.tensor.running_sequence import LocalSequence

Pair = tuple[Tensor, ...]
"""Keys and values, or their gradients: `[rows, heads, length, width]`."""


@dataclass(frozen=True)
class RankParts:
    """A send or receive buffer: a flat tensor with a part for each rank, divided into views for tensors."""

    flat: Tensor
    sizes: list[int]
    """Elements of each rank's part."""
    each: int
    """Elements of one head at one position, over all tensors."""
    parts: list[Pair]
    """Views of `flat`, `[rows, heads, positions, width]`: by rank, then by tensor."""

    @staticmethod
    def of(like: Sequence[Tensor], sizes: Sequence[tuple[int, int]], flat: Tensor | None = None) -> RankParts:
        """Return for each rank tensors like those in `like`, as views of one flat tensor.

        `sizes`: the (heads, positions) of each rank. `flat`: the tensor to view; None: a new one.
        """
        shapes = [[(one.shape[0], *size, one.shape[3]) for one in like] for size in sizes]
        counts = [[prod(shape) for shape in of_rank] for of_rank in shapes]
        flat = like[0].new_empty(sum(map(sum, counts))) if flat is None else flat
        views = iter(torch.split(flat, [*chain(*counts)]))
        parts = [tuple(next(views).view(shape) for shape in of_rank) for of_rank in shapes]
        each = sum(one.shape[0] * one.shape[3] for one in like)
        return RankParts(flat, [*map(sum, counts)], each, parts)


def start_exchange(
    sent: RankParts, received: RankParts, group: Group, most: int, kind: str
) -> Callable[[], Tensor]:
    """Start sending each rank its part; return a function that waits, and returns `received.flat`.

    `most`: heads times positions, more than which no rank sends. `kind`: "ring", in which the larger of what
    is sent and received counts, or "all_to_all", as traces report it. Communication: one uneven all-to-all.
    """
    if sent.flat.is_meta:
        largest = max(sent.flat, received.flat, key=Tensor.numel)
        group.skip(kind, largest if kind == "ring" else sent.flat)
        return lambda sent=sent: received.flat  # type: ignore[misc]  # until the wait what is sent is kept
    sizes, elements = (sent.sizes, received.sizes), most * sent.each
    out = received.flat
    return all_to_all_uneven(sent.flat, group, *sizes, most=elements, out=out, checked=False).wait


class KeyExchange:
    """The messages of one attention and micro-batch over `cp`: keys and values, and their gradients."""

    def __init__(self, sequence: LocalSequence, mask: Mask, device: torch.device) -> None:
        self.plan = exchange_plan(sequence, mask, device)
        self._parallelism = sequence.parallelism
        self._arriving: Callable[[], Tensor] | None = None
        self._returning: Callable[[], Tensor] | None = None

    @property
    def keeps(self) -> bool:
        """Whether received keys and values are kept for the backward."""
        return self._parallelism.keeps_keys

    def start(self, key: Tensor, value: Tensor) -> None:
        """Start sending keys and values. Communication: one all-to-all over `cp`."""
        sent = self._parts(self.plan.sent(1), key, value)
        for peer, parts in zip(self.plan.peers, sent.parts, strict=True):
            if peer is not None and peer.sent_count:
                for part, whole in zip(parts, (key, value), strict=True):
                    part.copy_(selected(whole, peer.sent))
        self._arriving = self._start(sent, self._parts(self.plan.received(1), key, value))

    def received(self, key: Tensor, value: Tensor) -> Tensor:
        """Wait for the other ranks' keys and values, after sending if not yet begun; return one flat tensor.

        Where they were not sent in this pass (in a backward), they are sent now.
        """
        if self._arriving is None:
            self.start(key, value)
        assert self._arriving is not None
        arriving, self._arriving = self._arriving, None
        return arriving()

    def views_of(self, flat: Tensor, key: Tensor, value: Tensor) -> list[Pair]:
        """Return each rank's keys and values as views of a flat tensor; empty ones for this rank."""
        return self._parts(self.plan.received(1), key, value, flat).parts

    def start_return(self, gradients: Tensor, key: Tensor, value: Tensor) -> None:
        """Start sending the gradients of received keys and values back to the ranks they came from.

        Communication: one all-to-all over `cp`.
        """
        sent = self._parts(self.plan.received(1), key, value, gradients)
        self._returning = self._start(sent, self._parts(self.plan.sent(1), key, value))

    def with_returned(self, key: Tensor, value: Tensor) -> Pair:
        """Return the sums of own gradients `key`, `value` and those that other ranks return; wait for these.

        16-bit gradients are summed in float32.
        """
        if self._returning is None:
            return key, value
        self.overlap()
        returning, self._returning = self._returning, None
        wide = torch.promote_types(key.dtype, torch.float32)
        totals = key.to(wide), value.to(wide)
        returned = self._parts(self.plan.sent(1), key, value, returning())
        for peer, pair in zip(self.plan.peers, returned.parts, strict=True):
            if peer is not None and peer.sent_count:
                for total, part in zip(totals, pair, strict=True):
                    add_selected(total, peer.sent, part)
        return tuple(total.to(key.dtype) for total in totals)

    def overlap(self) -> None:
        """Compute queued weight gradients while a message is on its way."""
        if self._parallelism.overlap is not None:
            self._parallelism.overlap()

    def _parts(
        self, counts: Sequence[int], key: Tensor, value: Tensor, flat: Tensor | None = None
    ) -> RankParts:
        """Return each rank's part of keys and values, of so many positions."""
        return RankParts.of((key, value), [(key.shape[1], count) for count in counts], flat)

    def _start(self, sent: RankParts, received: RankParts) -> Callable[[], Tensor]:
        most = sent.parts[0][0].shape[1] * self.plan.most
        return start_exchange(sent, received, self._parallelism.group, most, "ring")


def share(key: Tensor, value: Tensor, exchange: KeyExchange) -> tuple[Tensor, Tensor]:
    """Start sending keys and values to other ranks; return views of them whose gradients sum all ranks'.

    Communication: one all-to-all over `cp`, and one of gradients in the backward.
    """
    shared: tuple[Tensor, Tensor] = _Share.apply(key, value, exchange)  # type: ignore[no-untyped-call]
    return shared


def attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: KeyBlocks
) -> Tensor:
    """Return attention of this rank's queries to all keys that they see: `[rows, heads, length, width]`.

    `key`, `value`: what `share` returned for the same exchange. `sinks`: as in `plait.attention`.
    Communication: unless keys are kept, one all-to-all over `cp` in the backward.
    """
    output: Tensor = _Attend.apply(query, key, value, sinks, blocks)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class KeyBlocks:
    """Keys of an attention computed in blocks: this rank's own, and those that each rank of `cp` sends."""

    exchange: KeyExchange
    scaling: Scaling
    dropout_mask: WeightDropoutMask | None
    """Of the dropout of weights."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return attention to all blocks, its log-sum-exp, and the received keys if the plan keeps them.

        With `sinks` `[heads]`, the log-sum-exp is that of the scores and the sinks.
        """
        packed, received = self._packed_call(query, key, value), None
        if packed is not None:
            out, lse = packed.forward(query, key, value, self.scaling.scale)
        else:
            out, lse, received = self._merged(query, key, value)
        if sinks is not None:
            merge_sinks(out, lse, sinks)
        return out.to(query.dtype), lse, received

    def _merged(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the results of `attend` without sinks, merged from blocks of keys."""
        exchange = self.exchange
        out, lse = empty_result(query, value)
        self._merge(out, lse, query, (key, value))
        received = exchange.received(key, value)
        for peer, pair in zip(exchange.plan.peers, exchange.views_of(received, key, value), strict=True):
            if peer is not None:
                self._merge(out, lse, query, pair, peer)
        return out, lse, received if exchange.keeps else None

    def gradients(
        self, gradient: Tensor, attended: Attended, received: Tensor | None, *, returns: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients from this rank's queries; start to return those of other ranks' keys and values.

        `received`: the other ranks' keys and values; None: they are to be sent again. The gradients of these
        are on their way when it returns, unless not `returns`: where keys are kept they travel while those of
        the own block are computed. Communication: one all-to-all over `cp`, and one before where keys are not
        kept.
        """
        query, key, value, _, lse = attended
        packed = self._packed_call(query, key, value)
        if packed is not None:
            return packed.backward(gradient, attended, self.scaling.scale)
        exchange = self.exchange
        of_query, of_key, of_value = (torch.zeros_like(one, dtype=lse.dtype) for one in (query, key, value))
        own = partial(self._add_gradients, gradient, attended, of_query, (of_key, of_value), (key, value))
        sends_again = received is None
        if received is None:
            exchange.start(key, value)
            exchange.overlap()
            own()
            received = exchange.received(key, value)
        returned = torch.empty_like(received)
        pairs, results = (exchange.views_of(one, key, value) for one in (received, returned))
        for peer, pair, result in zip(exchange.plan.peers, pairs, results, strict=True):
            if peer is not None:
                totals = tuple(torch.zeros_like(one, dtype=lse.dtype) for one in pair)
                self._add_gradients(gradient, attended, of_query, totals, pair, peer)
                for one, total in zip(result, totals, strict=True):
                    one.copy_(total)
        if returns:
            exchange.start_return(returned, key, value)
        if not sends_again:
            exchange.overlap()
            own()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

    def _packed_call(self, query: Tensor, key: Tensor, value: Tensor) -> PackedCall | None:
        """Return the call that computes attention to all keys at once, or None where blocks are merged."""
        packed = self.exchange.plan.packed
        if packed is None or self.dropout_mask is not None or self.scaling.softcap is not None:
            return None
        return packed if packed.computes(query, key, value) else None

    def _calls(self, peer: PeerBlock | None) -> tuple[BlockCall, ...]:
        """Return the kernel calls on a peer's keys, or on this rank's own."""
        return self.exchange.plan.own if peer is None else peer.calls

    def _dropout(self, call: BlockCall, query: Tensor, peer: PeerBlock | None) -> WeightDropout | None:
        """Return the dropout of the weights of a call on a peer's keys, or on this rank's own."""
        if self.dropout_mask is None:
            return None
        own = self.exchange.plan.positions
        return self.dropout_mask.of_call(call, query, own, own if peer is None else peer.key_ranges)

    def _merge(
        self, out: Tensor, lse: Tensor, query: Tensor, pair: Pair, peer: PeerBlock | None = None
    ) -> None:
        """Merge attention to one block's keys into `out` and `lse`."""
        for call in self._calls(peer):
            queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
            key, value = (one[keys] for one in pair)
            scale, softcap = self.scaling
            dropout = self._dropout(call, query, peer)
            part = block_forward(query[queries], key, value, call.mask, scale, dropout, softcap)
            merge(out[queries], lse[queries], *part)

    def _add_gradients(
        self,
        gradient: Tensor,
        attended: Attended,
        of_query: Tensor,
        totals: Pair,
        pair: Pair,
        peer: PeerBlock | None = None,
    ) -> None:
        """Add the gradients of the queries, and of one block's keys and values, in place."""
        for call in self._calls(peer):
            queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
            of_out, query, out, lse = (
                one[queries] for one in (gradient, attended.query, attended.out, attended.lse)
            )
            key, value = (one[keys] for one in pair)
            scale, softcap = self.scaling
            dropout = self._dropout(call, attended.query, peer)
            parts = block_backward(of_out, query, key, value, out, lse, call.mask, scale, dropout, softcap)
            of_query[queries] += parts[0]
            totals[0][keys] += parts[1]
            totals[1][keys] += parts[2]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, exchange: KeyExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        if not next_result_is_kept():
            exchange.start(key, value)
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        of_key, of_value = ctx.exchange.with_returned(key, value)
        return of_key, of_value, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: KeyBlocks
    ) -> Tensor:
        result, lse, received = kept(partial(blocks.attend, query, key, value, sinks))
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, result, lse, received, sinks)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, received, sinks = ctx.saved_tensors
        attended, returns = Attended(*tensors), ctx.needs_input_grad[1]
        of_sinks = sinks_gradient(gradient, attended.out, attended.lse, sinks)
        return *ctx.blocks.gradients(gradient, attended, received, returns=returns), of_sinks, None
