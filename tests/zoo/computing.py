"""Mistakes of what one layer computes, each with what `likely` may say of it: no rank is to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.engine.pipeline.stage import Stage
from plait.models.gpt2 import MLP, Attention, Embedding
from plait.plan.plan import Plan
from zoo import cases
from zoo.diagnosed import Mistake
from zoo.patching import during, each_alone

LLAMA, GPT2 = (import_module(f"plait.models.{name}") for name in ("llama", "gpt2"))
"""The package has functions of these names."""
ATTENTION, MLP_PATH = cases.ATTENTION, cases.MLP
Call = Callable[..., Tensor]


def _instead(module: Any, name: str, change: Callable[..., Tensor], layer: str) -> Any:
    """In the forward of a layer a function becomes `change`, which is given the original first."""
    original = getattr(module, name)

    def changed(*arguments: Any, **options: Any) -> Tensor:
        return change(original, *arguments, **options)

    return during("forward", lambda: patch.object(module, name, changed), layer=layer)


def _layer(module: type[nn.Module], forward: Callable[..., Tensor]) -> Any:
    """Layers of a class do `forward`, which is given the original first."""
    original = module.forward
    changed = patch.object(module, "forward", lambda self, x: forward(original, self, x))
    return during("forward", lambda: changed)


def _attending(change: Callable[..., Tensor]) -> Any:
    """Attention becomes `change(attention, query, key, value, **options)`."""
    return _instead(functional, "scaled_dot_product_attention", change, "*.attention")


def _given(change: Callable[[Tensor, Tensor], Tensor], layer: str) -> Any:
    """What a layer gives becomes what `change` makes of its input and its output."""
    original = Stage.forward

    def forward(self: Stage, microbatch: int, number: int) -> None:
        before: Any = self.values[microbatch]
        original(self, microbatch, number)
        if self.layers[number].path == layer:
            after: Any = self.values[microbatch]
            after.data = change(before.detach(), after.detach())

    return patch.object(Stage, "forward", each_alone(forward))


def _rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """To the digits of `dtype`, in its own."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


# positions


def query_positions_shifted() -> Any:
    """Queries are turned as if each stood one place later."""

    def turned(rotate: Call, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        if x.shape[1] == 4:  # query heads; there are two key heads
            later = LLAMA.rotary_angles(x.shape[2] + 1, x.shape[3], 10000.0, x)
            cosines, sines = later[0][1:], later[1][1:]
        return rotate(x, cosines, sines)

    return _instead(LLAMA, "rotate", turned, ATTENTION)


def rotary_base_of_another_model() -> Any:
    return _instead(
        LLAMA, "rotary_angles", lambda call, n, size, base, *rest: call(n, size, base * 50, *rest), ATTENTION
    )


def rotary_pairs_of_neighbours() -> Any:
    """Feature 2i is turned with 2i + 1."""

    def turned(rotate: Call, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        result = rotate(halves, cosines, sines)
        return torch.stack(result.chunk(2, -1), -1).flatten(-2)

    return _instead(LLAMA, "rotate", turned, ATTENTION)


def keys_not_turned() -> Any:
    return _instead(
        LLAMA, "rotate", lambda call, x, *angles: x if x.shape[1] == 2 else call(x, *angles), ATTENTION
    )


def turned_backwards() -> Any:
    """Queries only."""
    return _instead(
        LLAMA, "rotate", lambda call, x, c, s: call(x, c, -s if x.shape[1] == 4 else s), ATTENTION
    )


def positions_one_later() -> Any:
    """The position embedding begins with its second row."""

    return _layer(
        Embedding, lambda call, self, x: self.token(x) + self.position((torch.arange(x.shape[1]) + 1) % 8)
    )


def positions_left_out() -> Any:
    return _layer(Embedding, lambda call, self, x: self.token(x) * 1)


def positions_twice() -> Any:
    return _layer(Embedding, lambda call, self, x: call(self, x) + self.position(torch.arange(x.shape[1])))


def embedding_times_root_of_hidden() -> Any:
    """As Gemma does."""
    return _given(lambda before, after: after * 4.0, "embedding")


# heads


def query_heads_swapped() -> Any:
    return _attending(lambda call, q, k, v, **options: call(q.flip(1), k, v, **options))


def value_heads_swapped() -> Any:
    return _attending(lambda call, q, k, v, **options: call(q, k, v.flip(1), **options))


def heads_swapped_behind_attention() -> Any:
    return _attending(lambda call, *tensors, **options: call(*tensors, **options).flip(1))


def heads_and_features_mixed_up() -> Any:
    """Heads are put together as if features came first."""
    return _attending(
        lambda call, *tensors, **options: (
            call(*tensors, **options)
            .permute(0, 2, 3, 1)
            .flatten(2)
            .unflatten(2, (tensors[0].shape[1], -1))
            .transpose(1, 2)
        )
    )


def keys_for_values() -> Any:
    return _attending(lambda call, q, k, v, **options: call(q, k, k, **options))


# scales and masks


def scores_divided_by_the_head_size() -> Any:
    return _attending(lambda call, q, k, v, **rest: call(q, k, v, **(rest | {"scale": 1 / q.shape[-1]})))


def scores_not_scaled() -> Any:
    return _attending(lambda call, q, k, v, **rest: call(q, k, v, **(rest | {"scale": 1.0})))


def _masked(visible: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Query position i sees key position j where `visible(i, j)`."""

    def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return call(q, k, v, **(options | {"is_causal": False, "attn_mask": visible(i, j)}))

    return _attending(attend)


def mask_missing() -> Any:
    return _masked(lambda i, j: j < 99 + i)


def one_position_ahead_is_seen() -> Any:
    return _masked(lambda i, j: j <= i + 1)


def own_position_is_not_seen() -> Any:
    return _masked(lambda i, j: (j < i) | (i + j == 0))


def only_three_positions_are_seen() -> Any:
    return _masked(lambda i, j: (j <= i) & (j > i - 3))


# norms


def rms_epsilon_doubled() -> Any:
    return _instead(functional, "rms_norm", lambda call, x, n, w, eps: call(x, n, w, 2 * eps), "*.mlp")


def rms_epsilon_of_the_head() -> Any:
    return _instead(functional, "rms_norm", lambda call, x, n, w, eps: call(x, n, w, 1e-6), "head")


def layer_norm_epsilon() -> Any:
    return _instead(functional, "layer_norm", lambda call, x, n, w, b, e: call(x, n, w, b, 1e-3), ATTENTION)


def layer_norm_epsilon_slightly() -> Any:
    return _instead(functional, "layer_norm", lambda call, x, n, w, b, e: call(x, n, w, b, 1e-6), ATTENTION)


def norm_without_its_mean() -> Any:
    return _instead(
        functional,
        "layer_norm",
        lambda call, x, n, w, b, e: x / (x.square().mean(-1, keepdim=True) + e).sqrt() * w + b,
        MLP_PATH,
    )


def norm_weight_counts_from_one() -> Any:
    return _instead(functional, "rms_norm", lambda call, x, n, w, eps: call(x, n, w + 1, eps), "head")


def norm_bias_left_out() -> Any:
    return _instead(functional, "layer_norm", lambda call, x, n, w, b, e: call(x, n, w, None, e), "head")


# activations


def gelu_with_erf() -> Any:
    return _instead(functional, "gelu", lambda call, x, approximate: call(x), MLP_PATH)


def relu_for_gelu() -> Any:
    return _instead(functional, "gelu", lambda call, x, approximate: x.relu(), MLP_PATH)


def gelu_for_silu() -> Any:
    return _instead(functional, "silu", lambda call, x: functional.gelu(x), MLP_PATH)


def gate_and_up_swapped() -> Any:
    def forward(call: Call, self: Any, x: Tensor) -> Tensor:
        normed = self.norm(x)
        result: Tensor = x + self.down(functional.silu(self.up(normed)) * self.gate(normed))
        return result

    return _layer(LLAMA.MLP, forward)


# what is added


def inner_bias_left_out() -> Any:
    def forward(call: Call, self: Any, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x)) - self.up.bias
        result: Tensor = x + self.down(functional.gelu(inner, approximate="tanh"))
        return result

    return _layer(MLP, forward)


def last_bias_left_out() -> Any:
    return _layer(MLP, lambda call, self, x: call(self, x) - self.down.bias)


def last_bias_twice() -> Any:
    return _layer(Attention, lambda call, self, x: call(self, x) + self.output.bias)


def residual_left_out() -> Any:
    return _layer(MLP, lambda call, self, x: call(self, x) - x)


def residual_taken_twice() -> Any:
    return _layer(MLP, lambda call, self, x: call(self, x) + x)


def residual_halved() -> Any:
    return _layer(Attention, lambda call, self, x: call(self, x) - x / 2)


def residual_of_the_norm() -> Any:
    """What flows around the MLP is its norm, not its input."""
    return _layer(MLP, lambda call, self, x: call(self, x) - x + self.norm(x))


def branch_scaled() -> Any:
    return _layer(MLP, lambda call, self, x: x + (call(self, x) - x) * 0.7)


def branch_left_out() -> Any:
    return _layer(Attention, lambda call, self, x: x * 1)


def logits_capped() -> Any:
    return _given(lambda before, after: 0.3 * (after / 0.3).tanh(), "head")


def logits_cooled() -> Any:
    return _given(lambda before, after: after / 1.3, "head")


def one_position_later() -> Any:
    """A layer gives each position what belongs to the one before."""
    return _given(lambda before, after: after.roll(1, 1), MLP_PATH)


def rows_reversed() -> Any:
    return _given(lambda before, after: after.flip(0), MLP_PATH)


def last_position_lost() -> Any:
    def lost(before: Tensor, after: Tensor) -> Tensor:
        after[:, -1] = 0
        return after

    return _given(lost, MLP_PATH)


ONE = Plan(microbatches=2)


def _of(defect: Any, model: Any, cause: str = "", *true: str, plan: Plan = ONE, **more: Any) -> Mistake:
    return Mistake(defect, model, plan, cause, frozenset(true), **more)


G, L = cases.GPT2, replace(cases.LLAMA)
SCORES = "first position|rotary|score"
COMPUTING: tuple[Mistake, ...] = (
    _of(query_positions_shifted, L, SCORES),
    _of(rotary_base_of_another_model, L, SCORES),
    _of(rotary_pairs_of_neighbours, L, SCORES),
    _of(keys_not_turned, L, SCORES),
    _of(turned_backwards, L, SCORES),
    _of(positions_one_later, G, "position"),
    _of(positions_left_out, G, "position.weight"),
    _of(positions_twice, G, "position.weight"),
    _of(embedding_times_root_of_hidden, G, "4 times", "factor"),
    _of(query_heads_swapped, G, SCORES),
    _of(value_heads_swapped, G, "output"),
    _of(heads_swapped_behind_attention, G, "output"),
    _of(heads_and_features_mixed_up, G, "output"),
    _of(keys_for_values, G, "output"),
    _of(scores_divided_by_the_head_size, G, SCORES),
    _of(scores_not_scaled, L, SCORES),
    _of(mask_missing, G, "last position|mask", "cut", "rows"),
    _of(one_position_ahead_is_seen, L, "last position|mask", "cut", "rows"),
    _of(own_position_is_not_seen, G, SCORES, "cut", "rows"),
    _of(only_three_positions_are_seen, G, "0:3|first 3 positions|3:8", "cut", "rows"),
    _of(rms_epsilon_doubled, L, "norm"),
    _of(rms_epsilon_of_the_head, L, "norm"),
    _of(layer_norm_epsilon, G, "norm"),
    _of(layer_norm_epsilon_slightly, G, "norm"),
    _of(norm_without_its_mean, G, "norm"),
    _of(norm_weight_counts_from_one, L, "norm"),
    _of(norm_bias_left_out, G, "norm", "bias"),
    _of(gelu_with_erf, G, "down"),
    _of(relu_for_gelu, G, "down"),
    _of(gelu_for_silu, L, "down"),
    _of(gate_and_up_swapped, L, "down"),
    _of(inner_bias_left_out, G, "down"),
    _of(last_bias_left_out, G, "down.bias", "bias"),
    _of(last_bias_twice, G, "output.bias", "bias"),
    _of(residual_left_out, G, "residual connection", "residual"),
    _of(residual_taken_twice, G, "residual connection", "residual"),
    _of(residual_halved, G, "residual connection", "residual"),
    _of(residual_of_the_norm, G, "computes with"),
    _of(branch_scaled, G, "0.7 times", "factor"),
    _of(branch_left_out, G, "unchanged", "factor"),
    _of(logits_capped, G, "computes with"),
    _of(logits_cooled, G, "0.76923[0-9]* times", "factor"),
    _of(one_position_later, G, "shifted|one (position )?later", "order"),
    _of(rows_reversed, G, "order|revers|permut", "order"),
    _of(last_position_lost, G, "7:8 of dim 1|zero", "cut", "rows"),
)
