"""Memory of which every rank of a group on one host has a part, and reaches the parts of all others."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from plait.comm.transport.shared_memory.line import Word
from plait.comm.transport.shared_memory.lines import Lines


class SharedMemory:
    """One part a rank, all of one size, filled with zeros. It takes room as far as it is written to.

    The memory lives as long as one of the ranks has a tensor in it.
    """

    def __init__(self, lines: Lines, nbytes: int) -> None:
        """Make this rank's part and hand it to the others, who do the same. Does not wait."""
        self._lines = lines
        self._nbytes = nbytes
        self._everyone: tuple[Tensor, ...] = ()
        self._ticket = lines.ticket()
        descriptor = os.memfd_create("plait")
        try:
            os.ftruncate(descriptor, nbytes)
            self.own = self._map(descriptor)
            lines.say(self._ticket, nbytes, descriptor)
        finally:
            os.close(descriptor)

    def wait(self) -> None:
        """Wait for the parts of all others. Raises as `Lines.hear`."""
        if not self._everyone:
            words = self._lines.hear(self._ticket, Word(self._nbytes))
            parts = (word.descriptor for word in words)
            self._everyone = tuple(self.own if part is None else self._take(part) for part in parts)
            self._lines.finish(self._ticket)

    def everyone(self) -> tuple[Tensor, ...]:
        """All parts in order of the index, as bytes. Raises as `wait`."""
        self.wait()
        return self._everyone

    def _take(self, descriptor: int) -> Tensor:
        try:
            return self._map(descriptor)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int) -> Tensor:
        # By name, since torch then keeps no descriptor: a mapping of Python's would, one a tensor and rank.
        name = f"/proc/self/fd/{descriptor}"
        return torch.from_file(name, shared=True, size=self._nbytes, dtype=torch.uint8)
