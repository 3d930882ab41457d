"""Which memory is alive while layers run on the meta device, where tensors have storages without bytes.

Three public hooks see them: what each function gives (`TorchFunctionMode`), what autograd saves
(`saved_tensors_hooks`), and the gradients that go into and come out of each node of a graph. What was seen is
then followed by a weak reference: whoever keeps it, autograd, a closure or a list, it counts as alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plait.footprint.fused_attention import fused, fuses
from plait.layers.nested import tensors_of


class StorageTracker(TorchFunctionMode):
    """Numbers the storages that it sees, and remembers which were alive when something was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """Bytes, by number."""
        self.samples: list[frozenset[int]] = []
        """What was alive whenever something was seen."""
        self._numbers: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}
        self._in_node = False
        self._at_begin: frozenset[int] = frozenset()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See all that happens on the meta device; gradients are enabled."""
        saving = saved_tensors_hooks(self._save, lambda saved: saved)
        with torch.device("meta"), torch.enable_grad(), saving, self:
            yield

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        found = self._numbers.get(id(storage))
        if found is not None:
            return found[1]
        number, key = len(self.sizes), id(storage)
        self.sizes.append(storage.nbytes())
        self._numbers[key] = ref(storage, lambda _: self._forget(key)), number
        return number

    def alive(self) -> frozenset[int]:
        """The numbers of the storages that somebody keeps."""
        return frozenset(number for _, number in self._numbers.values())

    def follow(self, roots: Iterable[Tensor]) -> None:
        """See the gradients of the graph that ends in `roots`, when it is run backward."""
        seen: set[Node] = set()
        waiting = [root.grad_fn for root in roots]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_prehook(self._begin_node)
            node.register_hook(self._end_node)
            waiting += [before for before, _ in node.next_functions]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and see what it gives."""
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and args[0].is_meta:
            return True  # that all is well is all that is ever asked of values that are not there
        if func is functional.scaled_dot_product_attention and fuses(*args, **kwargs):
            with self:  # a mode is off while it is told of a function
                result = fused(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._see(result)
        return result

    def _begin_node(self, gradients: Any) -> None:
        self._see(gradients)
        # A mode is off while a function runs that it was told of, and a backward is one such function.
        self.__enter__()  # type: ignore[no-untyped-call]
        self._in_node = True
        self._at_begin = self.alive()

    def _end_node(self, given: Any, come: Any) -> None:
        self._in_node = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._see((given, come))
        # What a node reads is there until it ends, also where it is made again for it alone.
        self.samples.append(self.alive() | self._at_begin)

    def _save(self, tensor: Tensor) -> Tensor:
        self._see(tensor)
        return tensor.detach()

    def _see(self, value: Any) -> None:
        tensors = [tensor for tensor in tensors_of(value) if tensor.is_meta]
        for tensor in tensors:
            self.number(tensor)
        # Within a node of a graph devices take less than the meta device, which composes some of them; but
        # where gradients are enabled there, a forward runs again.
        if tensors and (not self._in_node or torch.is_grad_enabled()):
            self.samples.append(self.alive())

    def _forget(self, key: int) -> None:
        del self._numbers[key]
