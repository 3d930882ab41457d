"""Deferred weight gradients: the backward of a linear or an embedding gives the gradient of its input at
once and *keeps* what the gradient of its weight needs. That part runs later, straight into the gradient
buffer of the weight. What is cheap (biases, norms) is done at once, by autograd.

One mechanism serves three ends: the `W` actions of a schedule, overlap with communication, and
accumulation over micro-batches without a temporary. First-order only: a second backward through the same
graph, or a backward of the backward, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.autograd.regather import Gather, Sources
from plait.autograd.split import SplitBackward, refuse_other_orders, require_static, run_split

WeightWork = Callable[[], object]
"""Adds one weight gradient of one micro-batch to its buffer."""


@dataclass
class Keeper:
    """Collects the weight work that a backward leaves behind, until `take` carries it away.

    Within `spending()` it may also be done early, by whoever has to wait in that backward.
    """

    kept: list[WeightWork] = field(default_factory=list)
    spends: bool = False
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a weight, what its gradients are added to while its `.grad` is set aside."""
    sources: Sources = field(default_factory=Sources)
    """What linears read that is gathered again for their weight work."""

    def keep(self, work: WeightWork) -> None:
        """Add one piece of weight work."""
        self.kept.append(work)

    def buffer_of(self, weight: Tensor) -> Tensor:
        """What the gradients of `weight` are added to: its `.grad`, if nothing else is said."""
        buffer = self.buffers.get(id(weight), weight.grad)
        assert buffer is not None, "gradients have somewhere to go before a backward"
        return buffer

    def take(self) -> list[WeightWork]:
        """Everything kept since the last call, in the order of the backward."""
        taken, self.kept = self.kept, []
        return taken

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For as long as it is entered, what is kept is forgotten at the end: nobody asks for it."""
        outside, self.kept = self.kept, []
        try:
            yield
        finally:
            self.kept = outside

    @contextmanager
    def spending(self) -> Iterator[None]:
        """For as long as it is entered, `meanwhile` does the work."""
        self.spends = True
        try:
            yield
        finally:
            self.spends = False

    def spend(self) -> None:
        """Do everything kept since the last `take` now."""
        for work in self.take():
            work()

    def meanwhile(self) -> None:
        """`spend` while something else is waited for, if that is allowed now."""
        if self.spends:
            self.spend()


def defer_weight_gradients(layer: nn.Module, keeper: Keeper) -> None:
    """Make what multiplies by a weight in `layer`, or looks up its rows, keep its gradient with `keeper`.

    That is every `nn.Linear`, plain `nn.Embedding` and `Conv1D` of Hugging Face, whose weight is that of a
    linear transposed, and every `SplitBackward`. Only these instances change (their `forward` is bound anew),
    so `layer` should be a private copy. Subclasses, parametrised modules and those with a forward of their
    own are left alone: their gradients are right, only not deferred.
    """
    for module in layer.modules():
        if isinstance(module, SplitBackward) and "forward" not in vars(module):
            require_static(module)
            _bind(module, partial(_run_split, module, module.forward, keeper))
            continue
        if "weight" not in dict(module.named_parameters(recurse=False)) or "forward" in vars(module):
            continue  # some parametrisations put a computed tensor in its place
        if type(module) is nn.Linear:
            _bind(module, partial(_run_linear, module, keeper))
        elif type(module) is nn.Embedding and _is_plain(module):
            _bind(module, partial(_run_embedding, module, keeper))
        elif is_transposed_linear(module):
            _bind(module, partial(_run_transposed, module, keeper))


TRANSPOSED_LINEAR = ("transformers.pytorch_utils", "Conv1D")
"""Module and name of the class. It is known by these, so that its package need not be there."""


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether `module` is a `Conv1D`, with `weight: [in, out]` and `bias: [out]`."""
    if (type(module).__module__, type(module).__qualname__) != TRANSPOSED_LINEAR:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.pop("weight"), parameters.pop("bias", None)
    return not parameters and weight.dim() == 2 and bias is not None and bias.shape == weight.shape[1:]


def _bind(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    # setattr: an instance's own forward is what nn.Module calls, but types know methods of classes only.
    setattr(module, "forward", forward)  # noqa: B010


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _run_linear(module: nn.Linear, keeper: Keeper, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias, keeper)


def _run_transposed(module: Any, keeper: Keeper, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias, keeper, transposed=True)


def _run_embedding(module: nn.Embedding, keeper: Keeper, input: Tensor) -> Tensor:
    return embedding(input, module.weight, module.padding_idx, keeper)


def _run_split(module: Any, plain: Callable[..., Any], keeper: Keeper, *inputs: Any, **named: Any) -> Any:
    if named or not inputs or not _defers(inputs[0]):
        return plain(*inputs, **named)
    return run_split(module, keeper, *inputs)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, keeper: Keeper | None, *, transposed: bool = False
) -> Tensor:
    """`functional.linear`, whose weight work is left with `keeper`, if there is one.

    `weight` is `[out, in]`, or `[in, out]` where it is `transposed`.
    """
    if keeper is None or not _defers(input):
        return functional.linear(input, _rows_out(weight, transposed), bias)
    output: Tensor = _Linear.apply(input, weight, bias, keeper, transposed)  # type: ignore[no-untyped-call]
    # Only now, when the input is saved: a layer that runs again for its backward need not come this far.
    with torch.no_grad():
        output.set_(functional.linear(input, _rows_out(weight, transposed), bias))  # type: ignore[call-overload]
    return output


def embedding(input: Tensor, weight: Tensor, padding: int | None, keeper: Keeper | None) -> Tensor:
    """`functional.embedding` likewise; the row `padding` does not learn."""
    if keeper is None or not _defers(input):
        return functional.embedding(input, weight, padding)
    output: Tensor = _Embedding.apply(input, weight, padding, keeper)  # type: ignore[no-untyped-call]
    return output


def _defers(input: Tensor) -> bool:
    """Within `torch.autocast` the native operation casts its weight, and autograd knows how to go back."""
    if not torch.is_grad_enabled():
        return False
    return input.is_meta or not torch.is_autocast_enabled(input.device.type)  # meta has no autocast


def made_by_linear(tensor: Tensor) -> bool:
    """Whether `tensor` is the output of a linear that defers: no other operation keeps its memory then."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == f"{_Linear.__name__}Backward"


class _Linear(torch.autograd.Function):
    """`y = x Wᵀ + b` for `x: [..., in]`, `W: [out, in]`, `b: [out]` or none; `transposed`: `W: [in, out]`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, keeper: Keeper, transposed: bool
    ) -> Tensor:
        piece, ctx.gather = keeper.sources.of(input) or (input, None)
        ctx.save_for_backward(piece if weight.requires_grad else None)
        ctx.weight, ctx.keeper, ctx.transposed, ctx.ran = weight, keeper, transposed, False
        shape = (*input.shape[:-1], _rows_out(weight, transposed).shape[0])
        return input.new_empty_strided(shape, (0,) * len(shape))  # one number: `linear` brings the memory

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_other_orders(ctx, "a linear")
        (saved,) = ctx.saved_tensors
        weight, keeper, transposed = ctx.weight, ctx.keeper, ctx.transposed
        rows = _rows(gradient)  # a copy, where heads were apart: once for all uses
        if saved is not None:
            read, came = _what_was_read(saved, ctx.gather, keeper), _what_came(gradient, rows, keeper)

            def work() -> None:
                total = _rows_out(keeper.buffer_of(weight), transposed)
                _add_product(total, _rows(came()).t(), _rows(read()))

            keeper.keep(work)
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        return (
            _product_of_rows(rows, _rows_out(weight, transposed), gradient.shape) if needs_input else None,
            None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
        )


def _what_was_read(saved: Tensor, gather: Gather | None, keeper: Keeper) -> Callable[[], Tensor]:
    """Gives what a linear read, of which it has saved all, or the piece that it was gathered of."""
    if gather is None:
        whole = saved.detach()  # cut off, so that waiting for W does not hold the layer's graph
        return lambda: whole
    regathered = keeper.sources.again(saved, gather)
    if keeper.spends:  # then the product for the input's gradient comes between
        regathered.start()
    return regathered.whole


def _what_came(gradient: Tensor, rows: Tensor, keeper: Keeper) -> Callable[[], Tensor]:
    """Gives the gradient that came to a linear, of which its `rows` are kept, or a piece."""
    # Where weight work follows at once, the whole is there still.
    source = None if keeper.spends else keeper.sources.of(gradient)
    return (lambda: rows) if source is None else keeper.sources.again(*source).whole


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _product_of_rows(rows: Tensor, matrix: Tensor, shape: torch.Size) -> Tensor:
    """`rows @ matrix`, as rows of a tensor that has `shape` but for its last dim."""
    return (rows @ matrix).view(*shape[:-1], matrix.shape[1])


def _rows_out(weight: Tensor, transposed: bool) -> Tensor:
    """A linear's weight (or its gradient) as `[out, in]`; the same memory."""
    return weight.t() if transposed else weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`, which may have more digits than they."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class _Embedding(torch.autograd.Function):
    """`y[...] = W[x[...]]` for whole numbers `x: [...]` and `W: [rows, width]`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding: int | None, keeper: Keeper) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.padding, ctx.keeper, ctx.ran = weight, padding, keeper, False
        return functional.embedding(input, weight, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        refuse_other_orders(ctx, "an embedding")
        (input,) = ctx.saved_tensors
        weight, padding, keeper = ctx.weight, ctx.padding, ctx.keeper

        def work() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            tokens = input.reshape(-1)
            if padding is not None:
                rows = rows.masked_fill((tokens == padding).unsqueeze(-1), 0)
            total = keeper.buffer_of(weight)
            rows = rows.to(total.dtype)
            if total.is_cuda:  # index_add_ is atomic there: its sums depend on the order of arrival
                total.index_put_((tokens,), rows, accumulate=True)
            else:
                total.index_add_(0, tokens, rows)

        if weight.requires_grad:
            keeper.keep(work)
        return None, None, None, None
