"""Fuses element-wise operations between matrix products to one kernel each, as GPU compilers do.

A kernel reads what it does not make itself, once, and writes what others need. What only the backward's
kernels need of the forward they compute again, from what the forward's kernel read, as compilers choose to
do it, and as the kernels of norms and rotary embeddings do that are written by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from plait.estimate.time.operation_times import DeviceOperation, Elementwise

Phase = Literal["forward", "recomputation", "backward", "weights"]
"""A part of a layer's run; `recomputation`: what the backward runs again of the forward."""
Range = tuple[int, int, int]
"""Elements in memory: the number of a storage, the first of them, how many."""


class RecordedOperation(NamedTuple):
    """A device operation with the bytes it reads and writes, or a collective (`operation` None)."""

    operation: DeviceOperation | None
    reads: Mapping[Range, int]
    writes: Mapping[int, int]
    """By the number of the storage."""

    @property
    def is_elementwise(self) -> bool:
        """Whether the operation is element-wise: a compiler can fuse it with others into one kernel."""
        return isinstance(self.operation, Elementwise)


Kernel = tuple[Phase, int]
"""A phase, and the number of a kernel, product or collective in it."""


def fused(phases: Mapping[Phase, Sequence[RecordedOperation]]) -> dict[Phase, tuple[DeviceOperation, ...]]:
    """Return each phase's operations with neighbouring element-wise ones fused to one kernel."""
    kernels: dict[Kernel, list[RecordedOperation]] = {}
    for phase, operations in phases.items():
        kernels |= {(phase, number): one for number, one in enumerate(_kernels(operations))}
    readers: defaultdict[int, set[Kernel]] = defaultdict(set)
    for kernel, operations in kernels.items():
        for storage, *_ in (read for one in operations for read in one.reads):
            readers[storage].add(kernel)

    def is_needed(storage: int, maker: Kernel) -> bool:
        """Return whether `maker` must write `storage`: another kernel of its phase or a product reads it."""
        others = readers[storage] - {maker}
        return any(other[0] == maker[0] or not kernels[other][0].is_elementwise for other in others)

    made: dict[Phase, list[DeviceOperation]] = {phase: [] for phase in phases}
    computed_again: dict[int, Mapping[Range, int]] = {}
    """By the number of a storage that a kernel does not write: what the kernel reads for it."""
    for kernel, operations in kernels.items():
        if not operations[0].is_elementwise:
            made[kernel[0]] += [one.operation for one in operations if one.operation is not None]
            continue
        reads, writes, unread = _accesses(operations, computed_again)
        given = {storage for storage, *_ in reads}
        for storage in list(writes):
            is_result = storage in unread and not readers[storage] - {kernel}
            if not (storage in given or is_result or is_needed(storage, kernel)):
                computed_again[storage] = reads
                del writes[storage]
        activation = any(
            isinstance(one.operation, Elementwise) and one.operation.activation for one in operations
        )
        nbytes = sum(reads.values()) + sum(writes.values())
        made[kernel[0]].append(Elementwise(nbytes, activation=activation))
    return {phase: tuple(found) for phase, found in made.items()}


def _kernels(operations: Iterable[RecordedOperation]) -> Iterator[list[RecordedOperation]]:
    """Yield the operations of each kernel, and each other operation by itself."""
    for is_elementwise, run in groupby(operations, lambda one: one.is_elementwise):
        if is_elementwise:
            yield list(run)
        else:
            yield from ([one] for one in run)


def _accesses(
    operations: Sequence[RecordedOperation], computed_again: Mapping[int, Mapping[Range, int]]
) -> tuple[dict[Range, int], dict[int, int], set[int]]:
    """Return what a kernel reads, the bytes of each storage that it makes, and which it does not read."""
    reads: dict[Range, int] = {}
    writes: dict[int, int] = {}
    unread: set[int] = set()
    for one in operations:
        for read, nbytes in one.reads.items():
            unread.discard(read[0])
            if read[0] not in writes:
                reads.update(computed_again.get(read[0], {read: nbytes}))
        writes.update(one.writes)
        unread.update(one.writes)
    return reads, writes, unread
