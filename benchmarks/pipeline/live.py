"""How much memory is alive: a count of the storages that operations made.

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


class LiveBytes(TorchDispatchMode):
    """Counts each storage from the operation that made it, while entered, for as long as anybody keeps it.

    Memory that ranks share is left out: it takes room only as far as it is written to.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        """`without` are tensors that are there already and do not count."""
        super().__init__()
        self._kept = list(without)
        self._ignored = {id(tensor.untyped_storage()) for tensor in self._kept}
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}
        self._bytes = 0
        self.most = 0
        """The most bytes that were alive after an operation, since it was set."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._see(tensor.untyped_storage())
        self.most = max(self.most, self._bytes)
        return result

    def count(self) -> int:
        """The bytes that are alive now."""
        return self._bytes

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), 0 if storage.is_shared() else storage.nbytes()
        if key in self._ignored or key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self._bytes -= size

        self._storages[key] = ref(storage, forget)
        self._bytes += size
