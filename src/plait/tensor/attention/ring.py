"""Ring attention: of a rank's queries to its own keys, then to those that other ranks of `cp` have sent.

    share     keys, values: sent to the ranks whose queries see them, while queries are projected
    attend    own block, then each rank's block in turn; merged by log-sum-exp

The gradients take the merged output and log-sum-exp, so that the gradient of each block is part of the whole
softmax's; sums over blocks are the gradients of the whole. Where keys are kept, the backward computes the
other ranks' blocks first: their gradients travel while it computes its own.

Liu et al. 2023, "Ring Attention" (arXiv:2310.01889), with messages straight from rank to rank instead of hop
by hop, as in the training of Llama 3 (arXiv:2407.21783, section 3.3.2), and only of keys that a query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.tensor.attention.exchange_plan import PeerBlock
from plait.tensor.attention.fused_kernels import Attended, PackedCall
from plait.tensor.attention.kernels import Scaling, block_backward, block_forward, empty_result, merge
from plait.tensor.attention.key_exchange import KeyExchange, Pair
from plait.tensor.attention.unfused_kernel import WeightDropout, WeightDropoutMask
from plait.tensor.attention.visibility import BlockCall
from plait.tensor.autograd.kept_results import kept, next_result_is_kept


def share(key: Tensor, value: Tensor, exchange: KeyExchange) -> tuple[Tensor, Tensor]:
    """Start sending keys and values; return them, with gradients that include the other ranks'.

    Communication: one all-to-all over `cp`, and one of gradients in the backward.
    """
    shared: tuple[Tensor, Tensor] = _Share.apply(key, value, exchange)  # type: ignore[no-untyped-call]
    return shared


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, blocks: KeyBlocks) -> Tensor:
    """Return attention of this rank's queries to all keys that they see: `[rows, heads, length, width]`.

    `key`, `value`: what `share` returned for the same exchange. Communication: unless keys are kept, one
    all-to-all over `cp` in the backward.
    """
    output: Tensor = _Attend.apply(query, key, value, blocks)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class KeyBlocks:
    """Attention to keys in blocks: those of this rank, and those that each other rank sends by `exchange`."""

    exchange: KeyExchange
    scaling: Scaling
    dropout_mask: WeightDropoutMask | None
    """Of the dropout of weights."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return attention to all keys, its log-sum-exp, and the other ranks' keys if they are to be kept."""
        packed = self._packed_call(query, key, value)
        if packed is not None:
            return *packed.forward(query, key, value, self.scaling.scale), None
        exchange = self.exchange
        out, lse = empty_result(query, value)
        self._merge(out, lse, query, (key, value))
        received = exchange.received(key, value)
        for peer, pair in zip(exchange.plan.peers, exchange.views_of(received, key, value), strict=True):
            if peer is not None:
                self._merge(out, lse, query, pair, peer)
        return out.to(query.dtype), lse, received if exchange.keeps else None

    def gradients(
        self, gradient: Tensor, attended: Attended, received: Tensor | None, *, returns: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of the queries, and those of this rank's keys and values from its own queries.

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
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: KeyBlocks) -> Tensor:
        result, lse, received = kept(partial(blocks.attend, query, key, value))
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, result, lse, received)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *attended, received = ctx.saved_tensors
        returns = ctx.needs_input_grad[1]
        return *ctx.blocks.gradients(gradient, Attended(*attended), received, returns=returns), None
