"""Measurement of peak memory: by the allocator of a GPU; on a CPU by counting the bytes of tensors.

`torch.utils._python_dispatch` is private, but documented ("Extending PyTorch"), and has no public name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.ranks.accelerator import is_accelerator, peak_allocated


class Peak:
    """Context manager that measures the peak memory of this process's tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.most = 0
        """The most bytes that were allocated within the context, once it is left."""
        self._device = device
        self._count = None if is_accelerator(device) else _CountedBytes()

    def include(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist before the context: on a CPU others count from their first operation."""
        for tensor in tensors if self._count is not None else ():
            self._count.see(tensor.to_local() if is_dtensor(tensor) else tensor)

    def __enter__(self) -> None:
        if self._count is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._count.most = self._count.now()
            self._count.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._count is None:
            self.most = peak_allocated(self._device)
        else:
            self._count.__exit__(*error)
            self.most = self._count.most


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether the tensor is a `DTensor`, without the import, which takes a second."""
    return hasattr(tensor, "to_local")


class _CountedBytes(TorchDispatchMode):
    """Counts the bytes of each storage that operations read or make, until it is freed.

    Memory that ranks share is left out, unless it was held before: each rank has its part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            plain = isinstance(leaf, Tensor) and not leaf.is_meta and not is_dtensor(leaf)
            if plain and leaf.untyped_storage().filename is None:
                self.see(leaf)
        self.most = max(self.most, self.now())
        return result

    def see(self, tensor: Tensor) -> None:
        """Count the tensor's storage from now on."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = ref(storage, lambda _: self._storages.pop(key))

    def now(self) -> int:
        """Return the bytes that are alive. Sizes are read anew, since storages are freed and resized."""
        alive = [storage() for storage in list(self._storages.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)
