from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from plait.engine.cuda_graphs.graph_recorder import CudaGraphRecorder

CUDA = torch.device("cuda", 0)


def test_a_cuda_graph_is_recorded_in_its_pool_and_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    signature = inspect.signature(torch.cuda.graph)

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def graph(*arguments: Any, **options: Any) -> Iterator[None]:
        given = signature.bind(*arguments, **options).arguments
        assert isinstance(given["cuda_graph"], Graph)
        done.append(f"record in {given['pool']}, errors of this {given['capture_error_mode']}")
        yield
        done.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    recorder = CudaGraphRecorder(CUDA)
    made = recorder.record(lambda: done.append("compute"), recorder.new_pool())
    assert done == ["record in a pool, errors of this thread_local", "compute", "end", "replay"]
    made.replay()
    assert done[-2:] == ["replay", "replay"]
