"""Words between all ranks of one group on one host: quick, and who waits costs no processor time.

A word is a number, maybe with a file descriptor, said to all others. It belongs to a *ticket*: ranks make the
same calls in the same order, so the n-th ticket that one takes is the n-th of all, and the words of several
operations may be waited for in any order. What a rank wrote to shared memory before it spoke is seen by those
who have heard it, since both enter the kernel in between.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from plait.comm.transport.shared_memory.door import Door
from plait.comm.transport.shared_memory.line import NO_TICKET, Line, Word


class Lines:
    """The lines of one rank to the others of a group. After an error they are closed; others hear of it."""

    def __init__(self, door: Door, doors: Sequence[str], index: int, label: str, timeout: float) -> None:
        """Lines to the ranks whose doors have the names `doors`; this rank's own is the one at `index`.

        `label` is the group's, alike on all its ranks. `timeout`, in seconds, holds for every wait.
        """
        self.index, self.size = index, len(doors)
        self._door = door
        self._timeout = timeout
        self._lines = [
            Line(door, peer, f"{doors[index]}-{label}-{number}", f"{peer}-{label}-{index}")
            for number, peer in enumerate(doors)
            if number != index
        ]
        self._next = 0
        self._unfinished: set[int] = set()
        self._error: str | None = None

    def ticket(self) -> int:
        """The next ticket; it is unfinished until `finish` is told otherwise."""
        ticket = self._next
        self._next += 1
        self._unfinished.add(ticket)
        return ticket

    def say(self, ticket: int, value: int = 0, descriptor: int | None = None) -> None:
        """Tell all others; they get the file `descriptor` as one of their own. It does not wait to be heard.

        It waits, for the timeout at most, where a peer has some 200 words to hear. Raises as `hear`, but for
        a peer that is gone: that is told by what is to be heard from it.
        """
        self._check()
        word = Line.encode(ticket, value, self._finished)
        for line in self._lines:
            if not line.say(word, descriptor):
                self._insist(line, word, descriptor)

    def hear(self, ticket: int, own: Word) -> list[Word]:
        """Wait for what all others say of a ticket: the words in order of the index, with this rank's `own`.

        Raises `ConnectionError` where one of them is gone, `TimeoutError` where one does not speak in time.
        """
        self._hear_all(lambda line: ticket in line.heard)
        words = [line.heard.pop(ticket) for line in self._lines]
        return [*words[: self.index], own, *words[self.index :]]

    def finish(self, *tickets: int) -> None:
        """Say that this rank needs nothing more of what belongs to the tickets.

        The next word says so; or one of its own, where later operations are under way and none may follow.
        """
        self._unfinished.difference_update(tickets)
        if self._unfinished and max(self._unfinished) > max(tickets):
            self.tell_finished()

    def tell_finished(self) -> None:
        """Say now which tickets this rank has finished."""
        self.say(NO_TICKET)

    def finished(self, ticket: int) -> bool:
        """Whether every rank is known to have finished this ticket and all before it."""
        return ticket < min(self._finished, *(line.finished for line in self._lines))

    def hear_finished(self, ticket: int) -> None:
        """Wait until every other rank has finished this ticket and all before it. Raises as `hear`."""
        self._hear_all(lambda line: line.finished > ticket)

    def fail(self, error: Exception) -> None:
        """Hang up, and let every later word raise a `ConnectionError` that tells of this one."""
        self._error = self._error or f"an operation before it failed ({error})"
        self.close()

    def close(self) -> None:
        """Give the connections back; the lines are of no use any more."""
        self._error = self._error or "the mesh is closed"
        for line in self._lines:
            line.close()

    def __del__(self) -> None:
        if hasattr(self, "_error"):
            self.close()

    @property
    def _finished(self) -> int:
        return min(self._unfinished, default=self._next)

    def _check(self) -> None:
        if self._error is not None:
            raise ConnectionError(self._error)

    def _hear_all(self, enough: Callable[[Line], bool]) -> None:
        self._check()
        deadline = time.monotonic() + self._timeout
        missing = [line for line in self._lines if not enough(line)]
        while missing:
            self._listen(missing)
            missing = [line for line in missing if not enough(line)]
            if any(line.gone for line in missing):
                raise self._failed(ConnectionError("connection closed by peer"))
            if missing:
                self._sleep(missing, deadline)

    def _insist(self, line: Line, word: bytes, descriptor: int | None) -> None:
        """Say a word to a peer that has many to hear, listening meanwhile: it may wait to be heard itself."""
        deadline = time.monotonic() + self._timeout
        while not line.say(word, descriptor):
            self._listen(self._lines)
            if line.gone:
                return
            self._sleep([other for other in self._lines if not other.gone], deadline, line)

    def _listen(self, lines: Sequence[Line]) -> None:
        # Once for all: who calls after that stands before the door, which wakes the sleep that follows.
        if not all(line.connected for line in lines):
            self._door.open()
        for line in lines:
            line.listen()

    def _sleep(self, lines: Sequence[Line], deadline: float, full: Line | None = None) -> None:
        """Return when one of the lines has something to hear, or the `full` one has room."""
        poll = select.poll()
        for line in lines:
            line.watch(poll, room=line is full)
        left = deadline - time.monotonic()
        ready = poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise self._failed(TimeoutError("timed out"))
        for line in lines:
            line.notice(ready)

    def _failed(self, error: Exception) -> Exception:
        """The error, to be raised by who calls: a frame that holds what it raises would keep all of this."""
        self.fail(error)
        return error
