"""Tags on the nodes of an autograd graph on the meta device, which `plait.proof.gradient_proof` reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def tag(result: Tensor, key: str, value: object) -> Tensor:
    """Return `result`; if it is on the meta device, first set tag `key` of its autograd node to `value`."""
    if result.is_meta and result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata  # a dictionary, typed as a method
        metadata[key] = value
    return result


def tag_of(node: Node, key: str) -> Any:
    """Return the value of tag `key` of an autograd node, or None if the node has no such tag."""
    metadata: Any = node.metadata
    return metadata.get(key)
