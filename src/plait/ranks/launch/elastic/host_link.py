"""`HostLink`: a connection between the supervisors of two hosts; notices when the other one is gone.

Messages are JSON objects, each with a `kind`. Each side sends something every moment, so that silence means
that the other side is gone, stopped, or cannot be reached.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from plait.ranks.run_store import plain_address

Message = dict[str, Any]

BEAT, SILENCE = 0.3, 4.0
"""Seconds between two messages at most, and without any after which the other side counts as gone."""
_HEAD = struct.Struct("!I")
MOST_BYTES = 1 << 28
"""Of a message: what claims to be longer is none of ours."""
_PART = 1 << 20
"""Bytes that are sent, or received, within the time of silence."""
_USER_TIMEOUT = 18
"""TCP_USER_TIMEOUT of Linux: milliseconds until what is sent has to be acknowledged."""


class HostLink:
    """Connection to another host's supervisor: JSON messages, sent and received in a thread each."""

    def __init__(
        self, connected: socket.socket, received: Callable[[HostLink, Message | None], None], silence: float
    ) -> None:
        """Call `received` in a thread for every message, and once with None when the other side is gone.

        `silence`: seconds after which it counts as gone.
        """
        self._socket, self._received, self._silence = connected, received, silence
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.about: Message = {}
        """What each beat tells the other side."""
        self._closed = threading.Event()
        connected.settimeout(silence)
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(1000 * silence))
        self._writer = threading.Thread(target=self._write, name="plait-host-out", daemon=True)
        self._reader = threading.Thread(target=self._read, name="plait-host-in", daemon=True)

    def start(self) -> None:
        """Start the threads that send and receive."""
        self._writer.start()
        self._reader.start()

    @property
    def address(self) -> str:
        """The address of this host in its connection to the other one."""
        return plain_address(self._socket.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message to be sent in order, without waiting; it is lost where the other side is gone."""
        self._outgoing.put(dict(message))

    def finish(self) -> None:
        """Send the queued messages and no later ones, without waiting; `close` ends the connection."""
        self._outgoing.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Send the queued messages, for `seconds` at most (None: `silence`); then end the connection."""
        self.finish()
        if threading.current_thread() is not self._writer and self._writer.is_alive():
            self._writer.join(self._silence if seconds is None else seconds)
        self._end()

    def _end(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        with suppress(OSError):
            while not self._closed.is_set():
                try:
                    message = self._outgoing.get(timeout=BEAT)
                except queue.Empty:
                    message = {"kind": "beat", **self.about}
                if message is None:
                    return
                data = _framed(message)
                for start in range(0, len(data), _PART):  # each part within the limit of the socket
                    self._socket.sendall(data[start : start + _PART])
            return
        self._end()  # the reader tells that the other side is gone

    def _read(self) -> None:
        try:
            with suppress(OSError, ValueError, RecursionError):  # the last by JSON of a stranger
                while True:
                    self._received(self, _next_message(self._socket))
        finally:
            self._closed.set()
            self._received(self, None)
            self._outgoing.put(None)
            self._writer.join(self._silence)
            self._socket.close()


def connect_to_host(host: str, port: int, seconds: float) -> socket.socket | None:
    """Return a connection to the supervisor at `host` and `port`; None where nothing answers in time."""
    try:
        return socket.create_connection((host, port), seconds)
    except (OSError, ValueError, OverflowError):  # the last two by a name, or a port, that is none
        return None


def ask_host(host: str, port: int, message: Mapping[str, Any], answer: str, seconds: float) -> Message | None:
    """Send a message to a supervisor; return its reply of kind `answer`, or None without one in time.

    Waits for `seconds` to connect, and as long for the answer.
    """
    connected = connect_to_host(host, port, seconds)
    if connected is None:
        return None
    deadline = time.monotonic() + seconds
    with connected, suppress(OSError, ValueError, RecursionError):
        connected.sendall(_framed(message))
        while time.monotonic() < deadline:
            found = _next_message(connected)
            if found.get("kind") == answer:
                return found
    return None


def _framed(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message: their number, and the message as JSON."""
    data = json.dumps(message).encode()
    return _HEAD.pack(len(data)) + data


def _next_message(connected: socket.socket) -> Message:
    """Return the next message. Raises OSError where the other side is gone, ValueError where it is none."""
    size = _HEAD.unpack(_exactly(connected, _HEAD.size))[0]
    if size > MOST_BYTES:
        raise ValueError("too long for a message of a supervisor")
    message = json.loads(_exactly(connected, size))
    if not isinstance(message, dict):
        raise ValueError("no message of a supervisor")
    return message


def _exactly(connected: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. Raises OSError where the other side is gone or silent."""
    data = bytearray()
    while len(data) < size:
        part = connected.recv(min(size - len(data), _PART))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)
