"""`MemoryLedger`: the blocks of memory that a simulated rank allocates and frees, by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from plait.schedules.lowering.program import Instruction


class Category(StrEnum):
    """Purpose of a memory block: parameters, gradients, optimizer state, activations and others."""

    PARAMETERS = "parameters"
    """Whole parameters that are kept, shards that the optimizer updates, buffers, and what layers cache."""
    GATHERED = "gathered"
    """Whole parameters between all-gather and release."""
    GRADIENTS = "gradients"
    STATE = "optimizer"
    """Optimizer state."""
    ACTIVATIONS = "activations"
    """Tensors saved for the backward, inputs and outputs of layers, the loss; the pools of CUDA graphs."""
    MESSAGES = "messages"
    """Buffers for sends and receives between stages."""
    BATCH = "batch"

    # Blocks are counted by category all the time; the hash that Enum defines is a Python function.
    __hash__ = str.__hash__


@dataclass(eq=False, slots=True, frozen=True)
class MemoryBlock:
    """An allocation of memory on a rank; tensors that share memory share a block."""

    nbytes: int
    category: Category
    on_host: bool = False
    """Whether it is offloaded to the CPU while layers run elsewhere."""


@dataclass(frozen=True)
class MemorySnapshot:
    """The bytes allocated on a rank after an instruction."""

    after: Instruction
    held: Counter[Category]
    """Bytes on the device where layers run, by use."""
    host: int
    """Offloaded bytes."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.held.total()


class MemoryLedger:
    """Ledger of a rank's memory blocks: a block stays allocated while some holder (any key) holds it."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, tuple[MemoryBlock, ...]] = {}
        self._holders: dict[MemoryBlock, int] = {}
        self._held: Counter[Category] = Counter()
        # Sums beside the counts: both are asked for after each instruction of a simulated step.
        self._total = self._peak_total = 0
        self._host = 0
        self.peak: MemorySnapshot | None = None
        """The snapshot with the most bytes on the device."""
        self.host_peak = 0
        self.most = 0
        """The most bytes on the device, within instructions too."""

    def hold(self, holder: Hashable, blocks: Iterable[MemoryBlock | None]) -> None:
        """Make `holder` hold exactly `blocks`, and release its earlier blocks; None is no memory."""
        held, holders = tuple([block for block in blocks if block is not None]), self._holders
        for block in held:
            count = holders.get(block, 0)
            holders[block] = count + 1
            if not count:
                self._count(block, block.nbytes)
        self.drop(holder)
        self._holds[holder] = held

    def drop(self, holder: Hashable) -> None:
        """Release all blocks of `holder`."""
        for block in self._holds.pop(holder, ()):
            left = self._holders[block] - 1
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]
                self._count(block, -block.nbytes)

    @property
    def total(self) -> int:
        """The bytes that are allocated on the device."""
        return self._total

    @property
    def holdings(self) -> dict[Hashable, tuple[MemoryBlock, ...]]:
        """The memory blocks in use, by what holds them."""
        return {holder: blocks for holder, blocks in self._holds.items() if blocks}

    def record_temporary(self, extra: int) -> None:
        """Record that an instruction temporarily allocates `extra` bytes more, in the peak `most`."""
        if self._total + extra > self.most:
            self.most = self._total + extra

    def record(self, instruction: Instruction) -> None:
        """Update the peaks with the bytes that are allocated after `instruction`."""
        self.record_temporary(0)
        if self._host > self.host_peak:
            self.host_peak = self._host
        if self.peak is None or self._total > self._peak_total:
            self.peak, self._peak_total = self.snapshot(instruction), self._total

    def snapshot(self, instruction: Instruction) -> MemorySnapshot:
        """Return the currently allocated bytes, as a snapshot after `instruction`."""
        return MemorySnapshot(instruction, self._held.copy(), self._host)

    def reset_peaks(self) -> None:
        """Reset the recorded peaks, before another step."""
        self.peak, self.host_peak, self.most, self._peak_total = None, 0, 0, 0

    def _count(self, block: MemoryBlock, nbytes: int) -> None:
        if block.on_host:
            self._host += nbytes
        else:
            self._held[block.category] += nbytes
            self._total += nbytes
