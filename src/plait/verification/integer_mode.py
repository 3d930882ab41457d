"""Whole numbers in float64: sums are exact in any order, so that two runs have to agree bit by bit.

Parameters and data become small whole numbers; operations that would leave them get stand-ins, the same on
both sides. They keep what tensor parallelism has to respect: a stand-in works on each element by itself, and
attention on each head by itself.

    norms                 fold(x) · weight + bias
    activations           relu(fold(x))
    softmax               fold(x)
    attention             fold(q) + Σ (fold(k) + 2 fold(v)) over the positions that may be seen
    sin, cos, …           rounded; they carry no gradient where positions are turned into angles
    the loss              a weighted sum of the output, with weights per row that add up to a power of two

`fold` takes a number to the nearest one in -8 … 8 that differs from it by a multiple of 16, forward and, for
the gradient, backward. So numbers stay far below 2^53, where float64 stops telling whole numbers apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plait.autograd.paired_collectives import reduce
from plait.errors import ModelError
from plait.layers.nested import Value, map_tensors, tensors_of
from plait.models.initial import normal_values
from plait.tensor.vocabulary import Vocabulary

PERIOD = 16.0
GRAIN, LARGEST = 2.0**-16, 2.0**34
"""Numbers are multiples of the one (gradients are divided by the weight of the batch, a power of two) and at
most the other: sums of eight of them still have the 53 bits that float64 holds."""


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _folded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _folded(gradient)


def _folded(x: Tensor) -> Tensor:
    finite = x.where(x.isfinite(), 0)  # -inf stands for what a softmax must not see
    return finite - PERIOD * (finite / PERIOD).round()


def fold(x: Tensor) -> Tensor:
    """Into -8 … 8, forward and backward."""
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
    return _norm(
        input,
        None,
        None if weight is None else weight.view(channels),
        None if bias is None else bias.view(channels),
    )


def _activation(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return fold(input).clamp(min=0)


def _softmax(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return fold(input)


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
        seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask.isfinite()
    return fold(query) + seen.to(query.dtype) @ (fold(key) + 2 * fold(value))


def _rounded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments, **options: function(*arguments, **options).round()


STAND_INS: Mapping[Any, Callable[..., Tensor]] = {
    functional.layer_norm: _norm,
    functional.rms_norm: _norm,
    functional.group_norm: _group_norm,
    functional.scaled_dot_product_attention: _attention,
    functional.softmax: _softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    **dict.fromkeys(
        (
            functional.relu,
            functional.gelu,
            functional.silu,
            functional.mish,
            functional.elu,
            functional.leaky_relu,
            functional.hardswish,
            functional.softplus,
            functional.sigmoid,
            functional.tanh,
            torch.relu,
            torch.relu_,
            torch.sigmoid,
            torch.tanh,
            Tensor.relu,
            Tensor.sigmoid,
            Tensor.tanh,
        ),
        _activation,
    ),
    **{function: _rounded(function) for function in (torch.sin, torch.cos, Tensor.sin, Tensor.cos)},
}


class IntegerMode(TorchFunctionMode):
    """While it is entered, operations with a stand-in are done by that; so is what a backward makes again."""

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.backward, Tensor.backward) and kwargs.get("inputs") is None:
            return self._backward(*args, **kwargs)
        return STAND_INS.get(func, func)(*args, **kwargs)

    def _backward(self, roots: Tensor | Sequence[Tensor], *gradients: Any, **options: Any) -> None:
        """A backward with the mode on: it is off while it is told of a function, and a backward is one.

        Of the edges of a graph it is not told.
        """
        edges = [get_gradient_edge(root) for root in ((roots,) if isinstance(roots, Tensor) else roots)]
        if "gradient" in options:  # as `Tensor.backward` calls it
            options["grad_tensors"] = options.pop("gradient")
        with self:
            torch.autograd.backward(edges, *gradients, **options)


def integer_parameter(seed: int) -> Callable[[str, Tensor], Tensor]:
    """-1, 0 and 1, by name, seed and index; a vector has no zeros, for it may be a scale."""

    def change(name: str, value: Tensor) -> Tensor:
        numbers = normal_values(f"{name}/whole", seed, 0, value.numel(), 1.0).view(value.shape)
        return (numbers.sign() if value.dim() < 2 else (numbers * 0.8).round().clamp(-1, 1)).to(value)

    return change


def integer_buffer(name: str, value: Tensor) -> Tensor:
    """The nearest whole numbers."""
    return value.round()


def integer_batch(inputs: Value, rows: int) -> tuple[Value, Tensor]:
    """Inputs of whole numbers (tokens stay what they are), and a weight for each row as the targets."""

    def whole(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape).to(tensor) % 7 - 3

    weights = torch.arange(rows) % 61 + 1  # no two micro-batches of a few rows weigh the same
    weights[0] += 2 ** math.ceil(math.log2(int(weights.sum()))) - int(weights.sum())
    return map_tensors(whole, inputs), weights


@dataclass(frozen=True)
class WeightedSum:
    """The loss: each element of the output times whole numbers that depend on its row and its last index."""

    def total(self, output: Value, targets: Tensor) -> Tensor:
        """The sum over all floating-point tensors of the output; 0-d."""
        parts = [
            _weighted(tensor, targets, range(tensor.shape[-1]))
            for tensor in tensors_of(output)
            if tensor.is_floating_point() and tensor.dim()
        ]
        return torch.stack(parts).sum()

    def total_of_pieces(self, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        """The same of logits that are cut by class. Communication: one all-reduce over the group."""
        return reduce(_weighted(logits, targets, vocabulary.own), vocabulary.group)

    def weight(self, targets: Tensor) -> Tensor:
        """The sum of the rows' weights: over the global batch a power of two."""
        return targets.sum()


def _weighted(output: Tensor, rows: Tensor, columns: range) -> Tensor:
    column = torch.arange(columns.start, columns.stop, device=output.device).to(output) % 5 - 1
    row = rows.to(output).view(-1, *[1] * (output.dim() - 1))
    return (output * row * column).sum()


def require_integers(tensor: Tensor, what: str, grain: float = GRAIN) -> None:
    """ModelError where a number is no multiple of `grain`, or so large that sums are not exact."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    steps = tensor / grain
    whole = tensor.isfinite() & (steps == steps.round()) & (tensor.abs() <= LARGEST)
    if not bool(whole.all()):
        value = float(tensor[~whole].flatten()[0])
        raise ModelError(
            f"{what} holds {value:g}, and exact mode needs multiples of 2^-16 of at most 2^34: an "
            "operation before it has no stand-in, or hides (as in a checkpoint), so use mode float64."
        )
