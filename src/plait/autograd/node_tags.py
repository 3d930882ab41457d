"""Marks on the nodes of an autograd graph on the meta device, for whoever proves something of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def tag(result: Tensor, key: str, value: object) -> Tensor:
    """`result`, whose node says `value` under `key`. Only on meta, which is where graphs are looked at."""
    if result.is_meta and result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata  # a dictionary, typed as a method
        metadata[key] = value
    return result


def tag_of(node: Node, key: str) -> Any:
    """What a node says under `key`; None: nothing."""
    metadata: Any = node.metadata
    return metadata.get(key)
