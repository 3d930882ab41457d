"""Linear and embedding with deferred weight gradient: the backward queues its computation for later.

A queued weight gradient is added straight into the weight's gradient buffer. Biases and norms are cheap, so
autograd computes their gradients at once. Deferred weight gradients serve the `W` actions of a schedule,
overlap with communication, and accumulation over micro-batches without a temporary. First-order only: a
second backward through the same graph, or a backward of the backward, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import DataError
from plait.ranks.accelerator import is_accelerator, multiplies_into_float32
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.autograd.private_torch_functions import apply_function, reshaped_in_place, rows_of
from plait.tensor.autograd.regathered_activations import Gather
from plait.tensor.autograd.split_backward import SplitBackward, refuse_other_orders, require_static, run_split
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue


@runtime_checkable
class QueuesWeightGradients(Protocol):
    """Protocol of an `nn.Module` whose own backward queues its weight gradients."""

    def defer_weight_gradients(self, queue: WeightGradientQueue) -> None:
        """Make the backward of later calls add its weight gradients' computation to `queue`."""
        ...


def defer_weight_gradients(layer: nn.Module, queue: WeightGradientQueue) -> None:
    """Make linears, embeddings and `SplitBackward` modules in `layer` defer weight gradients to `queue`.

    Rebinds `forward` of each `nn.Linear`, plain `nn.Embedding`, `Conv1D` of Hugging Face (a linear with
    transposed weight) and `SplitBackward`, so `layer` should be a private copy. Subclasses, parametrised
    modules and those with a `forward` set on the instance are left alone: autograd computes their gradients.
    Modules that queue weight gradients themselves are given the queue.
    """
    for module in layer.modules():
        if isinstance(module, QueuesWeightGradients):
            module.defer_weight_gradients(queue)
            continue
        if isinstance(module, SplitBackward) and "forward" not in vars(module):
            require_static(module)
            bind_forward(module, partial(_run_split, module, module.forward, queue))
            continue
        if "weight" not in dict(module.named_parameters(recurse=False)) or "forward" in vars(module):
            continue  # some parametrisations replace the weight by a computed tensor
        if type(module) is nn.Linear:
            queue.products.add(id(module.weight))
            bind_forward(module, partial(_run_linear, module, queue, False))
        elif type(module) is nn.Embedding and _is_plain(module):
            bind_forward(module, partial(_run_embedding, module, queue))
        elif is_transposed_linear(module):
            queue.products.add(id(module.weight))
            bind_forward(module, partial(_run_linear, module, queue, True))


TRANSPOSED_LINEAR = ("transformers.pytorch_utils", "Conv1D")
"""Module and name of `Conv1D`, compared as text because transformers may not be installed."""


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether `module` is a `Conv1D` of transformers, with `weight: [in, out]` and `bias: [out]`."""
    if (type(module).__module__, type(module).__qualname__) != TRANSPOSED_LINEAR:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.pop("weight"), parameters.pop("bias", None)
    return not parameters and weight.dim() == 2 and bias is not None and bias.shape == weight.shape[1:]


def bind_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Set `forward` as the instance's forward method of `module`."""
    # setattr, because mypy refuses to assign to a method; nn.Module calls an instance's own forward.
    setattr(module, "forward", forward)  # noqa: B010


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _run_linear(module: Any, queue: WeightGradientQueue, transposed: bool, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias, queue, transposed=transposed)


def _run_embedding(module: nn.Embedding, queue: WeightGradientQueue, input: Tensor) -> Tensor:
    return embedding(input, module.weight, module.padding_idx, queue)


def _run_split(
    module: Any, plain: Callable[..., Any], queue: WeightGradientQueue, *inputs: Any, **named: Any
) -> Any:
    if named or not inputs or not defers(inputs[0]):
        return plain(*inputs, **named)
    return run_split(module, queue, *inputs)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    queue: WeightGradientQueue | None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Return the result of `functional.linear`; with `queue`, its backward queues the weight gradient.

    `weight` is `[out, in]`, or `[in, out]` where `transposed`.
    """
    if queue is None or not defers(input):
        return functional.linear(input, _rows_out(weight, transposed), bias)
    arguments, run = (input, weight, bias, queue, transposed), RECOMPUTED_RUN.get()
    if run is None:
        return apply_function(_Linear, *arguments, False)  # type: ignore[no-any-return]
    if not run.is_second:
        return run.result(lambda: (apply_function(_Linear, *arguments, False),))[0]  # type: ignore[return-value]
    output: Tensor = apply_function(_Linear, *arguments, True)
    # After the input is saved, where a second run may end.
    with torch.no_grad():
        product = run.result(lambda: (functional.linear(input, _rows_out(weight, transposed), bias),))[0]
        output.set_(product)  # type: ignore[call-overload]
    return output


def embedding(
    input: Tensor, weight: Tensor, padding: int | None, queue: WeightGradientQueue | None
) -> Tensor:
    """Return the result of `functional.embedding`; with `queue`, its backward queues the weight gradient.

    Raises DataError (on the CPU) for a number that has no row.
    """
    try:
        if queue is None or not defers(input):
            return functional.embedding(input, weight, padding)
        output: Tensor = apply_function(_Embedding, input, weight, padding, queue)
    except IndexError:
        least, most = (int(bound) for bound in input.aminmax())
        raise DataError(
            f"numbers from {least} to {most} were looked up in an embedding of {len(weight)} rows: give "
            "tokens of the vocabulary, and positions within the context."
        ) from None
    return output


def defers(input: Tensor) -> bool:
    """Return whether this call's backward queues the weight gradient, instead of computing it at once.

    Not under `torch.autocast`, which casts the weight, nor in a layer that is traced, whose compiled backward
    defers it.
    """
    if not torch.is_grad_enabled() or TRACE.get() is not None:
        return False
    return input.is_meta or not torch.is_autocast_enabled(input.device.type)  # meta has no autocast


def made_by_linear(tensor: Tensor) -> bool:
    """Return whether `tensor` is a deferring linear's output: no backward reads it, so it may be changed."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == f"{_Linear.__name__}Backward"


class _Linear(torch.autograd.Function):
    """Autograd function of `x Wᵀ + b`, `W: [out, in]` or transposed; queues the gradient of `W`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queue: WeightGradientQueue,
        transposed: bool,
        is_late: bool,
    ) -> Tensor:
        part, ctx.gather = queue.gathered.of(input) or (input, None)
        ctx.save_for_backward(part if weight.requires_grad else None)
        ctx.weight, ctx.queue, ctx.transposed, ctx.ran = weight, queue, transposed, False
        shape = (*input.shape[:-1], weight.shape[1 if transposed else 0])
        if is_late:
            return input.new_empty_strided(shape, (0,) * len(shape))  # one element; `linear` sets the memory
        by_rows = weight.t() if transposed else weight
        if input.dim() == 2:
            return functional.linear(input, by_rows, bias)
        rows = input.reshape(-1, input.shape[-1])
        return reshaped_in_place(functional.linear(rows, by_rows, bias), shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_other_orders(ctx, "a linear")
        (saved,) = ctx.saved_tensors
        weight, queue, transposed = ctx.weight, ctx.queue, ctx.transposed
        rows = gradient.reshape(-1, gradient.shape[-1])  # at most one copy, shared by all uses below
        if saved is not None:
            if ctx.gather is None and not queue.gathered.is_used:
                # Detached, so that pending work does not hold the layer's graph.
                work = partial(_add_weight_gradient, queue, weight, transposed, rows, saved.detach())
            else:
                whole_input = saved_input(saved, ctx.gather, queue)
                whole_gradient = _saved_gradient(gradient, rows, queue)
                work = partial(_add_later, queue, weight, transposed, whole_gradient, whole_input)
            queue.add(work)
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        of_input = None
        if needs_input:
            of_input = rows @ (weight.t() if transposed else weight)
            if gradient.dim() != 2:
                of_input = of_input.view(*gradient.shape[:-1], of_input.shape[1])
        return of_input, None, rows.sum(0) if needs_bias else None, None, None, None


def saved_input(saved: Tensor, gather: Gather | None, queue: WeightGradientQueue) -> Callable[[], Tensor]:
    """Return a function that returns a linear's saved input, gathered again if only a part was saved."""
    if gather is None:
        whole = saved.detach()  # detached, so that pending work does not hold the layer's graph
        return lambda: whole
    regathered = queue.gathered.again(saved, gather)
    if queue.mode.overlaps:  # the work follows after the product for the input gradient
        regathered.start()
    return regathered.whole


def _saved_gradient(gradient: Tensor, rows: Tensor, queue: WeightGradientQueue) -> Callable[[], Tensor]:
    """Return a function that gives a linear's output gradient: gathered again if registered, else `rows`."""
    # Where the work follows at once, the whole gradient is still in memory.
    source = None if queue.mode.overlaps else queue.gathered.of(gradient)
    return (lambda: rows) if source is None else queue.gathered.again(*source).whole


def _add_later(
    queue: WeightGradientQueue,
    weight: Tensor,
    transposed: bool,
    gradient: Callable[[], Tensor],
    input: Callable[[], Tensor],
) -> None:
    """Add the gradient of a linear's weight to its buffer, from operands that are perhaps gathered again."""
    _add_weight_gradient(queue, weight, transposed, rows_of(gradient()), input())


def _add_weight_gradient(
    queue: WeightGradientQueue, weight: Tensor, transposed: bool, gradient: Tensor, input: Tensor
) -> None:
    """Add the gradient of a linear's weight to its buffer: from `gradient`, `[rows, out]`, and the input."""
    first = bool(queue.unwritten) and queue.begins((weight,))
    total = queue.buffer_of(weight)
    add_product(total.t() if transposed else total, gradient.t(), input.reshape(-1, input.shape[-1]), first)


def _rows_out(weight: Tensor, transposed: bool) -> Tensor:
    """Return a linear's weight, or its gradient, as a view `[out, in]`."""
    return weight.t() if transposed else weight


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """Add the matrix product `a @ b` to `total` in place; `total` may have a wider dtype than `a` and `b`.

    `first`: write it, whatever `total` holds. Where the device can, without a temporary.
    """
    kept = 0 if first else 1  # a factor of 0 stands for zeros also where `total` is not finite
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=kept)
    elif total.dtype == torch.float32 and multiplies_into_float32(total, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, beta=kept, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


class _Embedding(torch.autograd.Function):
    """Autograd function of `W[x]`, `x` integers, `W: [rows, width]`; queues the gradient of `W`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, padding: int | None, queue: WeightGradientQueue
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.padding, ctx.queue, ctx.ran = weight, padding, queue, False
        return functional.embedding(input, weight, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        refuse_other_orders(ctx, "an embedding")
        (input,) = ctx.saved_tensors
        weight, padding, queue = ctx.weight, ctx.padding, ctx.queue
        if weight.requires_grad:
            queue.add(lambda: add_rows(queue.buffer_of(weight), input, gradient, padding))
        return None, None, None, None


def add_rows(total: Tensor, tokens: Tensor, gradient: Tensor, padding: int | None) -> None:
    """Add rows of `gradient` `[..., width]` to the rows of `total` with the indexes `tokens` `[...]`.

    Rows of the index `padding` are left out.
    """
    rows, tokens = rows_of(gradient), tokens.reshape(-1)
    if padding is not None:
        rows = rows.masked_fill((tokens == padding).unsqueeze(-1), 0)
    rows = rows.to(total.dtype)
    if is_accelerator(total):  # index_add_ adds atomically there, in varying order
        total.index_put_((tokens,), rows, accumulate=True)
    else:
        total.index_add_(0, tokens, rows)
