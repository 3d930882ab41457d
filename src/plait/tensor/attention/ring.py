"""Attention to keys and values that other ranks of `cp` hold, with a backward that returns their gradients.

    share     keys, values: sent to the ranks whose queries see them, while queries are projected
    attend    own block, then each rank's block in turn; merged by log-sum-exp

Liu et al. 2023, "Ring Attention" (arXiv:2310.01889), with messages straight from rank to rank instead of hop
by hop, as in the training of Llama 3 (arXiv:2407.21783, section 3.3.2), and only of keys that a query sees.
Where keys are kept, the backward computes the other ranks' blocks first: their gradients travel while it
computes its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.tensor.attention.kernels import Scaling
from plait.tensor.attention.key_blocks import SavedAttention, attend_blocks, attention_gradients
from plait.tensor.attention.key_exchange import KeyExchange
from plait.tensor.attention.unfused_kernel import WeightDropoutMask
from plait.tensor.autograd.kept_results import kept, next_result_is_kept


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
    scaling: Scaling,
    dropout_mask: WeightDropoutMask | None = None,
) -> Tensor:
    """Return attention of this rank's queries to all keys that they see: `[rows, heads, length, width]`.

    `key`, `value`: what `share` returned for the same `exchange`. `dropout_mask`: of the dropout of weights.
    Communication: unless keys are kept, one all-to-all over `cp` in the backward.
    """
    arguments = query, key, value, exchange, scaling, dropout_mask
    output: Tensor = _Attend.apply(*arguments)  # type: ignore[no-untyped-call]
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
        of_key, of_value = ctx.exchange.with_returned(key, value)
        return of_key, of_value, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: KeyExchange,
        scaling: Scaling,
        dropout_mask: WeightDropoutMask | None,
    ) -> Tensor:
        result, lse, received = kept(
            partial(attend_blocks, query, key, value, exchange, scaling, dropout_mask)
        )
        ctx.exchange, ctx.scaling, ctx.dropout_mask = exchange, scaling, dropout_mask
        ctx.save_for_backward(query, key, value, result, lse, received)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, returns = SavedAttention(*ctx.saved_tensors), ctx.needs_input_grad[1]
        found = attention_gradients(
            gradient, saved, ctx.exchange, ctx.scaling, ctx.dropout_mask, returns=returns
        )
        return *found, None, None, None
