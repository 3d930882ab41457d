"""Shared memory in segments: each rank of a group on one host makes one and maps those of all others."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from plait.comm.transport.shared_memory.channel import Message
from plait.comm.transport.shared_memory.channels import Channels


class SharedSegments:
    """One segment a rank, all of one size, filled with zeros. Pages take memory once they are written to.

    The memory lives as long as one of the ranks has a tensor in it.
    """

    def __init__(self, channels: Channels, nbytes: int) -> None:
        """Make this rank's segment and send its descriptor to the others, without blocking."""
        self._channels = channels
        self._nbytes = nbytes
        self._segments: tuple[Tensor, ...] = ()
        self._sequence = channels.next_sequence()
        descriptor = os.memfd_create("plait")
        try:
            os.ftruncate(descriptor, nbytes)
            self.own = self._map(descriptor)
            channels.send(self._sequence, nbytes, descriptor)
        finally:
            os.close(descriptor)

    def wait(self) -> None:
        """Block until the segments of all others are mapped. Raises as `Channels.receive`."""
        if not self._segments:
            messages = self._channels.receive(self._sequence, Message(self._nbytes))
            descriptors = (message.descriptor for message in messages)
            self._segments = tuple(
                self.own if one is None else self._map_and_close(one) for one in descriptors
            )
            self._channels.acknowledge(self._sequence)

    def all_segments(self) -> tuple[Tensor, ...]:
        """Return the segments of all ranks in order of the index, as bytes. Blocks and raises as `wait`."""
        self.wait()
        return self._segments

    def _map_and_close(self, descriptor: int) -> Tensor:
        try:
            return self._map(descriptor)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int) -> Tensor:
        # By name, since torch then keeps no descriptor: a mapping of Python's would, one a tensor and rank.
        name = f"/proc/self/fd/{descriptor}"
        return torch.from_file(name, shared=True, size=self._nbytes, dtype=torch.uint8)
