"""A recorder that stands for CUDA graphs on the CPU: it repeats torch's operations on the same memory.

It sees what is below autograd. A replay gives each operation the tensors and the numbers of its first run,
and writes the results to the first run's addresses: what a graph recorded from the same calls would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plait.tensor.nested_values import list_of_tensors


class Repeated(NamedTuple):
    """An operation with what it was given, and what it gave."""

    operation: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[Tensor]
    """Those in memory of their own."""


class OperationRecording(TorchDispatchMode):
    """The operations within a context; `replay` runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Repeated] = []
        self.made: set[int] = set()
        """The addresses of all results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held = tree_map_only(Tensor, alias, (args, kwargs))
        result = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} reads a value on the host, which a CUDA graph cannot")
        given = {
            address(one) for one in (*list_of_tensors(list(args)), *list_of_tensors(list(kwargs.values())))
        }
        made = [alias(one) for one in list_of_tensors(result) if one.numel() and address(one) not in given]
        self.made.update(address(one) for one in list_of_tensors(result) if address(one) not in given)
        if (made or writes(func)) and not only_allocates(func) and not only_reshapes(func):
            self.operations.append(Repeated(func, *held, made))
        return result

    def replay(self) -> None:
        """Run all operations again, on the same memory."""
        with torch.no_grad():
            for operation, args, kwargs, results in self.operations:
                anew = list_of_tensors(operation(*args, **kwargs))
                if results:
                    found = [one for one in anew if one.numel()]
                    for result, fresh in zip(results, found, strict=True):
                        result.copy_(fresh)

    def given(self) -> Iterator[tuple[Any, Tensor]]:
        """Each operation with the tensors that it reads and writes, if they hold anything."""
        for operation, args, kwargs, _ in self.operations:
            for one in (*list_of_tensors(list(args)), *list_of_tensors(list(kwargs.values()))):
                if one.numel():
                    yield operation, one


class OperationRecorder:
    """Records torch's operations, see `plait.engine.cuda_graphs.graph_recorder.GraphRecorder`."""

    def __init__(self) -> None:
        self.recordings: list[OperationRecording] = []

    def new_pool(self) -> object:
        """Memory is never used again here."""
        return object()

    def record(self, compute: Callable[[], None], pool: object) -> OperationRecording:
        """Run `compute` and note its operations."""
        recording = OperationRecording()
        with recording:
            compute()
        self.recordings.append(recording)
        return recording


def address(tensor: Tensor) -> int:
    """Of its storage."""
    return tensor.untyped_storage().data_ptr()


def writes(func: Any) -> bool:
    """Whether an operation writes to its arguments."""
    return bool(func._schema.is_mutable)


def alias(tensor: Tensor) -> Tensor:
    """The same memory in the same shape, whatever becomes of the tensor's shape."""
    return tensor.detach()


def only_allocates(func: Any) -> bool:
    """Whether an operation only allocates."""
    return "empty" in func.overloadpacket.__name__


def only_reshapes(func: Any) -> bool:
    """Whether an operation changes where a tensor's memory is, or its shape, and nothing in memory."""
    return torch.Tag.inplace_view in func.tags
