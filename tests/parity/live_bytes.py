"""How much memory is alive: counted from the storages of all tensors that operations read and gave.

`torch.utils._python_dispatch` is private, but documented ("Extending PyTorch"), and has no public name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from time import sleep
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.tensor.nested_values import tensors_of

SETTLING = 0.003
"""Seconds."""


class LiveBytes(TorchDispatchMode):
    """Counts storages from the first operation that meets them, as long as anybody keeps them.

    Memory that ranks share is left out, but for what is added with `own`: each rank has its part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most: int | None = None
        """The most bytes that were alive after an operation that took some, since it was set to a number."""
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = [self._see(tensor) for tensor in tensors_of((args, kwargs or {}, result))]
        if self.most is not None and any(seen):  # what gives a view takes no bytes
            self.most = max(self.most, self.count())
        return result

    def own(self, tensor: Tensor) -> None:
        """Count this rank's part of shared memory."""
        self._add(tensor.untyped_storage())

    def count(self) -> int:
        """The bytes that are alive now. Asked for after many operations, hence without a loop in Python."""
        # Sizes are asked for anew, since storages are freed and resized; one without bytes is false.
        alive = filter(None, map(call, list(self._storages.values())))
        return sum(map(torch.UntypedStorage.nbytes, alive))

    def settled(self) -> int:
        """As `count`, once the thread of a backend has dropped the tensors of a complete all-to-all."""
        sleep(SETTLING)
        return self.count()

    def _see(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        # Shared memory is mapped from a file.
        is_real = storage.device.type != "meta"  # not one that torch traces with
        return is_real and storage.filename is None and self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was not known."""
        key = id(storage)
        if key in self._storages:
            return False
        self._storages[key] = ref(storage, partial(self._storages.pop, key))
        return True
