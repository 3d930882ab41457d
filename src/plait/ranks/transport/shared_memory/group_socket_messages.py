"""Messages between all ranks of one group on one host, without processor time while waiting.

A message is a number, maybe with a file descriptor, sent to all others under a *sequence number*. Ranks make
the same calls in the same order, so their sequence numbers agree, and the messages of several operations may
be received in any order. A message also describes its call, so that ranks which make other calls fail.
What a rank wrote to shared memory before it sent a message is visible to the ranks that have received it,
since both enter the kernel in between.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from plait.ranks.transport.call_description import shown
from plait.ranks.transport.shared_memory.peer_sockets import (
    NO_SEQUENCE,
    ChannelMessage,
    Listener,
    PeerChannel,
)

_LONGEST_POLL = 3600.0
"""Seconds: the system cannot wait for an unlimited number of them at once."""
_SECONDS_BETWEEN_CONNECTS = 0.002
"""While the backlog of a peer is full."""


class Channels:
    """Sends short messages (numbers, file descriptors) from one rank to all others of its group on a host."""

    def __init__(
        self,
        listener: Listener,
        listeners: Sequence[str],
        index: int,
        label: str,
        timeout: float,
        ranks: Sequence[int] = (),
    ) -> None:
        """Open channels to the ranks with these `listeners`; the listener of this rank is at `index`.

        `label` is the group's, the same on all its ranks. `timeout`, in seconds, holds for every wait.
        `ranks`: their global numbers, for errors; by default their indices.
        """
        self._ranks = ranks or range(len(listeners))
        self.index, self.size = index, len(listeners)
        self._listener = listener
        self._timeout = timeout
        self._channels = [
            PeerChannel(listener, peer, f"{listeners[index]}-{label}-{number}", f"{peer}-{label}-{index}")
            for number, peer in enumerate(listeners)
            if number != index
        ]
        self._next = 0
        self._unfinished: dict[int, bytes] = {}
        """The call of each sequence number that is not finished."""
        self._announced: set[int] = set()
        """Those of operations whose calls alone are compared: other ranks carry them out elsewhere."""
        self._error: str | None = None
        self.call = b""
        """The description of the call that sequence numbers are reserved for."""

    def next_sequence(self) -> int:
        """Reserve and return a sequence number for a new operation; `acknowledge` marks it as finished."""
        sequence = self._next
        self._next += 1
        self._unfinished[sequence] = self.call
        return sequence

    def send(self, sequence: int, value: int = 0, descriptor: int | None = None) -> None:
        """Send a message to all others, which get a duplicate of the file `descriptor`.

        Blocks, for the timeout at most, only while a peer has some 200 messages to receive. Raises as
        `receive`, except for a peer that is gone: receiving from it raises that.
        """
        self._raise_if_failed()
        call = self._unfinished.get(sequence, b"")
        packet = PeerChannel.encode(sequence, value, self._acknowledged, call)
        for channel in self._channels:
            if not channel.send(packet, descriptor):
                self._send_when_possible(channel, packet, descriptor)

    def receive(self, sequence: int, own: ChannelMessage) -> list[ChannelMessage]:
        """Block until all others have sent message `sequence`; return all messages by rank index, with `own`.

        Raises `ConnectionError` where a peer is gone, `TimeoutError` where one does not send in time, and
        `RuntimeError` where one makes another call.
        """
        self._receive_until(lambda channel: sequence in channel.received)
        self._compare(sequence)
        messages = [channel.received.pop(sequence) for channel in self._channels]
        return [*messages[: self.index], own, *messages[self.index :]]

    def announce(self) -> int:
        """Send a description of this rank's call to the others, for comparison; return its sequence number.

        Does not block. Raises `RuntimeError` if a message that has arrived shows that its rank made another
        call: of ranks that make two calls at least one is told before it goes on, since each first sends its
        own.
        """
        sequence = self.next_sequence()
        self.send(sequence)
        self._announced.add(sequence)
        self._receive_pending(self._channels)
        self._compare(sequence)
        return sequence

    def compare_announced(self, sequence: int) -> None:
        """Block until all others have announced call `sequence`; raise if theirs differs from this rank's.

        Does nothing where it was compared already. Raises as `receive`.
        """
        if sequence in self._announced:
            self.receive(sequence, ChannelMessage(0))
            self.withdraw(sequence)

    def withdraw(self, sequence: int) -> None:
        """Mark the announced call `sequence` as done without comparing it, if it was not compared already."""
        if sequence in self._announced:
            self._announced.remove(sequence)
            self.acknowledge(sequence)

    def _compare_before(self, sequence: int) -> None:
        """Compare the calls announced before number `sequence`, as far as the other ranks' have arrived.

        So an operation that nobody waits for holds up no acknowledgement.
        """
        for number in sorted(one for one in self._announced if one < sequence):
            if all(number in channel.received for channel in self._channels):
                self._announced.remove(number)
                self._compare(number)
                for channel in self._channels:
                    channel.received.pop(number)
                self._unfinished.pop(number, None)

    def _compare(self, sequence: int) -> None:
        mine = self._unfinished.get(sequence, b"")
        for channel in self._channels:
            message = channel.received.get(sequence)
            if message is not None and message.call != mine:
                raise self._failed(RuntimeError(self._difference(sequence, mine)))

    def _difference(self, sequence: int, mine: bytes) -> str:
        others = [channel.received.get(sequence) for channel in self._channels]
        calls = [None if one is None else one.call for one in others]
        calls.insert(self.index, mine)
        ranks_of: dict[str, list[int]] = {}
        for rank, call in zip(self._ranks, calls, strict=True):
            if call is not None:
                ranks_of.setdefault(call.decode(errors="replace"), []).append(rank)
        told = f"the ranks make different calls ({shown(ranks_of)})"
        return f"{told}: make the same call with the same shapes on each."

    def acknowledge(self, *sequences: int) -> None:
        """Mark the messages with these sequence numbers as read by this rank.

        The next message carries the acknowledgement; where later operations are pending, so that none may
        follow, it is sent at once.
        """
        for sequence in sequences:
            self._unfinished.pop(sequence, None)
        self._compare_before(max(sequences))
        if self._unfinished and max(self._unfinished) > max(sequences):
            self.send_acknowledgement()

    def send_acknowledgement(self) -> None:
        """Send this rank's latest acknowledgement to all others now."""
        self.send(NO_SEQUENCE)

    def is_acknowledged(self, sequence: int) -> bool:
        """Return whether every rank is known to need no message up to number `sequence` any more."""
        return sequence < min(self._acknowledged, *(channel.acknowledged for channel in self._channels))

    def wait_acknowledged(self, sequence: int) -> None:
        """Block until no other rank needs the messages up to number `sequence` any more."""
        self._receive_until(lambda channel: channel.acknowledged > sequence)

    def fail(self, error: Exception) -> None:
        """Close the channels; every later operation raises a `ConnectionError` that quotes `error`."""
        self._error = self._error or f"an operation before it failed ({error})"
        self.close()

    def close(self) -> None:
        """Close the connections; every later operation raises."""
        self._error = self._error or "the mesh is closed"
        for channel in self._channels:
            channel.close()

    def __del__(self) -> None:
        if hasattr(self, "_error"):
            self.close()

    @property
    def _acknowledged(self) -> int:
        return min(self._unfinished, default=self._next)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise ConnectionError(self._error)

    def _receive_until(self, complete: Callable[[PeerChannel], bool]) -> None:
        self._raise_if_failed()
        deadline = time.monotonic() + self._timeout
        missing = [channel for channel in self._channels if not complete(channel)]
        while missing:
            self._receive_pending(missing)
            missing = [channel for channel in missing if not complete(channel)]
            if any(channel.gone for channel in missing):
                raise self._failed(ConnectionError("connection closed by peer"))
            if missing:
                self._poll(missing, deadline)

    def _send_when_possible(self, channel: PeerChannel, packet: bytes, descriptor: int | None) -> None:
        """Send a packet; while the send buffer is full, receive, in case the peer is blocked sending too."""
        deadline = time.monotonic() + self._timeout
        while not channel.send(packet, descriptor):
            self._receive_pending(self._channels)
            if channel.gone:
                return
            self._poll([other for other in self._channels if not other.gone], deadline, channel)

    def _receive_pending(self, channels: Sequence[PeerChannel]) -> None:
        if not all(channel.established for channel in channels):
            for channel in channels:  # first: a peer that has closed may have connected before
                channel.connect()
            self._listener.accept_pending()  # once for all: a later connection wakes the poll that follows
        for channel in channels:
            channel.receive_pending()

    def _poll(
        self, channels: Sequence[PeerChannel], deadline: float, full: PeerChannel | None = None
    ) -> None:
        """Block until one of the channels has pending messages, or the `full` one has room to send.

        Briefly while a peer cannot be connected to: its backlog is full until its next operation.
        """
        poll = select.poll()
        for channel in channels:
            channel.register(poll, writable=channel is full)
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._failed(TimeoutError("timed out"))
        connected = all(channel.connected for channel in channels)
        pause = min(left, _LONGEST_POLL if connected else _SECONDS_BETWEEN_CONNECTS)
        ready = poll.poll(1000 * pause)
        if connected and not ready and pause == left:
            raise self._failed(TimeoutError("timed out"))
        for channel in channels:
            channel.note_hang_up(ready)

    def _failed(self, error: Exception) -> Exception:
        # Returned and not raised: the caller's frame would otherwise keep this object alive in the traceback.
        self.fail(error)
        return error
