"""Signals: a first one that is only a wish; and a watchdog, so that they end even a rank blocked in C++."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from plait.comm.orphan_watch import end_process

_PROBE = signal.SIGURG  # ignored by default and used by nobody: its Python handler shows that handlers run


SAME_SIGNAL_SECONDS = 0.5
"""Seconds. Launchers signal a process by itself and once more with its group: that is one signal."""


class GracefulStop:
    """While entered, the first of some signals is only heard, and may be as late as the main thread likes.

    A second one is left to the handler that was there before.
    """

    def __init__(self, signals: Iterable[int], hear: Callable[[int], None]) -> None:
        """`hear` is told the first signal's number."""
        self._signals = tuple(signals)
        self._hear = hear
        self._heard_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in self._signals:
            self._before[number] = signal.signal(number, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def __call__(self, number: int, frame: object) -> None:
        """As Python calls a handler."""
        now = time.monotonic()
        if self._heard_at is None:
            self._heard_at = now
            self._hear(number)
        elif now - self._heard_at > SAME_SIGNAL_SECONDS:
            self.leave(number)

    def leave(self, number: int) -> None:
        """To the handlers that were there before: this signal, and all that follow."""
        self._restore()
        signal.raise_signal(number)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was none of Python's


class Watchdog:
    """While entered, ends this process when a SIGINT or SIGTERM cannot be handled for `grace` seconds.

    Python runs signal handlers between two instructions of the main thread; a main thread that is blocked
    inside a receive runs none. A second thread therefore learns of the signal through the wake-up descriptor
    and asks the main thread for a sign of life; without one it writes one line to stderr and exits with
    128 + signal. Inside of a `GracefulStop` that is so for the second signal.
    It does nothing when entered outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self, name: str, grace: float = 5.0) -> None:
        """Takes the name that the line on stderr begins with, and the grace in seconds."""
        self.name = name
        self.grace = grace
        self._alive = threading.Event()
        self._leaving = False
        self._wished_at: float | None = None
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
        if isinstance(signal.getsignal(number), GracefulStop):  # it stays until a second one was handled
            now = time.monotonic()
            if self._wished_at is None:
                self._wished_at = now
            if now - self._wished_at <= SAME_SIGNAL_SECONDS:
                return
        _thread.interrupt_main(_PROBE)
        if self._alive.wait(self.grace):
            return
        name = signal.Signals(number).name
        print(f"{self.name} got {name} while it waited for a peer, and ends.", file=sys.stderr, flush=True)
        end_process(128 + number)
