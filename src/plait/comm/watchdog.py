"""A watchdog for a launcher's ranks: Ctrl-C and SIGTERM end even one that waits in C++ for a peer."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable

_PROBE = signal.SIGURG  # ignored by default and used by nobody: its Python handler shows that handlers run


class Wish:
    """A signal handler that only takes down what is wished: it may run as late as the main thread likes."""

    def __init__(self, hear: Callable[[int], None]) -> None:
        """`hear` is told the signal's number."""
        self._hear = hear

    def __call__(self, number: int, frame: object) -> None:
        """As Python calls a handler."""
        self._hear(number)


class Watchdog:
    """While entered, ends this process when a SIGINT or SIGTERM cannot be handled for `grace` seconds.

    Python runs signal handlers between two instructions of the main thread; a main thread that is blocked
    inside a receive runs none. A second thread therefore learns of the signal through the wake-up descriptor
    and asks the main thread for a sign of life; without one it writes one line to stderr and exits with
    128 + signal. Where the handler is a `Wish`, that is so for the second signal.
    It does nothing when entered outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self, name: str, grace: float = 5.0) -> None:
        """Takes the name that the line on stderr begins with, and the grace in seconds."""
        self.name = name
        self.grace = grace
        self._alive = threading.Event()
        self._leaving = False
        self._wished = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_probe = signal.signal(_PROBE, lambda *_: self._alive.set())
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="plait-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        signal.signal(_PROBE, self._previous_probe)
        self._leaving = True
        self._alive.set()
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        self._thread = None

    def _watch(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._probe(number)

    def _probe(self, number: int) -> None:
        self._alive.clear()
        if self._leaving:
            return
        if isinstance(signal.getsignal(number), Wish) and not self._wished:
            self._wished = True
            return
        _thread.interrupt_main(_PROBE)
        if self._alive.wait(self.grace):
            return
        name = signal.Signals(number).name
        print(f"{self.name} got {name} while it waited for a peer, and ends.", file=sys.stderr, flush=True)
        os._exit(128 + number)
