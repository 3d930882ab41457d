"""What is recorded is what was run: the schedule's order, and no result is used before it is made."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import plait
from parity import woven
from parity.case import Case
from parity.cases import gpt2
from parity.pairs import in_quick
from plait.engine import Engine
from plait.errors import DataError
from plait.pictures.timelines.timeline import Timeline
from plait.pictures.timelines.timeline_files import FORMATS, picture
from plait.plan.plan import Plan
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.schedule import Schedule

PLANS = {
    "1f1b": Plan(pp=2, microbatches=4),
    "gpipe": Plan(pp=2, schedule="gpipe", microbatches=3),
    "zb-h1": Plan(pp=2, schedule="zb-h1", microbatches=4),
    "zb-v": Plan(pp=2, schedule="zb-v", microbatches=3),
    "overlap": Plan(pp=2, microbatches=3, overlap=True),
    "one stage": Plan(dp=2, microbatches=2, strategy="full", reduce="each"),
    "sharded": Plan(pp=2, dp=2, microbatches=2, strategy="full"),
    "tensors cut": Plan(pp=2, tp=2, microbatches=2),
}


def record(case: Case, plan: Plan) -> tuple[Schedule, Timeline, Costs, tuple[float, ...], bool]:
    """As a rank: the second of two steps, with evaluating in between and behind."""
    engine = woven.weave(case, plan)
    (batch,) = woven.shares(case, engine, 1)
    first = engine.forward_backward(*batch)
    with engine.recording() as recording:
        engine.forward_backward(*batch)
        engine.evaluate(*batch)
        last = engine.forward_backward(*batch)
        engine.evaluate(*batch)
    timeline = recording.timeline()
    engine.forward_backward(*batch)  # outside
    same = recording.timeline() == timeline and torch.equal(first, last)
    return engine.schedule, timeline, recording.costs(), recording.waits(), same


@pytest.fixture(scope="module", params=in_quick(PLANS, "1f1b", "zb-v", "overlap", "sharded"))
def recorded(request: Any, rank_pool: Any) -> tuple[Plan, list[Any]]:
    plan = replace(PLANS[request.param], precision="fp64")
    return plan, rank_pool.run(record, gpt2(layers=4), plan, ranks=plan.world)


def test_all_ranks_of_a_pipeline_have_the_same_recorded_timeline(recorded: tuple[Plan, list[Any]]) -> None:
    plan, results = recorded
    beside = plan.dp * plan.tp
    for place in range(beside):
        mine = results[place::beside]
        assert len(mine) == plan.pp
        assert all(result[1:] == mine[0][1:] for result in mine)
    assert all(result[-1] for result in results), "recording changes no result, and ends"


def test_a_recorded_timeline_has_the_order_of_the_schedule(recorded: tuple[Plan, list[Any]]) -> None:
    """Each `B` as `I` and `W` where its result is sent early, else at once."""
    plan, results = recorded
    for schedule, timeline, *_ in results:
        assert timeline.schedule.split_backward == schedule.split_backward
        for rank, row in enumerate(timeline.schedule.actions):
            for action in row:
                consumer = action.consumer(schedule.stages)
                sent = consumer is not None and schedule.rank_of[consumer.stage] != rank
                if action.kind is Kind.B:
                    assert plan.overlap or not sent
                elif action.kind in (Kind.I, Kind.W):
                    asked = schedule.actions[rank]
                    whole = Action(action.stage, Kind.B, action.microbatch)
                    assert action in asked or (whole in asked and not plan.overlap)


def test_recorded_actions_of_a_rank_do_not_overlap_and_start_after_their_inputs(
    recorded: tuple[Plan, list[Any]],
) -> None:
    _, results = recorded
    for _, timeline, *_ in results:
        ends = {}
        for row in timeline.cells:
            assert all(start < end for _, start, end in row)
            assert all(before.end <= after.start for before, after in pairwise(row))
            for action, _, end in row:
                ends[action.message_key] = end
        assert min(row[0].start for row in timeline.cells) == 0
        for action, start, _ in (cell for row in timeline.cells for cell in row):
            source = action.source_stage(timeline.schedule.stages)
            if source is not None:
                needed = Action(source, Kind.F if action.kind is Kind.F else Kind.I, action.microbatch)
                assert ends[needed] + timeline.hop * _apart(timeline, source, action) <= start


def _apart(timeline: Timeline, stage: int, action: Action) -> bool:
    rank_of = timeline.schedule.rank_of
    return rank_of[stage] != rank_of[action.stage]


def test_recorded_costs_are_the_durations_in_the_timeline(recorded: tuple[Plan, list[Any]]) -> None:
    _, results = recorded
    for schedule, timeline, costs, waits, _ in results:
        assert len(costs.F) == len(costs.I) == len(costs.W) == schedule.stages
        assert min(*costs.F, *costs.I, *costs.W) > 0
        spans = [row[-1].end - row[0].start for row in timeline.cells]
        assert all(0 <= wait <= timeline.makespan for wait in waits)
        assert timeline.span == max(spans) / 1e6 <= timeline.makespan
        simulated = plait.simulate(timeline.schedule, costs)
        assert simulated.schedule.order == timeline.schedule.order
        assert simulated.makespan > 0


def test_a_recorded_timeline_can_be_drawn_in_every_format(recorded: tuple[Plan, list[Any]]) -> None:
    _, results = recorded
    _, timeline, *_ = results[0]
    drawn = {kind: picture(timeline, kind, name="as it was") for kind in FORMATS}
    for row in timeline.schedule.order:
        assert ",".join(row) in drawn["csv"]
    events = json.loads(drawn["trace"])["traceEvents"]
    named = [event["name"] for event in events if event["ph"] == "X"]
    assert sorted(named) == sorted(name for row in timeline.schedule.order for name in row)
    lasted = sum(event["dur"] for event in events if event["ph"] == "X")
    assert lasted == pytest.approx(sum(cell.end - cell.start for row in timeline.cells for cell in row) / 1e3)


def test_a_recording_without_a_training_step_has_no_timeline(rank_pool: Any) -> None:
    def body() -> list[str]:
        engine: Engine = woven.weave(gpt2(), Plan(pp=2, microbatches=2, precision="fp64"))
        (batch,) = woven.shares(gpt2(), engine, 1)
        with engine.recording() as recording:
            engine.evaluate(*batch)
        told = []
        for ask in (recording.timeline, recording.costs, recording.waits):
            with pytest.raises(DataError) as caught:
                ask()
            told.append(str(caught.value))
        return told

    for told in rank_pool.run(body, ranks=2):
        assert all(line.startswith("nothing was recorded: call forward_backward inside") for line in told)


def test_actions_are_ranges_in_a_profile(rank_pool: Any) -> None:
    def body() -> list[str]:
        engine: Engine = woven.weave(gpt2(), Plan(pp=2, microbatches=2, precision="fp64"))
        (batch,) = woven.shares(gpt2(), engine, 1)
        engine.forward_backward(*batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.forward_backward(*batch)
        return [event.name for event in profile.events() or ()]

    first, last = rank_pool.run(body, ranks=2)
    assert {"0F0", "0F1", "0B0", "0B1", "await 0I0", "send 0F1", "finish"} <= set(first)
    assert {"1F0", "1F1", "1I0", "1W0", "1I1", "1W1", "await 1F1", "send 1I0", "finish"} <= set(last)
    assert [first.count("0F0"), *map(last.count, ("1F1", "1I1", "1W1"))] == [1] * 4
