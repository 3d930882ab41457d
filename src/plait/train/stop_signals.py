"""Stops a run between two steps: the first signal is recorded, the second one ends the process at once."""

from __future__ import annotations

import signal
from collections.abc import Collection
from types import TracebackType
from typing import Self

import torch

from plait.comm.collectives import all_reduce
from plait.comm.mesh import Mesh
from plait.comm.signal_handling import GracefulStop


class StopSignals:
    """Records whether any rank has received one of `signals`; a context manager that handles the signals."""

    def __init__(self, signals: Collection[int], mesh: Mesh) -> None:
        self._signals = frozenset(signals)
        self._mesh = mesh
        self._local = 0
        self._handlers = GracefulStop(self._signals, self._receive)
        self.received = 0
        """The signal that any rank had received at the last `exchange`, the same on all ranks; 0: none."""

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        # Local ranks start with these signals blocked, until there is a handler.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._handlers.__exit__(kind, error, trace)

    def exchange(self) -> None:
        """Set `received` on all ranks if any rank received a signal; all ranks call it after the same step.

        Communication: an all-reduce of 8 bytes over `world`, unless `signals` is empty.
        """
        if self._signals:
            number = torch.tensor(self._local, device=self._mesh.device)
            largest = all_reduce(number, self._mesh.group("world"), "max", checked=False)
            self.received = int(largest.about("a signal to stop").wait())

    def _receive(self, number: int) -> None:
        self._local = number
