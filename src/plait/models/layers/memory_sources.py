"""Tracking, through all operations, of the source tensors from which each storage was computed.

Each memory has a set of sources, as bits: those of all that was written to it. An operation adds the sources
of its arguments to its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.tensor.layer_values import tensors_of

INPUT = 1
"""The source that stands for a layer's inputs, and for random numbers."""
FROM_SHAPES = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    }
)
"""Operations whose result depends on the shape of their argument only."""


class MemorySources:
    """For each storage: the set of source tensors from which it was computed, as a bit mask."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}  # by the `id` of a storage
        self._kept: dict[int, torch.UntypedStorage] = {}  # so that no other storage gets that `id`
        self.written: set[int] = set()

    def of(self, tensor: Tensor) -> int:
        """Return the sources of a tensor's memory."""
        return self._bits.get(id(_memory(tensor)), 0)

    def add(self, tensors: Iterable[Tensor], bits: int) -> None:
        """Add sources to the memory of tensors."""
        for tensor in tensors:
            self._set(tensor, self.of(tensor) | bits)

    def write(self, tensor: Tensor, bits: int, *, whole: bool) -> None:
        """Record a write to a tensor from sources; `whole`: all of its earlier content was overwritten."""
        self._set(tensor, bits if whole else self.of(tensor) | bits)
        self.written.add(id(_memory(tensor)))

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether an operation has written to a tensor's memory."""
        return id(_memory(tensor)) in self.written

    def _set(self, tensor: Tensor, bits: int) -> None:
        memory = _memory(tensor)
        self._bits[id(memory)], self._kept[id(memory)] = bits, memory


def _memory(tensor: Tensor) -> Any:
    """Return the storage of a tensor; the tensor itself where it has none, as a sparse one."""
    return tensor.untyped_storage() if tensor.layout == torch.strided else tensor


class FollowSources(TorchDispatchMode):
    """Dispatch mode that propagates the sources of tensors through each operation."""

    def __init__(self, sources: MemorySources, random: int = INPUT) -> None:
        """`random`: the sources of random numbers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources, self._random = sources, random

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func`; its results, and what it writes, have the sources of its arguments."""
        sources, kwargs = self._sources, kwargs or {}
        written = list(_written(func, args, kwargs))
        overwritten = [tensor for tensor, whole in written if whole]
        given = [one for one in tensors_of([args, kwargs]) if all(one is not other for other in overwritten)]
        bits = self._random if torch.Tag.nondeterministic_seeded in func.tags else 0
        if func.overloadpacket.__name__ not in FROM_SHAPES:
            for tensor in given:
                bits |= sources.of(tensor)
        result = func(*args, **kwargs)
        for tensor, whole in written:
            sources.write(tensor, bits, whole=whole)
        sources.add(tensors_of(result), bits)
        return result


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an operation writes to, each with whether it leaves nothing of what was there.

    `_schema` is private: torch has no public way to what an operation writes.
    """
    name: str = func.overloadpacket.__name__
    arguments = {
        one.name: (args[number] if number < len(args) else kwargs.get(one.name), one)
        for number, one in enumerate(func._schema.arguments)
    }
    norm_trains = "batch_norm" in name and "backward" not in name and arguments.get("training", (False,))[0]
    for local, (given, argument) in arguments.items():
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # Older batch norms write to their statistics, and their schema does not say so.
        if is_written or (norm_trains and local in ("running_mean", "running_var")):
            for tensor in tensors_of(given):
                overwrites = name in ("copy_", "fill_", "zero_") or argument.kwarg_only
                yield tensor, overwrites and tensor.nbytes == tensor.untyped_storage().nbytes()
