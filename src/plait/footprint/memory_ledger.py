"""A ledger of the blocks of memory that a rank holds, and of the moment when they are most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from plait.schedules.program import Instruction


class Category(StrEnum):
    """What a block is for."""

    PARAMETERS = "parameters"
    """Whole ones that stay, pieces that the optimizer updates, and a model's own buffers."""
    GATHERED = "gathered"
    """Whole parameters between their gathering and their release."""
    GRADIENTS = "gradients"
    STATE = "optimizer"
    """The optimizer's state."""
    ACTIVATIONS = "activations"
    """What backwards will need, what flows between layers, and the loss."""
    MESSAGES = "messages"
    """Buffers of messages between stages."""
    BATCH = "batch"

    # Blocks are counted by category all the time; the hash that Enum defines is a Python function.
    __hash__ = str.__hash__


@dataclass(eq=False, slots=True, frozen=True)
class MemoryBlock:
    """A piece of memory. What holds the same memory holds the same block."""

    nbytes: int
    category: Category
    on_host: bool = False
    """Offloaded: on the CPU, wherever layers run."""


@dataclass(frozen=True)
class MemorySnapshot:
    """What is held after an instruction."""

    after: Instruction
    held: Counter[Category]
    """Bytes on the device where layers run."""
    host: int
    """Bytes that are offloaded."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.held.total()


class MemoryLedger:
    """Who holds which blocks now. A block counts once, as long as anybody holds it."""

    def __init__(self) -> None:
        self._holds: dict[Hashable, tuple[MemoryBlock, ...]] = {}
        self._holders: Counter[MemoryBlock] = Counter()
        self._held: Counter[Category] = Counter()
        self._host = 0
        self.peak: MemorySnapshot | None = None
        """The moment of the most bytes on the device."""
        self.host_peak = 0
        self.most = 0
        """The most bytes on the device, within instructions too."""

    def hold(self, holder: Hashable, blocks: Iterable[MemoryBlock | None]) -> None:
        """From now on `holder` holds `blocks`, and nothing else; None stands for no memory."""
        held = tuple(block for block in blocks if block is not None)
        for block in held:
            self._holders[block] += 1
            if self._holders[block] == 1:
                self._count(block, block.nbytes)
        self.drop(holder)
        self._holds[holder] = held

    def drop(self, holder: Hashable) -> None:
        """From now on `holder` holds nothing."""
        for block in self._holds.pop(holder, ()):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._count(block, -block.nbytes)

    def reach(self, extra: int) -> None:
        """For a moment `extra` bytes more than now are held on the device."""
        self.most = max(self.most, self._held.total() + extra)

    def mark(self, instruction: Instruction) -> None:
        """`instruction` was carried out."""
        self.reach(0)
        self.host_peak = max(self.host_peak, self._host)
        if self.peak is None or self._held.total() > self.peak.total:
            self.peak = self.moment(instruction)

    def moment(self, instruction: Instruction) -> MemorySnapshot:
        """What is held now, after `instruction`."""
        return MemorySnapshot(instruction, self._held.copy(), self._host)

    def begin(self) -> None:
        """Forget the peaks: another step begins."""
        self.peak, self.host_peak, self.most = None, 0, 0

    def _count(self, block: MemoryBlock, nbytes: int) -> None:
        if block.on_host:
            self._host += nbytes
        else:
            self._held[block.category] += nbytes
