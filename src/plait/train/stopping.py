"""Stopping between two steps: a first signal is a wish, a second one ends the process at once."""

from __future__ import annotations

import signal
from collections.abc import Collection
from types import TracebackType
from typing import Self

import torch

from plait.comm.collectives import all_reduce
from plait.comm.mesh import Mesh
from plait.comm.watchdog import Wish


class Stop:
    """Whether any rank was asked to stop; a context manager, in which `signals` are wishes."""

    def __init__(self, signals: Collection[int], mesh: Mesh) -> None:
        self._signals = frozenset(signals)
        self._mesh = mesh
        self._heard = 0
        self._wish = Wish(self._signals, self._hear)
        self.number = 0
        """The signal that a rank had got when they last asked; 0: none had. The same on all ranks."""

    def __enter__(self) -> Self:
        self._wish.__enter__()
        # Local ranks block theirs until somebody can hear it.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._wish.__exit__(kind, error, trace)

    def ask(self) -> None:
        """Has any rank got a signal? All ranks ask, after the same step.

        Communication: an all-reduce of 8 bytes over `world`, where there are signals to be heard.
        """
        if self._signals:
            heard = torch.tensor(self._heard, device=self._mesh.device)
            everyone = all_reduce(heard, self._mesh.group("world"), "max", checked=False)
            self.number = int(everyone.about("a wish to stop").wait())

    def _hear(self, number: int) -> None:
        self._heard = number
