"""Calls of torch by private names: of its autograd engine directly, and of operations on many tensors.

The checks that `torch.autograd` makes in Python, for symbolic shapes and functorch, take as long as a small
layer. Operations on many tensors are few kernels on a GPU, which the host starts by one call; all optimizers
of torch build on them. `test_private_torch_functions.py` and `test_many_tensors.py` in
`tests/unit/tensor/autograd` show what is relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function

from plait.ranks.accelerator import is_accelerator

_Function = torch.autograd.Function


def run_backward(roots: Sequence[Tensor | GradientEdge], seeds: Sequence[Tensor]) -> None:
    """Run autograd's backward from `roots` with gradients `seeds`, adding to the leaves' `.grad`.

    `seeds` has a gradient for each root, of its shape, dtype and device. The graph is freed.
    """
    if torch._C._len_torch_function_stack():  # a `TorchFunctionMode` wants to see the call
        seen: Any = roots
        handle_torch_function(torch.autograd.backward, seen, seen, seeds)
        return
    run_backward_unseen(roots, seeds)


def run_backward_unseen(roots: Sequence[Tensor | GradientEdge], seeds: Sequence[Tensor]) -> None:
    """Run autograd's backward like `run_backward`, hidden from any active `TorchFunctionMode`."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(seeds),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def apply_function(function: type[_Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)`, without the checks that torch makes in Python."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return super(_Function, function).apply(*arguments)  # type: ignore[misc]


def reshaped_in_place(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a contiguous tensor in another shape, on its memory; the given one may not be used again.

    The result is no view, so that an autograd function may return it, and others write to it.
    """
    return torch.ops.aten._unsafe_view.default(tensor, shape)  # type: ignore[no-any-return]


_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on; called without a Python function between, once for each micro-batch."""


def zero_each(tensors: list[Tensor]) -> None:
    """Fill tensors with zeros in place."""
    if tensors:
        torch._foreach_zero_(tensors)
        if _dispatch_modes():
            torch.autograd.graph.increment_version(tensors)


def hidden_from_function_modes() -> AbstractContextManager[None]:
    """Return a context in which no `TorchFunctionMode` sees calls of torch."""
    hidden: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return hidden


def counts_all_writes() -> bool:
    """Return whether every in-place CPU operation, also `torch._foreach_*`, raises a tensor's `_version`.

    Within a `TorchDispatchMode` it does not for operations on lists of tensors, since
    these then call others below the place where writes are counted.
    """
    return _dispatch_modes() == 0


def rows_of(tensor: Tensor) -> Tensor:
    """Return `[..., width]` as a matrix `[rows, width]`."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def multiply_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by `factor`, 0-d, of their dtype and device."""
    if tensors:
        torch._foreach_mul_(tensors, factor)
        if _dispatch_modes():
            torch.autograd.graph.increment_version(tensors)


def add_each(totals: list[Tensor], gradients: list[Tensor]) -> None:
    """Add each gradient to its total in place; totals may have a wider dtype."""
    if not totals:
        return
    if is_accelerator(totals[0]) and any(
        total.dtype != one.dtype for total, one in zip(totals, gradients, strict=True)
    ):
        gradients = _in_dtypes_of(totals, gradients)  # unlike dtypes would be added one by one
    torch._foreach_add_(totals, gradients)
    if _dispatch_modes():
        torch.autograd.graph.increment_version(totals)


def _in_dtypes_of(totals: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients in the dtypes of their totals: in two operations, if they have one dtype each."""
    alike = len({one.dtype for one in totals}) == len({one.dtype for one in gradients}) == 1
    if not alike:
        return [one.to(total.dtype) for total, one in zip(totals, gradients, strict=True)]
    flat = torch.cat([one.reshape(-1) for one in gradients]).to(totals[0].dtype)
    parts = torch.split(flat, [one.numel() for one in gradients])
    return [part.view(total.shape) for part, total in zip(parts, totals, strict=True)]
