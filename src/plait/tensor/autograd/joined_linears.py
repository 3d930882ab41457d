"""Linears that read the same input, such as query, key and value, as one product with one weight gradient.

    query:  x Wqᵀ                  | Wq |
    key:    x Wkᵀ      →    x  ·   | Wk | ᵀ    three views of one product
    value:  x Wvᵀ                  | Wv |

Their weights lie side by side in a flat buffer, so that together they are a matrix, and so are their
gradients. The first of them that a layer calls computes the product for all; the others take theirs, if they
are called with the same tensor and nobody has written to it. In any other case each computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.tensor.autograd.deferred_weight_gradients import add_product, bind_forward, defers, saved_input
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.autograd.private_torch_functions import apply_function
from plait.tensor.autograd.split_backward import refuse_other_orders
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue


def are_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return whether `tensors` follow each other in memory, so that one view covers all of them.

    On the meta device, where there is no memory, whether shapes and dtypes let them.
    """
    first = tensors[0]
    storage, offset = first.untyped_storage(), first.storage_offset()
    for one in tensors:
        if one.dtype != first.dtype or one.shape[1:] != first.shape[1:] or not one.is_contiguous():
            return False
        if not one.is_meta and (one.untyped_storage() is not storage or one.storage_offset() != offset):
            return False
        offset += one.numel()
    return True


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one view of `tensors` that follow each other in memory, joined along dim 0, else None.

    Their memory must be allocated.
    """
    if not are_side_by_side(tensors):
        return None
    first, rows = tensors[0].detach(), 0
    for one in tensors:
        rows += one.shape[0]
    if first.is_meta:
        return first.new_empty((rows, *first.shape[1:]))
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class JoinedLinears:
    """Linears that read the same input, computed as one product: their weights are joined in memory."""

    def __init__(
        self, linears: Sequence[Any], first: int, copied: Sequence[int], queue: WeightGradientQueue
    ) -> None:
        """`linears`: in the order of their weights in memory. `first`: the number of the one called first.

        `copied`: of those whose output is copied, since what is saved of it would keep all outputs.
        """
        self.linears, self.first, self.copied, self.queue = linears, first, copied, queue
        self.weights: list[nn.Parameter] = [one.weight for one in linears]
        self.biases: list[nn.Parameter] = [one.bias for one in linears if one.bias is not None]
        self.widths = [one.shape[0] for one in self.weights]
        self.weight: Tensor | None = None
        """All weights as one `[sum of out, in]`; None if they are not side by side any more."""
        self.bias: Tensor | None = None
        self._buffers: list[Tensor] = []
        """The gradients of the weights in the current step; empty before the first is added to them."""
        self._total: Tensor | None = None
        """`_buffers` as one; None if they are not side by side."""
        self._input: Tensor | None = None
        self._version = 0
        self._outputs: dict[int, Tensor] = {}
        """Of the linears that were not called with `_input` yet."""
        self.is_found = False
        """Whether `weight` and `bias` are those of the current step."""
        if self.weights[0].is_meta:  # before anyone counts what a layer allocates
            self._find_weight()
            self._find_total()
        self._alone = [one.forward for one in linears]
        for number, one in enumerate(linears):
            bind_forward(one, partial(self.output, number))

    def begin_step(self) -> None:
        """Update the views of the weights before a step: users may have replaced a parameter's `.data`."""
        self.is_found = self.weights[0].is_meta
        self._buffers = []

    def _find_weight(self) -> None:
        """Set `weight` and `bias` to views of all linears' parameters, if their memory is allocated."""
        self.is_found = True
        self.bias = side_by_side(self.biases) if self.biases else None
        self.weight = side_by_side(self.weights) if len(self.biases) == 0 or self.bias is not None else None

    def release(self) -> None:
        """Undo the joining: each linear computes its own product again."""
        for one, alone in zip(self.linears, self._alone, strict=True):
            bind_forward(one, alone)

    def forget(self) -> None:
        """Free the linears' outputs that the last run of the layer computed, but did not use."""
        if self._input is not None:
            self._input = None
            self._outputs.clear()

    def output(self, number: int, input: Tensor) -> Tensor:
        """Return the output of linear `number`; the first call for an input computes all outputs."""
        alone = not defers(input)  # as under `torch.no_grad()`, where an output has no gradient
        if input is self._input and not alone and number in self._outputs and input._version == self._version:
            return self._outputs.pop(number)
        joins = number == self.first and not alone
        if joins and not self.is_found:
            self._find_weight()
        if not joins or self.weight is None:
            output: Tensor = self._alone[number](input)
            return output
        self._outputs = dict(enumerate(self._compute(input)))
        self._input, self._version = input, input._version
        return self._outputs.pop(number)

    def _compute(self, input: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all linears, by one autograd Function; kept under recomputation if chosen."""
        run = RECOMPUTED_RUN.get()
        if run is None:
            return self._apply(input, self.copied, is_late=False)
        if not run.is_second:  # keeps all outputs anyway
            return run.result(lambda: self._apply(input, (), is_late=False))  # type: ignore[return-value]
        outputs = self._apply(input, (), is_late=True)
        # After the input is saved, where a second run may end.
        with torch.no_grad():
            products: Any = run.result(lambda: self.products(input, ()))
            for number, output in enumerate(outputs):
                product = products[number]
                output.set_(product.clone() if number in self.copied else product)
        return outputs

    def _apply(self, input: Tensor, copied: Sequence[int], *, is_late: bool) -> tuple[Tensor, ...]:
        arguments = input, self, copied, is_late, self.weights[0], *self.biases
        outputs: tuple[Tensor, ...] = apply_function(_JoinedLinears, *arguments)
        return outputs

    def products(self, input: Tensor, copied: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the outputs of all linears as parts of one tensor, those in `copied` as copies."""
        assert self.weight is not None
        product = functional.linear(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        if input.dim() != 2:
            product = product.view(*input.shape[:-1], product.shape[1])
        parts: tuple[Tensor, ...] = torch.unsafe_split_with_sizes(product, self.widths, -1)
        if not copied:
            return parts
        each = list(parts)
        for number in copied:
            each[number] = each[number].clone()
        return tuple(each)

    def add_weight_gradients(self, rows: Tensor, input: Callable[[], Tensor]) -> None:
        """Add the gradients of the weights to their buffers, from `rows` `[rows, out]` and the input."""
        first = bool(self.queue.unwritten) and self.queue.begins(self.weights)
        if not self._buffers:
            self._find_total()
        total, given = self._total, input()
        given = given.reshape(-1, given.shape[-1])
        if total is not None:
            add_product(total, rows.t(), given, first)
            return
        for buffer, part in zip(self._buffers, torch.split(rows, self.widths, 1), strict=True):
            add_product(buffer, part.t(), given, first)

    def _find_total(self) -> None:
        """Set `_buffers` to the gradients of the weights, and `_total` to all of them as one view."""
        self._buffers = list(map(self.queue.buffer_of, self.weights))
        self._total = side_by_side(self._buffers)


class _JoinedLinears(torch.autograd.Function):
    """Autograd function of several `x Wᵀ + b` of the same `x`; queues the gradient of all `W`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        joined: JoinedLinears,
        copied: Sequence[int],
        is_late: bool,
        anchor: Tensor,
        *biases: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the joined linears; `anchor`: a weight, so that they require a gradient."""
        own_part, ctx.gather = joined.queue.gathered.of(input) or (input, None)
        ctx.save_for_backward(own_part)
        ctx.joined, ctx.ran = joined, False
        if not is_late:
            return joined.products(input, copied)
        shapes = ((*input.shape[:-1], width) for width in joined.widths)
        # Of one element each; `JoinedLinears` sets the memory.
        return tuple(input.new_empty_strided(shape, (0,) * len(shape)) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_other_orders(ctx, "a linear")
        (saved,) = ctx.saved_tensors
        joined: JoinedLinears = ctx.joined
        rows = torch.cat(gradients, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        whole_input = saved_input(saved, ctx.gather, joined.queue)
        joined.queue.add(partial(joined.add_weight_gradients, rows, whole_input))
        of_input = None
        if ctx.needs_input_grad[0]:
            assert joined.weight is not None
            of_input = rows @ joined.weight
            if gradients[0].dim() != 2:
                of_input = of_input.view(*gradients[0].shape[:-1], of_input.shape[1])
        of_biases = torch.split(rows.sum(0), joined.widths) if joined.biases else ()
        return of_input, None, None, None, None, *of_biases
