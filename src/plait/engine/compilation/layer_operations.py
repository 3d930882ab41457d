"""The operations of a compiled layer, and the list of values that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from plait.engine.compilation.layer_call_state import LayerCall
from plait.engine.compilation.torch_compiler import example_of

Values = list[Any]
"""By slot a tensor, `Regathered` or `AutogradRun`; None before it is computed, and after its last use."""


@dataclass
class LayerOperation:
    """One operation of a compiled layer: a compiled graph, or an eager call between two graphs."""

    arguments: Sequence[int]
    """The slots whose values it is given."""
    run: Callable[[list[Any], Values, LayerCall], None]
    """Computes from the values of `arguments`, and stores the results among the values of all slots."""
    done: Sequence[int] = ()
    """The arguments that no later operation reads, whose references are dropped, so that graphs free them."""


@dataclass(frozen=True)
class LayerOperations:
    """The operations of a compiled layer's forward or backward, in order, which share a list of values."""

    operations: Sequence[LayerOperation]
    slots: int
    results: Sequence[int]
    """A slot beyond the last: no result."""

    def run(self, values: Values, call: LayerCall) -> list[Any]:
        """Run the operations on the arguments `values`, a list that is emptied; return the results."""
        values += [None] * (self.slots + 1 - len(values))
        for operation in self.operations:
            taken = list(map(values.__getitem__, operation.arguments))
            for slot in operation.done:
                values[slot] = None
            operation.run(taken, values, call)
        return list(map(values.__getitem__, self.results))


@dataclass(frozen=True)
class StoredResult:
    """The slots that store one result of an operation, and the strides that later graphs expect of it."""

    slots: Sequence[int]
    stride: tuple[int, ...]

    @staticmethod
    def of(node: Node, number: int, slots: Mapping[Node, int]) -> StoredResult:
        """Return the slots and strides of result `number` of a graph node that has several results."""
        users = [user for user in node.users if user.args[1] == number]
        found = [slots[user] for user in users if user in slots]
        return StoredResult(found, example_of(users[0]).stride() if found else ())

    def store(self, values: Values, tensor: Tensor) -> None:
        """Store a result among `values`; a copy of it if its strides differ from the trace's."""
        if self.slots:
            made = tensor if tensor.stride() == self.stride else with_strides(tensor, self.stride)
            for slot in self.slots:
                values[slot] = made


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `tensor` with the strides `stride`."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def arguments_of(node: Node) -> tuple[Any, ...]:
    """Return `node.args`, typed as `Any`: their types depend on the node's operator."""
    return node.args
