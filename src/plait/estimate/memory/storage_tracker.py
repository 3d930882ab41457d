"""Tracking of live storages while layers run on the meta device, where storages have no memory.

Public hooks report tensors: the results of each function (`TorchFunctionMode`), what autograd saves
(`saved_tensors_hooks`), and the input and output gradients of each node of a graph; and a caller's mode the
results of the operations that functions are composed of. A weak reference to each storage determines how long
it is alive: in autograd, a closure or a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from plait.estimate.memory.fused_operations import fused_operation
from plait.tensor.nested_values import tensors_of


class StorageTracker(TorchFunctionMode):
    """Numbers new storages; records which are alive after each torch operation and backward node."""

    def __init__(self, *, on_cpu: bool = True) -> None:
        """`on_cpu`: whether layers would run on a CPU: see `fused_operations`."""
        super().__init__()
        self._on_cpu = on_cpu
        self.sizes: list[int] = []
        """The bytes of each storage, by number."""
        self.samples: list[frozenset[int]] = []
        """The storages alive at each report."""
        self._numbers: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}
        self._live: set[int] = set()
        self._in_node = False
        self._is_python = False
        """Whether the node runs the backward of a `torch.autograd.Function` in Python."""
        self._at_begin: frozenset[int] = frozenset()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track all operations on the meta device within the context, with gradients enabled."""
        saving = saved_tensors_hooks(self._save, lambda saved: saved)
        with torch.device("meta"), torch.enable_grad(), saving, self:
            yield

    def number(self, tensor: Tensor) -> int:
        """Return the index in `sizes` of a tensor's storage; a storage not seen before gets the next one."""
        storage = tensor.untyped_storage()
        found = self._numbers.get(id(storage))
        if found is not None:
            return found[1]
        number, key = len(self.sizes), id(storage)
        self.sizes.append(storage.nbytes())
        self._numbers[key] = ref(storage, lambda _: self._forget(key)), number
        self._live.add(number)
        return number

    def see_results(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Track the storages that an ATen operation has allocated for its `result`.

        Where a function composes several operations within a layer that is recomputed, nothing else reports
        what autograd saves of them: the layer has hooks of its own.
        """
        for tensor in tensors_of(result):
            if tensor.is_meta:
                self.number(tensor)

    def live(self) -> frozenset[int]:
        """Return the numbers of the storages that are alive."""
        return frozenset(self._live)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and record the storages that are alive after it."""
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            self._track_backward(args[0])
        if func is Tensor.__bool__ and args[0].is_meta:
            return True  # there are no values: checks of them pass
        fused = fused_operation(func, args, kwargs, on_cpu=self._on_cpu)
        if fused is not None:
            with self:  # a mode is off within its own hook
                result = fused(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._record(result)
        return result

    def _track_backward(self, roots: Iterable[Tensor | GradientEdge]) -> None:
        """Track the storages that the backward of the autograd graph of `roots` will make, by hooks."""
        seen: set[Node] = set()
        waiting = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            is_python = isinstance(node, BackwardCFunction)
            node.register_prehook(partial(self._begin_node, is_python))
            node.register_hook(self._end_node)
            waiting += [before for before, _ in node.next_functions]

    def _begin_node(self, is_python: bool, gradients: Any) -> None:
        self._record(gradients)
        self._is_python = is_python
        # A mode is off within its own hook, and a backward is called through it.
        self.__enter__()  # type: ignore[no-untyped-call]
        self._in_node = True
        self._at_begin = self.live()

    def _end_node(self, gradients: Any, outer: Any) -> None:
        self._in_node = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._record((gradients, outer))
        # What a node reads is alive until the node ends, also where it is recomputed for the node alone.
        self.samples.append(self.live() | self._at_begin)

    def _save(self, tensor: Tensor) -> Tensor:
        self._record(tensor)
        return tensor.detach()

    def _record(self, value: Any) -> None:
        tensors = [tensor for tensor in tensors_of(value) if tensor.is_meta]
        for tensor in tensors:
            self.number(tensor)
        # Within a node devices need less than the meta device, which composes some operations; but a node in
        # Python runs the same everywhere, and where gradients are enabled, a node runs a forward again.
        if tensors and (not self._in_node or self._is_python or torch.is_grad_enabled()):
            self.samples.append(self.live())

    def _forget(self, key: int) -> None:
        _, number = self._numbers.pop(key)
        self._live.remove(number)
