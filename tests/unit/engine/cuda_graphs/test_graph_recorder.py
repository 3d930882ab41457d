from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from plait.engine.cuda_graphs.graph_recorder import CudaGraphRecorder

CUDA = torch.device("cuda", 0)


def test_a_cuda_graph_is_recorded_without_waiting_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may be waiting for a message of another rank, which waits for one of this rank's."""
    done: list[str] = []

    class Graph:
        def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
            done.append(f"record in {pool}, errors of this {capture_error_mode}")

        def capture_end(self) -> None:
            done.append("end")

        def replay(self) -> None:
            done.append("replay")

    class Stream:
        def __init__(self, name: object = "") -> None:
            self.name = "own" if name == CUDA else "current"

        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

    def wait(*_: Any) -> None:
        raise AssertionError

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, wait)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    recorder = CudaGraphRecorder(CUDA)
    made = recorder.record(lambda: done.append("compute"), recorder.new_pool())
    assert done == [
        "own waits for current",
        "record in a pool, errors of this thread_local",
        "compute",
        "end",
        "current waits for own",
        "replay",
    ]
    made.replay()
    assert done[-2:] == ["replay", "replay"]
