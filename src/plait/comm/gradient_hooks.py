"""Hooks on the gradient of a tensor, which neither a copy nor a pickle of the tensor has."""

from __future__ import annotations

from torch import Tensor


def gradient_hooks(tensor: Tensor) -> str | None:
    """Return the method that has registered a hook on the gradient of a leaf, or None.

    Reads private attributes of torch: there is no public way to list hooks. Those that are registered on the
    tensor's node in a graph are not found.
    """
    if tensor._backward_hooks:
        return "register_hook"
    if tensor._post_accumulate_grad_hooks:
        return "register_post_accumulate_grad_hook"
    return None
