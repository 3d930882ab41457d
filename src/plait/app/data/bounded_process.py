"""Calls a function in a child process, with limits on its memory and on the time of each call.

A loop of a C function can be ended in no other way. The process is forked, so that it begins within
milliseconds with all that this one has; it answers one call after another, and ends with this one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn


class CallFailedError(Exception):
    """A call of a `BoundedProcess` raised an error or went beyond a limit; the message says which."""


class BoundedProcess:
    """Calls `function` in a forked child, with limits on each call's `seconds` and on added `memory` (bytes).

    Results are JSON values.
    """

    def __init__(self, function: Callable[..., Any], seconds: float, memory: int) -> None:
        self._function, self._seconds, self._memory = function, seconds, memory
        self._lock, self._owner = threading.Lock(), 0
        self._connection: Connection
        self._end: Callable[[], object]

    def call(self, *arguments: Any) -> Any:
        """Return the result of a call. Raises CallFailedError where it fails or goes beyond a limit."""
        with self._lock:
            if self._owner != os.getpid():  # none was started, or before this process was forked
                self._start()
            deadline = time.monotonic() + self._seconds
            try:
                self._connection.send(arguments)
                if not self._connection.poll(self._seconds):
                    raise TimeoutError
                failure, result = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._stop()
                if time.monotonic() < deadline:
                    raise CallFailedError("its process was ended, perhaps for lack of memory") from None
                # Its own alarm may have ended it first, where this process was late.
                raise CallFailedError(f"it takes more than {self._seconds:g} seconds") from None
        if failure:
            raise CallFailedError(failure)
        return result

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which the process needs
            process = os.fork()
        if not process:
            self._connection.close()
            _serve(theirs, self._function, self._seconds, self._memory)
        theirs.close()
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._connection, process, self._owner)

    def _stop(self) -> None:
        self._end()
        self._owner = 0


def _end(connection: Connection, process: int, owner: int) -> None:
    """End the process and wait for it; nothing in a process that was forked from its owner."""
    connection.close()
    if os.getpid() == owner:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _serve(connection: Connection, function: Callable[..., Any], seconds: float, memory: int) -> NoReturn:
    """Run in the child process: execute calls from the connection until its owner closes it."""
    try:
        os.closerange(3, connection.fileno())  # locks and connections of the other process
        os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        _limit_memory(memory)
        while True:
            arguments = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, 2 * seconds)  # where the other process is killed meanwhile
            answer = _answer(function, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(answer)
    finally:
        os._exit(0)  # without what the other process does at its end


def _limit_memory(memory: int) -> None:
    """Limit this process to `memory` bytes more than its present address space, if that is known."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, most))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return a call's error in words, or "", and its result, in JSON."""
    try:
        return json.dumps(["", function(*arguments)]).encode()
    except MemoryError:
        reason = "it takes too much memory"
    except Exception as error:  # of any function
        reason = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
    return json.dumps([reason, None]).encode()
