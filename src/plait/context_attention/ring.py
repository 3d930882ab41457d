"""Attention to keys and values that other ranks of `cp` hold, with a backward that returns their gradients.

    share     keys, values: sent to the ranks whose queries see them, while queries are projected
    attend    own block, then each rank's block in turn; merged by log-sum-exp

Liu et al. 2023, "Ring Attention" (arXiv:2310.01889), with messages straight from rank to rank instead of hop
by hop, as in the training of Llama 3 (arXiv:2407.21783, section 3.3.2), and only of keys that a query sees.
The backward takes the merged output and log-sum-exp, so that the gradient of each block is part of the whole
softmax's. It computes the other ranks' blocks first: their gradients travel while it computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.autograd.kept_results import kept, next_result_is_kept
from plait.context_attention.exchange_plan import ExchangePlan, PeerBlock, sizes_of
from plait.context_attention.kernels import block_backward, block_forward, empty_result, merge
from plait.context_attention.key_exchange import KeyExchange, Pair
from plait.context_attention.unfused_kernel import WeightDropout
from plait.context_attention.visibility import BlockCall
from plait.context_attention.weight_dropout import WeightMask

DropoutOfCall = Callable[[BlockCall], WeightDropout | None]
"""Returns the dropout of the weights of one kernel call."""


def share(key: Tensor, value: Tensor, exchange: KeyExchange) -> tuple[Tensor, Tensor]:
    """Start sending keys and values; return them, with gradients that include the other ranks'.

    Communication: one all-to-all over `cp`, and one of gradients in the backward.
    """
    shared: tuple[Tensor, Tensor] = _Share.apply(key, value, exchange)  # type: ignore[no-untyped-call]
    return shared


def attend_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exchange: KeyExchange,
    scale: float,
    mask: WeightMask | None = None,
) -> Tensor:
    """Return attention of this rank's queries to all keys that they see: `[rows, heads, length, width]`.

    `key`, `value`: what `share` returned for the same `exchange`. `mask`: of the dropout of weights.
    Communication: unless keys are kept, one all-to-all over `cp` in the backward.
    """
    output: Tensor = _Attend.apply(query, key, value, exchange, scale, mask)  # type: ignore[no-untyped-call]
    return output


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, exchange: KeyExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        if not next_result_is_kept():
            exchange.start(key, value)
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.exchange.add_returned(key, value)
        return key, value, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: KeyExchange,
        scale: float,
        mask: WeightMask | None,
    ) -> Tensor:
        result, lse, received = kept(partial(_merged, query, key, value, exchange, scale, mask))
        ctx.exchange, ctx.scale, ctx.mask = exchange, scale, mask
        ctx.save_for_backward(query, key, value, result, lse, received)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, received = ctx.saved_tensors
        exchange, given = ctx.exchange, _Given(gradient, query, out, lse, ctx.scale)
        dropouts = partial(_dropouts, ctx.mask, query, exchange.plan)
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        own = torch.zeros_like(key), torch.zeros_like(value)
        sends_again = received is None
        if sends_again:
            exchange.start(key, value)
            exchange.overlap()
            given.add_gradients(of_query, own, exchange.plan.own, (key, value), dropouts())
            received = exchange.received(key, value)
        returned = torch.zeros_like(received)
        pairs = exchange.views_of(received, key, value)
        totals = exchange.views_of(returned, key, value)
        for peer, pair, total in zip(exchange.plan.peers, pairs, totals, strict=True):
            if peer is not None:
                given.add_gradients(of_query, total, peer.calls, pair, dropouts(peer))
        if ctx.needs_input_grad[1]:
            exchange.start_return(returned, sizes_of(key, value))
        if not sends_again:
            exchange.overlap()
            given.add_gradients(of_query, own, exchange.plan.own, (key, value), dropouts())
        return of_query.to(query.dtype), *own, None, None, None


def _merged(
    query: Tensor, key: Tensor, value: Tensor, exchange: KeyExchange, scale: float, mask: WeightMask | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return attention to all keys, its log-sum-exp, and the other ranks' keys if they are to be kept."""
    out, lse = empty_result(query, value)
    dropouts = partial(_dropouts, mask, query, exchange.plan)
    _add_blocks(out, lse, exchange.plan.own, query, (key, value), scale, dropouts())
    received = exchange.received(key, value)
    for peer, pair in zip(exchange.plan.peers, exchange.views_of(received, key, value), strict=True):
        if peer is not None:
            _add_blocks(out, lse, peer.calls, query, pair, scale, dropouts(peer))
    return out.to(query.dtype), lse, received if exchange.keeps else None


class _Given(NamedTuple):
    """The arguments of a backward that all blocks share: output and log-sum-exp are those of all keys."""

    gradient: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    scale: float

    def add_gradients(
        self,
        of_query: Tensor,
        totals: Pair,
        calls: Sequence[BlockCall],
        pair: Pair,
        dropout_of: DropoutOfCall,
    ) -> None:
        """Add the gradients of the queries, keys and values of one block in place."""
        for call in calls:
            queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
            gradient, query, out, lse = (
                one[queries] for one in (self.gradient, self.query, self.out, self.lse)
            )
            key, value = (one[keys] for one in pair)
            parts = block_backward(
                gradient, query, key, value, out, lse, call.mask, self.scale, dropout_of(call)
            )
            of_query[queries] += parts[0]
            totals[0][keys] += parts[1]
            totals[1][keys] += parts[2]


def _dropouts(
    mask: WeightMask | None, query: Tensor, plan: ExchangePlan, peer: PeerBlock | None = None
) -> DropoutOfCall:
    """Return a function that returns the dropout of a call on a peer's keys, or on this rank's own."""
    if mask is None:
        return lambda call: None
    keys = plan.positions if peer is None else peer.key_ranges
    return partial(mask.of_call, query=query, queries=plan.positions, keys=keys)


def _add_blocks(
    out: Tensor,
    lse: Tensor,
    calls: Sequence[BlockCall],
    query: Tensor,
    pair: Pair,
    scale: float,
    dropout_of: DropoutOfCall,
) -> None:
    """Merge attention to one block's keys into `out` and `lse`."""
    for call in calls:
        queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
        key, value = (one[keys] for one in pair)
        part = block_forward(query[queries], key, value, call.mask, scale, dropout_of(call))
        merge(out[queries], lse[queries], *part)
