"""What torch is asked about a GPU, with stand-ins: events, copies, memory, random numbers; its settings."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from plait.ranks import accelerator
from plait.ranks.accelerator import CPU, StreamEvent

CUDA = torch.device("cuda", 0)


class Recorded:
    """Stands in for an event of torch."""

    def __init__(self, enable_timing: bool) -> None:
        self.enable_timing, self.calls = enable_timing, list[Any]()

    def record(self, stream: object) -> None:
        self.calls.append(("record", stream))

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def query(self) -> bool:
        return len(self.calls) > 1

    def elapsed_time(self, other: Any) -> float:
        return 2.5 if other.enable_timing and self.enable_timing else -1.0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What functions of `torch.cuda` are asked, which here do nothing."""
    found: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: found.append("synchronize stream"))
    for name, result in (
        ("synchronize", None),
        ("set_device", None),
        ("current_stream", stream),
        ("device", nullcontext()),
        ("get_device_name", "H100"),
        ("get_device_properties", SimpleNamespace(total_memory=80, multi_processor_count=132)),
        ("set_per_process_memory_fraction", None),
    ):
        monkeypatch.setattr(
            torch.cuda, name, lambda *given, name=name, result=result: found.append((name, *given)) or result
        )
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    return found


def test_each_device_function_calls_its_torch_cuda_function_for_the_given_gpu(calls: list[Any]) -> None:
    for ask in (
        accelerator.synchronize,
        accelerator.synchronize_stream,
        accelerator.make_current,
    ):
        ask(CUDA)
    assert (accelerator.name_of(CUDA), accelerator.total_memory(CUDA)) == ("H100", 80)
    assert (accelerator.multiprocessors(CUDA), accelerator.multiprocessors(CPU)) == (132, 0)
    accelerator.limit_memory(CUDA, 2, besides=10)
    accelerator.limit_memory(CUDA, 4, besides=30)
    assert calls == [
        ("synchronize", CUDA),
        ("current_stream", CUDA),
        "synchronize stream",
        ("set_device", CUDA),
        ("get_device_name", CUDA),
        *[("get_device_properties", CUDA)] * 3,
        ("set_per_process_memory_fraction", 30 / 80, CUDA),
        ("get_device_properties", CUDA),
        ("set_per_process_memory_fraction", 0.0, CUDA),
    ]


def test_an_event_is_of_the_stream_that_is_current(calls: list[Any]) -> None:
    event = StreamEvent(CUDA, timed=True)
    stream = torch.cuda.current_stream()
    assert event.event is not None
    assert event.event.calls == [("record", stream)]
    assert not event.is_done()
    event.wait()
    assert calls[-1] == ("device", CUDA), "a new thread is on device 0"
    assert event.event.calls[1:] == ["synchronize"]
    assert event.is_done()
    assert event.milliseconds_since(StreamEvent(CUDA, timed=True)) == 2.5
    assert not StreamEvent(CUDA).event.enable_timing
    early, late = StreamEvent(CPU), StreamEvent(CPU)
    early.seconds, late.seconds = 3.0, 3.25
    assert late.is_done()
    assert late.milliseconds_since(early) == 250.0


def test_copies_to_and_from_a_gpu_go_by_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, there = torch.arange(3.0), Mock()
    monkeypatch.setattr(
        accelerator, "is_accelerator", lambda where: any(where is one for one in (CUDA, on_gpu, there))
    )
    tensor = Mock()
    assert accelerator.sent(tensor, CUDA, torch.float64) is tensor.to().pin_memory().to()
    assert tensor.mock_calls[:3] == [
        call.to(dtype=torch.float64),
        call.to().pin_memory(),
        call.to().pin_memory().to(CUDA, non_blocking=True),
    ]
    other = Mock()
    accelerator.sent(other, CPU, torch.float64)
    accelerator.moved_later(other, CUDA, copy=True)
    assert other.mock_calls == [call.to(CPU, torch.float64), call.to(CUDA, copy=True, non_blocking=True)]
    accelerator.sent(there, CUDA)
    assert there.mock_calls == [call.to(CUDA, None)]
    like, zeros, asked, waits = torch.empty_like, torch.zeros, list[Any](), list[Any]()

    def make(made: Any) -> Any:
        def function(*given: Any, **options: Any) -> torch.Tensor:
            asked.append(options)
            return made(*given, **{key: value for key, value in options.items() if key != "pin_memory"})

        return function

    monkeypatch.setattr(torch, "empty_like", make(like))
    monkeypatch.setattr(torch, "zeros", make(zeros))
    monkeypatch.setattr(accelerator, "StreamEvent", lambda where: Mock(wait=lambda: waits.append(where)))
    read = accelerator.read_later(on_gpu)
    assert (asked, waits) == ([{"device": CPU, "pin_memory": True}], [])
    assert torch.equal(read(), on_gpu)
    assert waits == [on_gpu.device]
    assert read() is not on_gpu
    assert accelerator.read_later(like(on_gpu))() is not on_gpu
    accelerator.host_zeros(4, torch.float16, beside=CUDA)
    assert asked[1:] == [{"dtype": torch.float16, "pin_memory": True}]
    unpinned = accelerator.host_bytes(5, pinned=False)
    assert (unpinned.shape, unpinned.dtype) == ((5,), torch.uint8)
    assert not unpinned.is_pinned()


def test_waiting_for_queued_work_ends_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    never, asked = Event(), list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", never.wait)
    assert accelerator.finish_queued_work(0.0), "nothing has been queued"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not accelerator.finish_queued_work(0.01)
    never.set()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    assert accelerator.finish_queued_work(60.0)
    assert asked == ["synchronize"]


def test_the_random_state_of_a_gpu_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = accelerator.random_state()
    assert before[1] is None
    with accelerator.keep_random_state(CPU):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)
    accelerator.set_random_state(before)
    assert torch.equal(torch.rand(3), first)
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "of the GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert accelerator.random_state()[1] is None  # it is the graph's
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    accelerator.set_random_state(accelerator.random_state())
    assert given == ["of the GPU"]
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: given.append(devices))
    accelerator.keep_random_state(CUDA)
    accelerator.keep_random_state(CPU)
    assert given[1:] == [[CUDA], []]


SETTINGS: list[tuple[str, Any, Any]] = [
    ("torch.get_default_dtype()", torch.set_default_dtype, (torch.float64, torch.float32)),
    ("torch.are_deterministic_algorithms_enabled()", torch.use_deterministic_algorithms, (True, False)),
    (
        "torch.backends.mkldnn.enabled",
        lambda value: setattr(torch.backends.mkldnn, "enabled", value),
        (False, True),
    ),
    *(
        (
            "torch.backends.cudnn, enabled, benchmark, deterministic",
            partial(setattr, torch.backends.cudnn, name),
            values,
        )
        for name, values in {
            "enabled": (False, True),
            "benchmark": (True, False),
            "deterministic": (True, False),
        }.items()
    ),
    *(
        (
            "torch.backends.cuda.matmul, reduced precision in fp16, bf16",
            partial(setattr, torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction"),
            (False, True),
        )
        for name in ("fp16", "bf16")
    ),
    *(
        (
            "scaled dot product attention, flash, efficient, math, cudnn",
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
            (False, True),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
    (
        "fp32_precision of matmul in torch.backends.cuda, mkldnn",
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
        ("tf32", "ieee"),
    ),
]


def test_each_torch_setting_that_changes_results_is_listed_by_name() -> None:
    before = accelerator.computation_settings()
    seen = [before]
    for name, change, (value, usual) in SETTINGS:
        try:
            change(value)
            changed = accelerator.computation_settings()
        finally:
            change(usual)
        assert [key for key in before if changed[key] != before[key]] == [name]
        assert changed not in seen, "each option of a name has a place of its own"
        seen.append(changed)
        assert accelerator.computation_settings() == before
