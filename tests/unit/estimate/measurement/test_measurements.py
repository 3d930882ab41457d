"""What calibration makes of the times that it measures: with stand-ins for the timer and the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.estimate.measurement import machine_rates as device_rates
from plait.estimate.measurement import machine_rates as link_rates
from plait.estimate.measurement import measured_model_steps, timer
from plait.estimate.measurement.machine_rates import DeviceRates, LinkRates, measure_device, measure_links
from plait.estimate.measurement.measured_model_steps import (
    LARGE,
    MIDDLE,
    PLAN,
    SMALL,
    StepSeconds,
    measure_steps,
    model_step,
)
from plait.estimate.measurement.timer import Timer
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import GridMesh

CPU = torch.device("cpu")


class StandIn:
    """A timer that calls what it is given once, and returns the next of the times that it was given."""

    device = CPU

    def __init__(self, seconds: Iterable[float]) -> None:
        self.seconds, self.results, self.times = iter(seconds), list[Any](), list[int | None]()

    def __call__(
        self, run: Callable[[], Any], *, times: int | None = None, before: Callable[[], Any] = lambda: None
    ) -> float:
        before()
        self.results.append(run())
        self.times.append(times)
        return next(self.seconds)


class Clock:
    """Stands for the module `time`: in each thread a call comes `steps` later than the one before."""

    def __init__(self, *steps: float) -> None:
        self.steps, self.own = steps, threading.local()

    def perf_counter(self) -> float:
        now, number = getattr(self.own, "now", (0.0, 0))
        self.own.now = now + self.steps[number % len(self.steps)], number + 1
        return now


def test_seconds_are_those_of_the_speed_at_which_the_timer_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run takes 2, 3 and 8 seconds, the products take 1, 1 and 4: the median of 2, 3 and 2."""
    calls: list[str] = []
    seconds = iter([9.0, 2.0, 1.0, 3.0, 1.0, 8.0, 4.0])
    monkeypatch.setattr(Timer, "once", lambda _, run: (calls.append(run()), next(seconds))[1])
    monkeypatch.setattr(timer, "_products", lambda: "products")
    found = Timer(CPU, 0.0, unit=10.0)(lambda: "run", times=3, before=lambda: calls.append("before"))
    assert found == 20.0
    assert calls == ["run", *("before", "run", "products") * 3]


@pytest.mark.parametrize(("budget", "calls"), [(0.0, 1 + 3), (7.5, 1 + 4)])
def test_without_a_number_functions_are_called_for_the_budget_and_three_times_at_least(
    monkeypatch: pytest.MonkeyPatch, budget: float, calls: int
) -> None:
    """Each look at the clock is a second later: a call takes two, and one second of its own."""
    counted: list[int] = []
    monkeypatch.setattr(timer, "time", Clock(1.0))
    assert Timer(CPU, budget, unit=None)(lambda: counted.append(1)) == 1.0
    assert len(counted) == calls
    assert Timer(CPU, budget, unit=None).once(lambda: None) == 1.0


def test_a_timer_of_a_cpu_measures_its_products_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "time", Clock(1.0))
    assert Timer.on(CPU, 0.0) == Timer(CPU, 0.0, unit=1.0)
    monkeypatch.setattr(timer, "is_accelerator", lambda device: True)
    assert Timer.on(CPU, 0.5) == Timer(CPU, 0.5, unit=None)


def test_rates_are_operations_and_bytes_over_seconds() -> None:
    """The first side takes too little time; then three precisions, attention, a norm, GELU, sums, AdamW."""
    timed = StandIn([0.01, 0.02, 1.0, 2.0, 4.0, 8.0, 24.0, 0.25, 0.5, 3.0, 16.0])
    products, attention = 2 * 512**3, 2 * 2 * 4 * 512**2 * 64 / 2
    assert measure_device(timed) == DeviceRates(  # type: ignore[arg-type]
        products={"bf16": products / 1, "fp32": products / 2, "fp64": products / 4},
        side=512,
        half_depth=0.0,
        attention=attention / 8,
        attention_backward=2.5 * attention / (24 - 8),
        memory_bandwidth=3 * 4 * 2**23 / 3,
        optimizer=8 * 4 * 32 * (2**17 + 512) / 16,
        elementwise=11 * 4 * 512 * 512 / 0.25,
        activation=5 * 4 * 512 * 2048 / 0.5,
        kernel=0.0,
        launch=0.0,
    )
    sides = [256, 512, 512, 512, 512]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64]
    found = [(one.shape, one.dtype) for one in timed.results[:5]]
    assert found == [((side, side), dtype) for side, dtype in zip(sides, dtypes, strict=True)]
    assert timed.results[5].shape == (1, 4, 512, 64)
    assert timed.times[:3] == [3, 3, None]


def test_the_half_depth_is_where_the_fixed_time_of_a_product_equals_its_sum() -> None:
    for shallow, deep, expected in [
        (1.0, 1.0 + 960 / 64, 0.0),  # as long as its depth says
        (2.0, 2.0 + 960 / 64, 2 * 64 - 64),
        (2.0, 1.0, 2e12 - 64),  # nothing is added by depth
        (0.5, 0.5 + 960 / 64, 0.0),
    ]:
        timed = StandIn([shallow, deep])
        assert device_rates._half_depth("fp32", 8, timed) == pytest.approx(expected)  # type: ignore[arg-type]
        assert [float(one[0, 0]) for one in timed.results] == [64.0, 1024.0]


def test_a_backward_takes_half_of_the_forward_at_least() -> None:
    for both, backward in [(9.0, 5.0), (5.0, 2.0), (4.0, 2.0)]:
        found = device_rates._attention("fp32", StandIn([4.0, both]))  # type: ignore[arg-type]
        assert found == (4.0, backward, 2 * 2 * 4 * 512**2 * 64 / 2)


@pytest.mark.parametrize(
    ("seconds", "latency", "start", "sending", "swapping"),
    [
        # Of a small and a large all-reduce, a gather, a small and a large all-to-all; then what follows:
        # a step, what is left of ten seconds, and the seconds that the bytes of the large ones add.
        ((5.0, 13.0, 2.0, 1.0, 9.0), 3.0, 4.0, 8.0, 8.0),
        ((5.0, 5.25, 6.0, 1.0, 21.0), 0.0, 10.0, 0.525, 20.0),  # a tenth of the large one at least
        ((9.0, 29.0, 2.0, 5.0, 5.0), 7.0, 0.0, 20.0, 0.5),
    ],
)
def test_link_latency_bandwidth_and_start_are_measured(
    thread_ranks: RankPool,
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, ...],
    latency: float,
    start: float,
    sending: float,
    swapping: float,
) -> None:
    monkeypatch.setattr(link_rates, "_PRODUCTS", 2)
    monkeypatch.setattr(link_rates, "_REPEATS", 3)
    # With all-reduces 2 · 11 seconds, and without 2 · 1, between the two looks at the clock.
    monkeypatch.setattr(link_rates, "time", Clock(22.0, 100.0, 2.0, 100.0))

    def measure() -> tuple[LinkRates | None, list[int | None], list[int]]:
        timed = StandIn(seconds)
        found = measure_links(GridMesh(hosts=1, local=2, device="cpu").group("local"), timed)  # type: ignore[arg-type]
        return found, timed.times, [one.numel() for one in timed.results]

    sent = 4 * 2**22 / 2  # a rank sends half of it, in an all-reduce twice
    rates = LinkRates(latency, 2 * sent / sending, start, min(sending / swapping / 2, 1.0))
    counts, sizes = [60, 3, 60, 60, 3], [512, 2**22, 512, 512, 2**22]
    assert thread_ranks.run(measure, ranks=2) == [(rates, counts, sizes)] * 2


def test_one_rank_has_no_links() -> None:
    assert measure_links(SimpleNamespace(size=1), StandIn([])) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "divides", "cores", "divided", "pipelined"),
    [
        (2, True, 1, True, True),
        (2, True, 2, True, False),  # each rank has a core of its own
        (2, False, 1, False, False),
        (1, True, 1, False, False),
        (3, True, 2, False, True),  # ranks that do not divide the heads
        (6, True, 4, False, True),
        (8, True, 4, True, False),  # more ranks than layers
    ],
)
def test_models_are_divided_and_piped_over_the_ranks_where_they_can_be(
    monkeypatch: pytest.MonkeyPatch, size: int, divides: bool, cores: int, divided: bool, pipelined: bool
) -> None:
    monkeypatch.setattr(measured_model_steps.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(
        measured_model_steps, "model_step", lambda sizes, group, plan=PLAN: lambda: (sizes, plan)
    )
    steps = [
        *([(MIDDLE, replace(PLAN, tp=size), 25)] if divided else []),
        *(
            (SMALL, PLAN, 50),
            (MIDDLE, PLAN, 25),
            (LARGE, PLAN, 12),
            (MIDDLE, replace(PLAN, recompute="full"), 25),
        ),
        *([(LARGE, replace(PLAN, pp=size, schedule="gpipe"), 12)] if pipelined else []),
    ]
    timed = StandIn(range(1, len(steps) + 1))
    found = measure_steps(SimpleNamespace(size=size), timed, divides=divides)  # type: ignore[arg-type]
    assert [(*one, times) for one, times in zip(timed.results, timed.times, strict=True)] == steps
    first = 1 if divided else 0
    alone = (first + 1, first + 2, first + 3, first + 4)
    assert found == StepSeconds(*alone, 1 if divided else None, first + 5 if pipelined else None)


def test_a_step_of_a_model_runs_forward_and_backward_on_each_rank_or_over_all(thread_ranks: RankPool) -> None:
    tiny = replace(SMALL, layers=1, hidden=8, vocab=16, context=4)

    def run() -> None:
        group = GridMesh(hosts=1, local=2, device="cpu").group("local")
        for plan in (PLAN, replace(PLAN, tp=2)):
            model_step(tiny, group, plan)()

    thread_ranks.run(run, ranks=2)
