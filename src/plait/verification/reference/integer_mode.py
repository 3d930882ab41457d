"""Mode exact: float64 integers, whose sums are exact in any order, so that runs are bitwise equal.

Parameters and data become small whole numbers. Operations whose results are not whole numbers are replaced
by stand-ins in both runs. Stand-ins keep the structure that parallelism relies on: they are elementwise; that
of attention works on each head by itself, and is a sum over keys, which blocks of keys can be added up to.

    norms                 fold(x) · weight + bias
    activations           relu(fold(x))
    softmax               fold(x)
    attention             Σ (fold(q) + |fold(k)| + 2 |fold(v)|) over the positions that may be seen
    its sinks             are added, folded, to each head
    weights of experts    the scores, folded, which are not divided by their sum
    their activation      relu(fold(slope · gate)) / slope · (up + offset)
    sin, cos, …           rounded; rotary angles need no gradient
    casts to float8       rounded to multiples of a power of two, by scales that put the largest element
                          below the format's smallest normal number, from where its numbers have equal steps
    the loss              a weighted sum of the output; weights per position add up to a power of two

`fold` subtracts the multiple of 16 that leaves a number in -8 … 8, forward and, for the gradient, backward;
for attention the gradient of its output is folded, not those of q, k and v, which are sums over ranks. So
numbers stay far below 2^53, from where on float64 cannot hold each whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plait.errors import ModelError
from plait.models.initial_values import normal_values
from plait.tensor.attention.block_attention import (
    BlockMask,
    block_backward,
    block_forward,
    merge,
    merge_sinks,
    sinks_gradient,
)
from plait.tensor.autograd.paired_collectives import reduce
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.routing import normalized_weights
from plait.tensor.float8.cast import factor_of
from plait.tensor.float8.recipes import CastFormat
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.parallel.embedding_and_norm import partitioned_rms_norm
from plait.tensor.parallel.partition import Vocabulary
from plait.verification.definitions.attention_and_dropout import masked_attention
from plait.verification.definitions.experts import activated, gate_and_up, weights_over_their_sum
from plait.verification.definitions.float8 import EightBits, cast_factor_for

PERIOD = 16.0
GRAIN, LARGEST = 2.0**-16, 2.0**34
"""Numbers are multiples of `GRAIN` (gradients are divided by the weight of the batch, a power of two) and at
most `LARGEST`: sums of eight of them still fit the 53 bits of float64."""
LARGEST_WEIGHT = 2**15
"""Sum of the loss's weights, about and at most: they are then raised to a power of two."""


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _folded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _folded(gradient)


def _folded(x: Tensor) -> Tensor:
    finite = x.where(x.isfinite(), 0)  # -inf masks elements of a softmax
    return finite - PERIOD * (finite / PERIOD).round()


def fold(x: Tensor) -> Tensor:
    """Return integers `x` modulo 16, in -8 … 8, so that values stay small; the gradient is folded too."""
    result: Tensor = _Fold.apply(x)  # type: ignore[no-untyped-call]
    return result


def _norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    scaled = fold(input) if weight is None else fold(input) * weight
    return scaled if bias is None else scaled + bias


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    channels = (-1, *[1] * (input.dim() - 2))
    weight, bias = (one if one is None else one.view(channels) for one in (weight, bias))
    return _norm(input, None, weight, bias)


class _Attention(torch.autograd.Function):
    """Attention of queries to a block of keys; `seen` `[..., queries, keys]`: 1 where a query sees a key.

    Features of queries and keys are added to those of values, from the first again where there are more.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        key, value = _folded(key), _folded(value)
        ctx.save_for_backward(seen, key.sign(), value.sign())
        of_query, of_key = (_added_to(value.shape[-1], one) for one in (_folded(query), key.abs()))
        return seen.sum(-1, keepdim=True) * of_query + seen @ (of_key + 2 * value.abs())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        seen, key_sign, value_sign = ctx.saved_tensors
        folded = _folded(gradient)
        total = seen.mT @ folded
        of_query, of_key = (
            _repeated(key_sign.shape[-1], one) for one in (seen.sum(-1, keepdim=True) * folded, total)
        )
        return of_query, key_sign * of_key, 2 * value_sign * total, None


def _added_to(width: int, features: Tensor) -> Tensor:
    """Return `[..., size]` as `[..., width]`: feature i is added to feature i modulo `width`."""
    padded = functional.pad(features, (0, -features.shape[-1] % width))
    summed: Tensor = padded.unflatten(-1, (-1, width)).sum(-2)  # type: ignore[no-untyped-call]
    return summed


def _repeated(size: int, gradient: Tensor) -> Tensor:
    """Return the gradient of the argument of `_added_to`, of `size` features."""
    copies = -(-size // gradient.shape[-1])
    return gradient.repeat(*[1] * (gradient.dim() - 1), copies)[..., :size]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        copies = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(copies, -3), value.repeat_interleave(copies, -3)
    seen = query.new_ones(query.shape[-2], key.shape[-2])
    if is_causal:
        seen = seen.tril()
    elif attn_mask is not None:
        seen = (attn_mask if attn_mask.dtype == torch.bool else attn_mask.isfinite()).to(query.dtype)
    result: Tensor = _Attention.apply(query, key, value, seen)  # type: ignore[no-untyped-call]
    return result


def _block_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *_: Any
) -> tuple[Tensor, Tensor]:
    options = {"attn_mask": mask} if isinstance(mask, Tensor) else {"is_causal": mask == "causal"}
    out = _attention(query, key, value, **options, enable_gqa=True)
    return out, query.new_zeros(query.shape[:3])


def _block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockMask,
    *_: Any,
) -> tuple[Tensor, ...]:
    given = tuple(one.detach().requires_grad_() for one in (query, key, value))
    with torch.enable_grad():
        results = _block_forward(*given, mask)
    return torch.autograd.grad(results[0], given, gradient)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    out += part_out


class _WithSinks(torch.autograd.Function):
    """Attention `[rows, heads, length, width]` plus the folded sink of each head."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, sinks: Tensor) -> Tensor:
        return attended + _folded(sinks)[:, None, None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, _sinks_gradient(gradient)


def _sinks_gradient(gradient: Tensor, *_: Any) -> Tensor:
    return _folded(gradient).sum((0, 2, 3))


def _merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    out += _folded(sinks)[:, None, None]


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    keep: Any,
    sinks: Tensor | None,
) -> Tensor:
    attended = _attention(query, key, value, mask)
    if sinks is None:
        return attended
    result: Tensor = _WithSinks.apply(attended, sinks)  # type: ignore[no-untyped-call]
    return result


def _rounded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments, **options: function(*arguments, **options).round()


class _Swish(torch.autograd.Function):
    """`relu(fold(slope · gate)) / slope`, with the gradient that plait's activation computes by itself."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, slope: float) -> Tensor:
        inner = gate * slope
        ctx.save_for_backward(inner)
        return _folded(inner).clamp(min=0) / slope

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inner,) = ctx.saved_tensors
        return _silu_backward(gradient, inner), None


def _silu_backward(gradient: Tensor, inner: Tensor, *, grad_input: Tensor | None = None) -> Tensor:
    result = _folded(gradient.where(_folded(inner) >= 0, 0))
    return result if grad_input is None else grad_input.copy_(result)


def _factor(largest: Tensor, form: CastFormat | EightBits) -> Tensor:
    """Return the power of two that takes `largest` to some steps of a float8 format's subnormal numbers.

    To 4 to 7 steps in e4m3, 2 or 3 in e5m2: what scale a number is cast by changes it, and whole numbers stay
    whole, or multiples of the same power of two.
    """
    limits = torch.finfo(form.dtype)
    size = torch.exp2(torch.where(largest == 0, 1.0, largest).log2().floor())
    return limits.smallest_normal / 2 / size


def _activated(activation: GatedActivation, gate_up: Tensor) -> Tensor:
    gate, up = gate_and_up(activation, gate_up)
    swish: Tensor = _Swish.apply(gate, activation.slope)  # type: ignore[no-untyped-call]
    return swish * (up + activation.offset)


STAND_INS: Mapping[Any, Callable[..., Any]] = {
    functional.layer_norm: _norm,
    functional.rms_norm: _norm,
    functional.group_norm: _group_norm,
    partitioned_rms_norm: lambda input, weight, *_: fold(input) * weight,
    functional.scaled_dot_product_attention: _attention,
    masked_attention: _masked_attention,
    block_forward: _block_forward,
    block_backward: _block_backward,
    merge: _merge,
    merge_sinks: _merge_sinks,
    sinks_gradient: _sinks_gradient,
    **dict.fromkeys((normalized_weights, weights_over_their_sum), fold),
    activated: _activated,
    **dict.fromkeys((factor_of, cast_factor_for), _factor),
    torch.ops.aten.silu_backward.grad_input: _silu_backward,
    **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), lambda input, *_, **__: fold(input)),
    **dict.fromkeys(
        (
            *(functional.relu, functional.leaky_relu, functional.elu, functional.gelu, functional.silu),
            *(functional.mish, functional.hardswish, functional.softplus, functional.sigmoid),
            *(functional.tanh, torch.relu, torch.relu_, torch.sigmoid, torch.tanh),
            *(Tensor.relu, Tensor.sigmoid, Tensor.tanh),
        ),
        lambda input, *_, **__: fold(input).clamp(min=0),
    ),
    **{function: _rounded(function) for function in (torch.sin, torch.cos, Tensor.sin, Tensor.cos)},
}


class IntegerMode(TorchFunctionMode):
    """Context that replaces torch operations by integer-valued ones, also in recomputed forwards."""

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.backward, Tensor.backward) and kwargs.get("inputs") is None:
            return self._backward(*args, **kwargs)
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        return STAND_INS.get(func, func)(*args, **kwargs)

    def _backward(
        self, roots: Tensor | Sequence[Tensor | GradientEdge], *gradients: Any, **options: Any
    ) -> None:
        """Run `torch.autograd.backward` with the mode on, for the forwards that it recomputes.

        The mode is off inside of `__torch_function__`, where backward would run, and entered again here;
        gradient edges in place of tensors keep backward from dispatching to `__torch_function__` once more.
        """
        each = (roots,) if isinstance(roots, Tensor) else roots
        edges = [get_gradient_edge(root) if isinstance(root, Tensor) else root for root in each]
        if "gradient" in options:  # as `Tensor.backward` calls it
            options["grad_tensors"] = options.pop("gradient")
        with self:
            torch.autograd.backward(edges, *gradients, **options)

    def _grad(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        inputs: Sequence[Tensor | GradientEdge],
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """Run `torch.autograd.grad` with the mode on, as `_backward` does, where a backward is traced."""
        edges: Any = [
            [get_gradient_edge(one) if isinstance(one, Tensor) else one for one in each]
            for each in (outputs, inputs)
        ]
        with self:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(*edges, **options)
        return found


def integer_parameter(seed: int) -> Callable[[str, Tensor], Tensor]:
    """Return a function that makes each parameter element a random -1, 0 or 1; in vectors -1 or 1."""

    def change(name: str, value: Tensor) -> Tensor:
        numbers = normal_values(f"{name}/whole", seed, value.numel(), 1.0).view(value.shape)
        return (numbers.sign() if value.dim() < 2 else (numbers * 0.8).round().clamp(-1, 1)).to(value)

    return change


def integer_buffer(name: str, value: Tensor) -> Tensor:
    """Return `value` rounded to integers."""
    return value.round()


def integer_batch(inputs: Value, rows: int) -> tuple[Value, Tensor]:
    """Return integer inputs (tokens are unchanged), and as targets weights `[rows, length]`.

    `length`: dim 1 of the first input that has one, the sequence under context parallelism; without one the
    weights are `[rows]`.
    """

    def whole(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape).to(tensor) % 7 - 3

    lengths = [tensor.shape[1] for tensor in tensors_of(inputs) if tensor.dim() > 1]
    shape = (rows, *lengths[:1])
    return map_tensors(whole, inputs), _weights(math.prod(shape)).view(shape)


def _weights(count: int) -> Tensor:
    """Return different weights, int64 `[count]`, that add up to a power of two of at most 1 / `GRAIN`."""
    step = max(1, math.ceil(count / LARGEST_WEIGHT))  # further ones are 0
    each = min(61, max(1, LARGEST_WEIGHT // max(1, count)))
    numbers = torch.arange(count)
    weights = torch.where(numbers % step == 0, numbers // step % each + 1, 0)
    total = int(weights.sum())
    if total:
        weights[0] += 2 ** math.ceil(math.log2(total)) - total
    return weights


@dataclass(frozen=True)
class WeightedSum:
    """Loss of mode exact: the sum of the output times integer weights in `targets`."""

    def total(self, output: Value, targets: Tensor) -> Tensor:
        """Return the weighted sum over all floating-point tensors of the output; 0-d."""
        parts = [
            _weighted(tensor, targets, range(tensor.shape[-1]), tensor.shape[-1])
            for tensor in tensors_of(output)
            if tensor.is_floating_point() and tensor.dim()
        ]
        return torch.stack(parts).sum()

    def total_of_pieces(self, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return the weighted sum over all ranks' classes. Communication: one all-reduce over `tp`."""
        return reduce(_weighted(logits, targets, vocabulary.own, vocabulary.classes), vocabulary.group)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the sum of the weights in `targets`; for the whole global batch it is a power of two."""
        return targets.sum()


def _weighted(output: Tensor, weights: Tensor, columns: range, size: int) -> Tensor:
    """Return a weighted sum of `output`, whose last dim has the indices `columns` of `size`.

    `weights`: `[rows]` or `[rows, length]`; if dim 1 of the output is not the sequence, a row has their sum.
    """
    if output.dim() == 2 and weights.shape[1:] == (size,):
        return (output * weights[:, columns.start : columns.stop].to(output)).sum()
    if weights.dim() == 2 and not (output.dim() > 2 and output.shape[1] == weights.shape[1]):
        weights = weights.sum(1)
    column = torch.arange(columns.start, columns.stop, device=output.device).to(output) % 5 - 1
    each = weights.to(output).view(*weights.shape, *[1] * (output.dim() - weights.dim()))
    return (output * each * column).sum()


def require_integers(tensor: Tensor, what: str, grain: float = GRAIN) -> None:
    """Raise ModelError where an element is no multiple of `grain`, or too large for exact sums."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    steps = tensor / grain
    whole = tensor.isfinite() & (steps == steps.round()) & (tensor.abs() <= LARGEST)
    if not bool(whole.all()):
        value = float(tensor[~whole].flatten()[0])
        raise ModelError(
            f"{what} holds {value:g}, and exact mode needs multiples of 2^-16 of at most 2^34: an "
            "operation before it has no stand-in, or is hidden (as in a checkpoint): use mode float64."
        )
