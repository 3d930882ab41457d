"""The leaves of an autograd graph: the tensors to whose `.grad` a backward adds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor
from torch.autograd.graph import Node


def other_leaf(outputs: Iterable[Tensor], known: Collection[Tensor]) -> Tensor | None:
    """Return a leaf to which a backward of `outputs` would add a gradient, but none of `known`; else None."""
    ids, seen = set(map(id, known)), set[Node]()
    waiting = [one.grad_fn for one in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in ids:
            return leaf
        for other, _ in node.next_functions:
            waiting.append(other)
    return None
