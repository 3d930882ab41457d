"""The time of a rank's own work: by kind of action, without waits for others, and without evaluations."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

import plait
from plait.engine.action_times import ActionTimes, ThreadClock
from plait.plan.plan import Plan
from plait.ranks.group import Traffic
from plait.schedules.action import Kind


class Ticks:
    """A clock that each call of `stamp` moves on by a second, of which this rank waits half for a core."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stamps = 0

    def stamp(self) -> float:
        self.stamps += 1
        return self.now

    def seconds(self, start: float, end: float) -> tuple[float, float]:
        return (end - start) / 2, end - start


def wait(traffic: Traffic, clock: Ticks, seconds: float) -> None:
    """What `Handle.wait` does around a wait."""
    before = traffic.stamp() if traffic.stamp else None
    clock.now += seconds
    if traffic.stamp:
        traffic.stamped_waits.append((before, traffic.stamp()))


def test_waits_within_what_is_measured_are_taken_off_and_others_are_not_stamped() -> None:
    traffic, clock = Traffic(), Ticks()
    times = ActionTimes([3], traffic, clock)  # type: ignore[arg-type]

    def update() -> None:
        clock.now += 4.0
        wait(traffic, clock, 10.0)
        wait(traffic, clock, 20.0)

    wait(traffic, clock, 1.0)
    times.measure_optimizer(update)
    wait(traffic, clock, 1.0)
    assert clock.stamps == 2 + 2 * 2
    assert times.keys == tuple((3, kind) for kind in Kind)
    own, elapsed = times.take()()
    assert own == [0.0, 0.0, 0.0, 0.0, 2.0]
    assert elapsed == 0.0  # the optimizer is no action
    assert times.take()() == ([0.0] * 5, 0.0)


def test_a_thread_that_sleeps_takes_time_and_one_that_waits_for_a_core_does_not() -> None:
    clock = ThreadClock()
    start = clock.stamp()
    time.sleep(0.05)
    own, elapsed = clock.seconds(start, clock.stamp())
    assert 0.04 < own <= elapsed
    assert clock.seconds((10, 3), (1_000_000_010, 250_000_003)) == (0.75, 1.0)


def test_clocks_of_two_threads_are_apart() -> None:
    """Each reads the waits of the thread that made it."""
    made: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: made.append(ThreadClock().stamp()))
    thread.start()
    thread.join()
    own = ThreadClock().stamp()
    assert made[0][0] < own[0]


def measured(plan: Plan) -> dict[str, Any]:
    """What takes time in a step, which evaluations surround, and in evaluations alone."""
    mesh = plait.Mesh(plan)
    model = plait.models.gpt2(layers=2, hidden=8, heads=2, vocab=11, context=4)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    tokens = torch.zeros(4, 4, dtype=torch.int64)
    times = engine.time_actions()
    found = []
    for _ in range(2):
        engine.forward_backward(tokens, tokens)
        engine.step(optimizer, 1.0)
        segments, waits = len(times._notes), sum(len(note.waits) for note in times._notes)
        found.append(times.take()())
        engine.evaluate(tokens, tokens)
    engine.evaluate(tokens, tokens)
    evaluated = times.take()()
    keys = [*(f"{stage}{kind}" for stage, kind in times.keys), "optimizer"]
    return {
        "kinds": [key for key, seconds in zip(keys, found[1].own, strict=True) if seconds > 0],
        "sums": found[1].elapsed > 0 and found[1].elapsed >= sum(found[1].own[:-1]) * 0.5,
        "evaluated": evaluated,
        "segments": segments,
        "waits": waits,
    }


def test_actions_of_each_stage_and_the_optimizer_are_measured_and_evaluations_are_not(
    thread_ranks: Any,
) -> None:
    first, last = thread_ranks.run(measured, Plan(pp=2, microbatches=2, schedule="zb-h1"), ranks=2)
    assert first["kinds"] == ["0F", "0I", "0W", "optimizer"]
    assert last["kinds"] == ["1F", "1I", "1W", "optimizer"]
    for one in (first, last):
        assert one["sums"]
        assert one["evaluated"] == ([0.0] * 5, 0.0)


def test_waits_of_collectives_within_actions_are_stamped_and_those_between_are_not(thread_ranks: Any) -> None:
    """Two actions of each micro-batch, and the optimizer's step, are measured on the first stage."""
    alone = thread_ranks.run(measured, Plan(pp=2, microbatches=2), ranks=2)
    assert [one["waits"] for one in alone] == [0, 0]
    assert alone[0]["segments"] == 2 * 2 + 1
    for one in thread_ranks.run(measured, Plan(tp=2, microbatches=2), ranks=2):
        assert one["waits"] >= 2 * 2 * 4  # two micro-batches, two blocks, and in each four sums over tp


def test_an_observer_stays_when_actions_are_timed() -> None:
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=11, context=4)
    engine = plait.parallelize(model, Plan(), plait.Mesh(), loss=plait.cross_entropy)
    seen: list[object] = []
    engine.observe(lambda one, runtime: seen.append(one))
    engine.time_actions()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    engine.forward_backward(tokens, tokens)
    assert seen
