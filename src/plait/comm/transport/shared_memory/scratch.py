"""Shared memory in which the ranks of a group on one host show each other tensors for a moment.

Each rank writes to its own part only. It puts a tensor in a free place there and says where; whoever has
heard it may read, until it says that it has finished. Then the place is free again: mostly the next tensor of
that size goes where the last but one was, which is still in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from plait.comm.transport.shared_memory.line import Word
from plait.comm.transport.shared_memory.lines import Lines
from plait.comm.transport.shared_memory.memory import SharedMemory

CAPACITY = 2**28
"""Bytes a rank for tensors under way; only what was used is taken. Beyond, what is under way is finished."""
_SMALLEST_PLACE = 2**12

Tickets = tuple[int, ...]
Use = Callable[[Sequence[Tensor]], None]
"""What is done with the tensors of all ranks, in order of the index and flat."""


class Showing:
    """A tensor that was put in the scratch, and what is to be done once all other ranks have put theirs."""

    def __init__(self, scratch: Scratch, tickets: Tickets, offset: int, like: Tensor, use: Use) -> None:
        self._scratch = scratch
        self._tickets = tickets
        self._offset = offset
        self._dtype, self._nbytes = like.dtype, like.nbytes
        self._use: Use | None = use

    def wait(self, awaited: str = "") -> None:
        """Wait for the others and do it, once. Raises as `Lines.hear`; nothing works any more then."""
        if self._use is None:
            return
        self._scratch.finish_before(self._tickets[0])
        parts = self._scratch.memory.everyone()
        words = self._scratch.lines.hear(self._tickets[0], Word(self._offset))
        pairs = zip(parts, words, strict=True)
        self._use([part[word.value :][: self._nbytes].view(self._dtype) for part, word in pairs])
        self._use = None
        self._scratch.done(self._tickets)

    def abandon(self) -> bool:
        """True: do nothing with what the others show; this rank reads none of it."""
        if self._use is not None:
            self._use = None
            with suppress(OSError):  # after an error the channels are closed
                self._scratch.done(self._tickets)
        return True


class Scratch:
    """One rank's view of the scratch of its group; all ranks make it, and show tensors, in the same order."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.memory = SharedMemory(lines, CAPACITY)
        self._used = 0
        self._free: dict[int, list[int]] = {}
        self._lent: deque[tuple[int, int, int]] = deque()
        self._under_way: dict[int, Showing] = {}

    def show(self, tensor: Tensor, use: Use, *tickets: int) -> Showing:
        """Put a copy of `tensor` in the scratch and say so; `wait()` of what is returned does the rest.

        All ranks call it with the same shape and dtype, of at most `CAPACITY` bytes. `tickets` are those that
        `use` needs besides, finished with it.
        """
        size = max(_SMALLEST_PLACE, 1 << (tensor.nbytes - 1).bit_length())
        offset = self._place(size)
        copy = self.memory.own[offset:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor.detach())
        ticket = self.lines.ticket()
        self._lent.append((ticket, size, offset))
        showing = Showing(self, (ticket, *tickets), offset, tensor, use)
        self._under_way[ticket] = showing
        self.lines.say(ticket, offset)
        return showing

    def finish_before(self, ticket: int) -> None:
        """Finish what was shown before: a rank without room may wait for that, and has not shown this yet."""
        for number, showing in list(self._under_way.items()):
            if number < ticket:
                showing.wait()

    def done(self, tickets: Tickets) -> None:
        """This rank has read what it was shown."""
        del self._under_way[tickets[0]]
        self.lines.finish(*tickets)

    def _place(self, size: int) -> int:
        """Where in this rank's part that many bytes are free."""
        while self._lent and self.lines.finished(self._lent[0][0]):
            _, free_size, offset = self._lent.popleft()
            self._free.setdefault(free_size, []).append(offset)
        if free := self._free.get(size):
            return free.pop()
        if self._used + size > CAPACITY:
            self._clear()
        self._used += size
        return self._used - size

    def _clear(self) -> None:
        """Finish all that is under way, everywhere, so that every place is free."""
        for showing in list(self._under_way.values()):
            showing.wait()
        self.memory.wait()  # where all were abandoned nobody has
        self.lines.tell_finished()
        if self._lent:
            self.lines.hear_finished(self._lent[-1][0])
        self._lent.clear()
        self._free.clear()
        self._used = 0
