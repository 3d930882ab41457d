"""Watches of a rank's process: for a launcher that has ended, for signals, for a rank blocked in C++."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, Self

from plait.ranks.launcher_environment import World
from plait.ranks.launcher_processes import parent_of, parents_up_to_launcher

_MARKS = {
    "torchrun": "TORCHELASTIC_RUN_ID",  # a rank that was started by hand has RANK, and no agent
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "pmi": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}
"""An environment variable that a launcher sets for its ranks and does not have itself."""
_PERIOD = 0.5
"""Seconds between two checks."""


class OrphanWatch:
    """Context in which this process ends within a second after its launcher's process on this host is gone.

    A second thread compares the parents of this process, and of wrappers between it and the launcher, with
    those at the beginning: the system gives a process another parent when its own ends. It then writes one
    line to stderr and exits with 1. Ranks that were started by hand have no launcher and no watch.
    """

    def __init__(self, world: World) -> None:
        """Take from `world` the launcher to watch, and the rank that the message on stderr names."""
        self._world = world
        mark = _MARKS.get(world.launcher, "")
        self._parents = parents_up_to_launcher(mark) if mark in os.environ else {}
        self._left = threading.Event()

    @property
    def watches(self) -> bool:
        """Whether this rank has a launcher to watch."""
        return bool(self._parents)

    def __enter__(self) -> Self:
        if self.watches:
            threading.Thread(target=self._watch, name="plait-orphan-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(_PERIOD):
            if any(parent_of(process) != parent for process, parent in self._parents.items()):
                end_orphan(f"rank {self._world.rank}: {self._world.launcher}, which started it, is gone")


def end_orphan(reason: str) -> NoReturn:
    """End this process with exit code 1, after a line on stderr that begins with `reason`."""
    with suppress(OSError, ValueError):  # stderr may be closed, or a pipe that is full
        if select.select([], [2], [], _PERIOD)[1]:
            os.write(2, f"{reason}, so it ends.\n".encode())
    end_process(1)


def end_process(code: int) -> NoReturn:
    """Exit at once, whatever other threads do, and kill the processes started by multiprocessing.

    Workers of a `DataLoader` would end by themselves after up to five seconds, processes of a fork server
    never.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


_PROBE = signal.SIGURG
"""Unused and ignored by default: the watchdog raises it to see whether Python handlers run."""
SAME_SIGNAL_SECONDS = 0.5
"""Signals within this time count as one: launchers signal a process and then once more its process group."""


class GracefulStop:
    """Context in which the first signal only calls a function, which can stop the program gracefully.

    A second one is passed to the previous handler.
    """

    def __init__(self, signals: Iterable[int], on_first: Callable[[int], None]) -> None:
        """Handle `signals` within the context; call `on_first` with the number of the first one received."""
        self._signals = tuple(signals)
        self._on_first = on_first
        self._received_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in self._signals:
            self._before[number] = signal.signal(number, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def __call__(self, number: int, frame: object) -> None:
        """Handle a signal: call `on_first` for the first one, the previous handler for a later one.

        Signals within `SAME_SIGNAL_SECONDS` of the first one are ignored.
        """
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
            self._on_first(number)
        elif now - self._received_at > SAME_SIGNAL_SECONDS:
            self.restore_and_raise(number)

    def restore_and_raise(self, number: int) -> None:
        """Restore the previous handlers and raise the signal again."""
        self._restore()
        signal.raise_signal(number)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not installed from Python


class Watchdog:
    """Context in which this process ends when a SIGINT or SIGTERM cannot be handled for `grace` seconds.

    Python runs signal handlers between two instructions of the main thread; a main thread that is blocked
    inside a receive runs none. So a second thread reads the signal from the wake-up descriptor and probes
    whether the main thread runs handlers; if not, it writes one line to stderr and exits with 128 + signal.
    Inside a `GracefulStop` it does so for the second signal.
    It does nothing when entered outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self, name: str, grace: float = 5.0) -> None:
        """Set the prefix of the message on stderr, and the grace period in seconds."""
        self.name = name
        self.grace = grace
        self._alive = threading.Event()
        self._leaving = False
        self._first_at: float | None = None
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
        if isinstance(signal.getsignal(number), GracefulStop):  # installed until a second signal is handled
            now = time.monotonic()
            if self._first_at is None:
                self._first_at = now
            if now - self._first_at <= SAME_SIGNAL_SECONDS:
                return
        _thread.interrupt_main(_PROBE)
        if self._alive.wait(self.grace):
            return
        name = signal.Signals(number).name
        print(f"{self.name} got {name} while it waited for a peer, and ends.", file=sys.stderr, flush=True)
        end_process(128 + number)
