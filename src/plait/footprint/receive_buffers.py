"""The memory of sends and receives between stages, as `plait.pipeline.exchange` allocates it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from plait.footprint.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.pipeline.exchange import Crossing, buffer_sizes, receive_buffers
from plait.schedules.action import Action, Kind
from plait.schedules.messages import SENDS_IN_FLIGHT


class ReceiveBufferAccount:
    """Records in a ledger the allocations of the `Exchange` of one rank."""

    def __init__(self, ledger: MemoryLedger, crossing: Crossing) -> None:
        """`crossing`: the tensors that stages exchange, with the same shapes for all micro-batches."""
        self._ledger = ledger
        self._crossing = crossing
        self._sizes = buffer_sizes(crossing)
        self._free: dict[int, list[MemoryBlock]] = defaultdict(list)
        self._pool: set[MemoryBlock] = set()
        self._posted: dict[Action, list[MemoryBlock]] = {}
        self._lent: dict[tuple[int, int], list[MemoryBlock]] = defaultdict(list)
        self._sends: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        self._sent = 0

    def post(self, action: Action) -> None:
        """Post the receives of `action` into buffers of the pool."""
        received = receive_buffers(action._replace(microbatch=0), self._crossing, self._sizes)
        self._posted[action] = [self._take(size) for _, size in received]

    def take(self, action: Action) -> list[MemoryBlock]:
        """Return the blocks received for `action`."""
        blocks = self._posted.pop(action)
        self._lent[action.stage, action.microbatch] += blocks
        return blocks

    def send(self, action: Action, blocks: Sequence[MemoryBlock], peer: int) -> None:
        """Start a send, which holds its blocks until `SENDS_IN_FLIGHT` later sends have started."""
        under_way = self._sends[peer, action.kind]
        if len(under_way) == SENDS_IN_FLIGHT:
            self._ledger.drop(("send", under_way.pop(0)))
        self._sent += 1
        self._ledger.hold(("send", self._sent), map(self.safe_to_keep, blocks))
        under_way.append(self._sent)

    def send_gradients(self, action: Action, gradients: Sequence[MemoryBlock | None], peer: int) -> None:
        """Start a send of gradients, with zeros for gradients that are None."""
        pairs = zip(self._crossing[action.stage - 1][0], gradients, strict=True)
        blocks = [
            MemoryBlock(info.nbytes, Category.MESSAGES) if gradient is None else gradient
            for info, gradient in pairs
            if info.requires_grad
        ]
        self.send(action, blocks, peer)

    def safe_to_keep(self, block: MemoryBlock) -> MemoryBlock:
        """Return `block`, or a copy where it is a buffer of the pool."""
        return MemoryBlock(block.nbytes, Category.MESSAGES) if block in self._pool else block

    def release(self, stage: int, microbatch: int) -> None:
        """Return the buffers of a stage's micro-batch to the pool."""
        for block in self._lent.pop((stage, microbatch), ()):
            self._free[block.nbytes].append(block)

    def finish(self) -> None:
        """Finish all sends."""
        for under_way in self._sends.values():
            for number in under_way:
                self._ledger.drop(("send", number))
            under_way.clear()

    def _take(self, nbytes: int) -> MemoryBlock:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        block = MemoryBlock(nbytes, Category.MESSAGES)
        self._pool.add(block)
        self._ledger.hold(("pool", len(self._pool)), [block])
        return block
