"""`StopSignals`: the signals on which a training run ends between two steps, on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Self

from plait.ranks.failure.signal_handling import GracefulStop


class StopSignals:
    """Context manager that records whether a rank has received one of `signals`.

    The first signal is recorded, so that the run stops between two steps; the second ends the process.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = frozenset(signals)
        self._handlers = GracefulStop(self._signals, self._receive)
        self.local = 0
        """The signal that this rank has received; 0: none."""

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        # Local ranks start with these signals blocked, until there is a handler.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._handlers.__exit__(*error)

    def _receive(self, number: int) -> None:
        self.local = number
