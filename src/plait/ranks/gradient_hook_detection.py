"""Finds hooks on the gradient of a tensor, which copies and pickles of the tensor lose."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def first_gradient_hook(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the name of the first tensor with a gradient hook, and what registered it; None without one.

    Reads private attributes of torch: there is no public way to list hooks. Those that are registered on a
    tensor's node in a graph are not found.
    """
    for name, tensor in tensors.items():
        if tensor._backward_hooks:
            return name, "register_hook"
        if tensor._post_accumulate_grad_hooks:
            return name, "register_post_accumulate_grad_hook"
    return None
