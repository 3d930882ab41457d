"""The leaves of an autograd graph: the tensors to whose `.grad` a backward adds."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node


def other_leaf(
    outputs: Iterable[Tensor], known: Iterable[Tensor], given: Iterable[Node] = ()
) -> Tensor | None:
    """Return a leaf tensor, none of `known`, to whose `.grad` a backward of `outputs` would add; else None.

    `given`: nodes beyond which the graph is not followed.
    """
    ids, seen = set(map(id, known)), set(given)
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
