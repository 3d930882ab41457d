"""Attention of queries to several blocks of keys: its own rank's, then each other rank's, in their order.

Blocks are merged by log-sum-exp. The gradients take the merged output and log-sum-exp, so that the gradient
of each block is part of the whole softmax's; sums over blocks are the gradients of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from plait.tensor.attention.exchange_plan import ExchangePlan, PeerBlock, sizes_of
from plait.tensor.attention.kernels import Scaling, block_backward, block_forward, empty_result, merge
from plait.tensor.attention.key_exchange import KeyExchange, Pair
from plait.tensor.attention.packed_kernel import PackedCall
from plait.tensor.attention.unfused_kernel import WeightDropout, WeightDropoutMask
from plait.tensor.attention.visibility import BlockCall

DropoutOfCall = Callable[[BlockCall], WeightDropout | None]
"""Returns the dropout of the weights of one kernel call."""


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exchange: KeyExchange,
    scaling: Scaling,
    dropout_mask: WeightDropoutMask | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return attention to all keys, its log-sum-exp, and the other ranks' keys if they are to be kept."""
    packed = _packed_call(exchange.plan, query, key, value, scaling, dropout_mask)
    if packed is not None:
        return *packed.forward(query, key, value, scaling.scale), None
    out, lse = empty_result(query, value)
    dropouts = partial(_dropouts, dropout_mask, query, exchange.plan)
    _add_blocks(out, lse, exchange.plan.own, query, (key, value), scaling, dropouts())
    received = exchange.received(key, value)
    for peer, pair in zip(exchange.plan.peers, exchange.views_of(received, key, value), strict=True):
        if peer is not None:
            _add_blocks(out, lse, peer.calls, query, pair, scaling, dropouts(peer))
    return out.to(query.dtype), lse, received if exchange.keeps else None


class SavedAttention(NamedTuple):
    """What the backward of an attention to several blocks needs."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    """Attention to all keys."""
    lse: Tensor
    """The log-sum-exp of all scores."""
    received: Tensor | None
    """The other ranks' keys and values; None: they are to be sent again."""


def attention_gradients(
    gradient: Tensor,
    saved: SavedAttention,
    exchange: KeyExchange,
    scaling: Scaling,
    dropout_mask: WeightDropoutMask | None,
    *,
    returns: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the queries, and those of this rank's keys and values from its own queries.

    The gradients of the other ranks' keys are on their way when it returns, unless not `returns`: where keys
    are kept they travel while those of the own block are computed. Communication: one all-to-all over `cp`,
    and one before where keys are not kept.
    """
    query, key, value, out, lse, received = saved
    packed = _packed_call(exchange.plan, query, key, value, scaling, dropout_mask)
    if packed is not None:
        return packed.backward(gradient, query, key, value, out, lse, scaling.scale)
    arguments = _BackwardArguments(gradient, query, out, lse, scaling)
    dropouts = partial(_dropouts, dropout_mask, query, exchange.plan)
    of_query, of_key, of_value = (torch.zeros_like(one, dtype=lse.dtype) for one in (query, key, value))
    own = of_key, of_value
    sends_again = received is None
    if received is None:
        exchange.start(key, value)
        exchange.overlap()
        arguments.add_gradients(of_query, own, exchange.plan.own, (key, value), dropouts())
        received = exchange.received(key, value)
    returned = torch.empty_like(received)
    pairs, results = (exchange.views_of(one, key, value) for one in (received, returned))
    for peer, pair, result in zip(exchange.plan.peers, pairs, results, strict=True):
        if peer is not None:
            totals = tuple(torch.zeros_like(one, dtype=lse.dtype) for one in pair)
            arguments.add_gradients(of_query, totals, peer.calls, pair, dropouts(peer))
            for one, total in zip(result, totals, strict=True):
                one.copy_(total)
    if returns:
        exchange.start_return(returned, sizes_of(key, value))
    if not sends_again:
        exchange.overlap()
        arguments.add_gradients(of_query, own, exchange.plan.own, (key, value), dropouts())
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _packed_call(
    plan: ExchangePlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: Scaling,
    dropout_mask: WeightDropoutMask | None,
) -> PackedCall | None:
    """Return the call that computes attention to all keys at once, or None where blocks are merged."""
    if plan.packed is None or dropout_mask is not None or scaling.softcap is not None:
        return None
    return plan.packed if plan.packed.computes(query, key, value) else None


class _BackwardArguments(NamedTuple):
    """The arguments of a backward that all blocks share: output and log-sum-exp are those of all keys."""

    gradient: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    scaling: Scaling

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
            scale, softcap = self.scaling
            parts = block_backward(
                gradient, query, key, value, out, lse, call.mask, scale, dropout_of(call), softcap
            )
            of_query[queries] += parts[0]
            totals[0][keys] += parts[1]
            totals[1][keys] += parts[2]


def _dropouts(
    dropout_mask: WeightDropoutMask | None, query: Tensor, plan: ExchangePlan, peer: PeerBlock | None = None
) -> DropoutOfCall:
    """Return a function that returns the dropout of a call on a peer's keys, or on this rank's own."""
    if dropout_mask is None:
        return lambda call: None
    keys = plan.positions if peer is None else peer.key_ranges
    return partial(dropout_mask.of_call, query=query, queries=plan.positions, keys=keys)


def _add_blocks(
    out: Tensor,
    lse: Tensor,
    calls: Sequence[BlockCall],
    query: Tensor,
    pair: Pair,
    scaling: Scaling,
    dropout_of: DropoutOfCall,
) -> None:
    """Merge attention to one block's keys into `out` and `lse`."""
    for call in calls:
        queries, keys = (call.rows, slice(None), call.query), (call.rows, slice(None), call.key)
        key, value = (one[keys] for one in pair)
        part = block_forward(
            query[queries], key, value, call.mask, scaling.scale, dropout_of(call), scaling.softcap
        )
        merge(out[queries], lse[queries], *part)
