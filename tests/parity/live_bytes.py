"""How much memory is alive: counted from the storages of all tensors that operations read and gave.

`torch.utils._python_dispatch` is private, but documented ("Extending PyTorch"), and has no public name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.layers.nested import tensors_of


class LiveBytes(TorchDispatchMode):
    """Counts storages from the first operation that meets them, as long as anybody keeps them.

    Memory that ranks share is left out, but for what is added with `own`: each rank has its part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """The most bytes that were alive after an operation, since it was set."""
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of((args, kwargs or {}, result)):
            self._see(tensor)
        self.most = max(self.most, self.count())
        return result

    def own(self, tensor: Tensor) -> None:
        """Count this rank's part of shared memory."""
        storage = tensor.untyped_storage()
        self._storages[id(storage)] = ref(storage)

    def count(self) -> int:
        """The bytes that are alive now."""
        return sum(storage.nbytes() for storage in self._alive())

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        for key, found in list(self._storages.items()):
            storage = found()
            if storage is None:
                del self._storages[key]
            else:
                yield storage

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage.filename is None:  # shared memory is mapped from a file
            self._storages[id(storage)] = ref(storage)
