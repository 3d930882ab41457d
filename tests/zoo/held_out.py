"""Mistakes that were written down after the hypotheses, and by which none of them was made."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from plait.engine.pipeline.loss_stage import LossStage
from plait.models.gpt2 import MLP, Head
from plait.plan.plan import Plan
from plait.tensor.parallel import embedding_and_norm as embedding
from zoo import cases, computing
from zoo.computing import _attending, _given, _instead, _layer, _of
from zoo.diagnosed import Mistake
from zoo.exchanging import PP, TP, _entering, _leaving, _sent, _sent_back
from zoo.reducing import DP, _reduced
from zoo.training import _backward, _losing, _stepping, _weight


def rotary_scaled() -> Any:
    """Positions are divided by two, as for a longer context."""
    return _instead(
        computing.LLAMA,
        "rotary_angles",
        lambda call, n, *rest: tuple(t[::2] for t in call(2 * n, *rest)),  # type: ignore[arg-type,return-value]
        cases.ATTENTION,
    )


def rotary_on_values() -> Any:
    def attend(call: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        angles = computing.LLAMA.rotary_angles(v.shape[2], v.shape[3], 10000.0, v)
        return call(q, k, computing.LLAMA.rotate(v, *angles), **options)  # type: ignore[no-any-return]

    return _attending(attend)


def heads_rolled() -> Any:
    return _attending(lambda call, *qkv, **options: call(*qkv, **options).roll(1, 1))


def keys_reversed_in_time() -> Any:
    return _attending(lambda call, q, k, v, **options: call(q, k.flip(2), v.flip(2), **options))


def scores_capped() -> Any:
    return _attending(lambda call, q, k, v, **options: call((q / 5).tanh() * 5, k, v, **options))


def head_norm_left_out() -> Any:
    return _layer(Head, lambda call, self, x: self.output(x))


def norm_behind_the_residual() -> Any:
    """Post-norm in the place of pre-norm."""
    return _layer(
        MLP, lambda call, self, x: self.norm(x + self.down(functional.gelu(self.up(x), approximate="tanh")))
    )


def norm_with_unbiased_variance() -> Any:
    return _instead(
        functional,
        "layer_norm",
        lambda call, x, n, w, b, e: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + e).sqrt() * w + b
        ),
        cases.ATTENTION,
    )


def output_bias_halved() -> Any:
    return _layer(MLP, lambda call, self, x: call(self, x) - self.down.bias / 2)


def query_bias_left_out() -> Any:
    return _attending(lambda call, q, k, v, **options: call(q - q.mean(2, keepdim=True), k, v, **options))


def dropout_left_on() -> Any:
    """A tenth of what the MLP adds is zero, the rest larger."""

    def drop(before: Tensor, after: Tensor) -> Tensor:
        kept = torch.rand(after.shape, generator=torch.Generator().manual_seed(0)) > 0.1
        return before + (after - before) * kept / 0.9

    return _given(drop, cases.MLP)


def features_exchanged() -> Any:
    return _given(lambda before, after: after.unflatten(-1, (2, -1)).flip(-2).flatten(-2), cases.ATTENTION)


def first_token_counts_twice() -> Any:
    def twice(before: Tensor, after: Tensor) -> Tensor:
        after[:, 0] *= 2
        return after

    return _given(twice, "embedding")


def logits_of_an_unknown_class() -> Any:
    def masked(before: Tensor, after: Tensor) -> Tensor:
        after[..., 5] = -1e9
        return after

    return _given(masked, "head")


def loss_smoothed() -> Any:
    return _losing(
        lambda total, output, targets: functional.cross_entropy(
            output.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1
        )
    )


def loss_doubled() -> Any:
    return _losing(lambda total, output, targets: 2 * total)


def backward_clipped() -> Any:
    return _backward(lambda before, after: after.clamp(-1e-3, 1e-3), cases.ATTENTION)


def weight_gradients_decay() -> Any:
    """The decay is in the gradient already."""

    def change(parameter: Any, before: Tensor, added: Tensor) -> None:
        parameter.grad.add_(parameter.data, alpha=0.1)

    return _weight(change, cases.MLP)


def signs_of_the_gradient() -> Any:
    return _weight(lambda p, before, added: p.grad.copy_(before - added), "head")  # type: ignore[union-attr,return-value]


def maximised() -> Any:
    return _stepping(lambda group: group.update(maximize=True))


# exchanged


def sum_without_the_last_row() -> Any:
    def change(parts: Any, own: int) -> Tensor:
        total = sum(parts)
        total[-1] = parts[own][-1]  # type: ignore[index]
        return total  # type: ignore[return-value]

    return _leaving(change)


def product_for_the_sum() -> Any:
    return _leaving(lambda parts, own: parts[0] * parts[1])


def others_summand_of_another_row() -> Any:
    return _leaving(lambda parts, own: parts[own] + parts[1 - own].flip(0))


def gradients_of_the_region_negative() -> Any:
    return _entering(lambda parts, own: parts[own] - parts[1 - own])


def message_transposed() -> Any:
    return _sent(lambda action, tensor: tensor.transpose(1, 2).contiguous().view_as(tensor))


def message_in_half_precision() -> Any:
    return _sent(lambda action, tensor: tensor.half().double())


def message_of_another_micro_batch_in_part() -> Any:
    """One position is that of the first micro-batch."""
    first: list[Tensor] = []

    def change(action: Any, tensor: Tensor) -> Tensor:
        first.append(tensor.clone())
        tensor[:, 3] = first[0][:, 3]
        return tensor

    return _sent(change)


def gradient_message_offset() -> Any:
    return _sent_back(lambda gradient: gradient + 1e-4)


def dp_weighted_by_rank() -> Any:
    return _reduced(lambda parts, own: parts[0] + 2 * parts[1])


def dp_product() -> Any:
    return _reduced(lambda parts, own: parts[0] * parts[1])


def dp_reversed() -> Any:
    """The other rank's buffer begins at its end."""
    return _reduced(lambda parts, own: parts[own] + parts[1 - own].flip(0))


def embedding_without_mask() -> Any:
    """Rows of others count as rows of this rank's."""
    original = embedding.reduce
    looked_up = embedding.embedding
    rows: list[Tensor] = []

    def remembered(*arguments: Any) -> Tensor:
        rows.append(looked_up(*arguments))
        return rows[-1]

    return patch.multiple(
        embedding, embedding=remembered, reduce=lambda masked, group: original(rows.pop(), group)
    )


def loss_weighted_by_hand() -> Any:
    """Each rank multiplies its loss gradient by the number of ranks."""
    original = LossStage.begin
    return patch.object(
        LossStage, "begin", lambda self, targets, scale: original(self, targets, scale and scale * 5)
    )


TP1_DP2, TP1_PP2 = Plan(dp=2, microbatches=3), Plan(pp=2, microbatches=3, layers_per_stage=(2, 2))
G, L = cases.GPT2, cases.LLAMA
SCORES, BETWEEN = computing.SCORES, "output is given"
HELD_OUT: tuple[Mistake, ...] = (
    _of(rotary_scaled, L, SCORES, "cut", "rows"),
    _of(rotary_on_values, L, BETWEEN),
    _of(heads_rolled, cases.FOUR_HEADS, BETWEEN, plan=TP1_PP2),
    _of(keys_reversed_in_time, G, BETWEEN),
    _of(scores_capped, G, SCORES, plan=TP1_DP2),
    _of(head_norm_left_out, G, "output is given"),
    _of(norm_behind_the_residual, G, "norm|up is given"),
    _of(norm_with_unbiased_variance, G, "norm gives"),
    _of(output_bias_halved, G, "bias", "bias"),
    _of(query_bias_left_out, G, BETWEEN),
    _of(dropout_left_on, G, "layer computes with"),
    _of(features_exchanged, G, "order", "order"),
    _of(first_token_counts_twice, L, "0:1 of dim 1"),
    _of(logits_of_an_unknown_class, G, "5:6 of dim 2"),
    _of(loss_smoothed, G, "the loss itself", "targets"),
    _of(loss_doubled, G, "2 times|the loss itself", "targets", "factor"),
    _of(backward_clipped, G, "backward"),
    _of(weight_gradients_decay, G, "weight gradient|that of its weight"),
    _of(signs_of_the_gradient, G, "-1 times", "factor"),
    _of(maximised, G, "-[0-9.]* times|setting", "factor"),
    _of(sum_without_the_last_row, L, "1:2 of dim 0|over tp is missing|down gives", "sum", "cut", plan=TP),
    _of(product_for_the_sum, L, "down gives", "sum", "cut", plan=TP),
    _of(others_summand_of_another_row, L, "down gives", "sum", "cut", plan=TP),
    _of(gradients_of_the_region_negative, L, "over tp", "sum", "cut", "region", plan=TP),
    _of(message_transposed, G, "order", "order", plan=PP),
    _of(message_in_half_precision, G, "float16", "float16", plan=PP),
    _of(message_of_another_micro_batch_in_part, L, "3:4 of dim 1", plan=PP),
    _of(gradient_message_offset, L, "changed on its way", "order", plan=PP),
    _of(dp_weighted_by_rank, G, "reduction", "sum", plan=DP),
    _of(dp_product, G, "reduction", "sum", plan=DP),
    _of(dp_reversed, L, "reduction", "sum", plan=DP),
    _of(embedding_without_mask, G, "token gives", "cut", plan=TP),
    _of(loss_weighted_by_hand, G, "5 times", "factor", plan=DP),
)
