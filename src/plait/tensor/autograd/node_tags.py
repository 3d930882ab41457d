"""Tags: values that proofs read, stored on nodes of an autograd graph on the meta device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def tag(result: Tensor, key: str, value: object) -> Tensor:
    """Return `result`; on the meta device, also store `value` under `key` on its autograd node."""
    if result.is_meta and result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata  # a dictionary, typed as a method
        metadata[key] = value
    return result


def tag_of(node: Node, key: str) -> Any:
    """Return the value that `tag` stored under `key` on an autograd node, or None."""
    metadata: Any = node.metadata
    return metadata.get(key)
