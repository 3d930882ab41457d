"""Direct calls of torch's autograd engine, without the checks that `torch.autograd` makes in Python.

The checks look for symbolic shapes and functorch, and take as long as a small layer. The functions here rely
on private names of torch; `tests/unit/tensor/autograd/test_engine_calls.py` shows on what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

_Function = torch.autograd.Function


def run_backward(roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    """Add the gradients of `roots`, given their own, to the leaves' `.grad`; see `torch.autograd.backward`.

    `seeds` has a gradient for each root, of its shape, dtype and device. The graph is freed.
    """
    if torch._C._len_torch_function_stack():  # a `TorchFunctionMode` wants to see the call
        handle_torch_function(torch.autograd.backward, roots, roots, seeds)
        return
    run_backward_unseen(roots, seeds)


def run_backward_unseen(roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
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
    """Return the result of `function.apply(*arguments)`."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return super(_Function, function).apply(*arguments)  # type: ignore[misc]


def reshaped_in_place(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a contiguous tensor, which is not used any more, in another shape.

    The result is no view, so that an autograd function may return it, and others write to it.
    """
    return torch.ops.aten._unsafe_view.default(tensor, shape)  # type: ignore[no-any-return]
