"""How many kernels a GPU would run: counted from the operations on CPU tensors.

`torch.utils._python_dispatch` is private, but documented ("Extending PyTorch"), and has no public name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_KERNEL = ("empty", "new_empty", "_unsafe_view", "unsafe_split", "promote_types")
"""Beginnings of the names of operations that only take memory, or give a part or a dtype."""


class Kernels(TorchDispatchMode):
    """Counts operations by name, but for those that only take memory, or give a view or a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(WITHOUT_KERNEL)):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return self.names.total()
