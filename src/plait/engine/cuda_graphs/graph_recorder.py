"""Records the work of a function on the device, as a CUDA graph, so that it can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from plait.ranks.accelerator import DeviceGraph, GraphStream, graph_pool


class RecordedWork(Protocol):
    """Protocol of recorded work, which uses the same memory each time it is replayed."""

    def replay(self) -> None:
        """Do the recorded work again, on what its memory holds now."""


class GraphRecorder(Protocol):
    """Protocol of a recorder: `CudaGraphRecorder`, or in tests one that repeats torch's operations."""

    def new_pool(self) -> Any:
        """Return a new memory pool: recordings that share one must be replayed in the order of recording."""

    def record(self, compute: Callable[[], None], pool: Any) -> RecordedWork:
        """Record `compute`, whose work is also done once, and return the recording."""


class CudaGraphRecorder:
    """Records CUDA graphs on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = GraphStream(device)

    def new_pool(self) -> Any:
        """Return a new pool of GPU memory, see `GraphRecorder`."""
        return graph_pool()

    def record(self, compute: Callable[[], None], pool: Any) -> DeviceGraph:
        """Record `compute` as a CUDA graph, replay that once, and return it."""
        graph = DeviceGraph(self._stream, pool)
        with graph.recording():
            compute()
        graph.replay()
        return graph
