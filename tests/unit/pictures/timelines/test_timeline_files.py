"""Timelines as files; as a Chrome trace, read as Perfetto reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.pictures.timelines.timeline_files import FORMATS, draw_trace, picture, write_pictures
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

COSTS = [Costs(), Costs(1, 1, 1.3, 0.1), Costs(1 / 3, 0.1234567, 0.777777, 0.01), Costs(1e-4, 2e-4, 3e-4)]


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(draw_trace(timeline))["traceEvents"] if event["ph"] == phase]


def nanoseconds(*microseconds: float) -> int:
    """As Perfetto reads times: each by itself, to a nanosecond."""
    return sum(round(time * 1000) for time in microseconds)


def running(actions: Iterable[dict[str, Any]], arrow: dict[str, Any]) -> list[str]:
    """The actions that an end of an arrow may be bound to: those that touch its time on its thread."""
    time = nanoseconds(arrow["ts"])
    return [
        action["name"]
        for action in actions
        if action["tid"] == arrow["tid"]
        and nanoseconds(action["ts"]) <= time <= nanoseconds(action["ts"], action["dur"])
    ]


def test_an_action_of_one_unit_takes_a_millisecond() -> None:
    timeline = simulate(policy_schedule("1f1b", 2, 1), Costs(1, 1, 0.5))
    assert events(timeline, "X") == [
        {
            "ph": "X",
            "pid": 1,
            "tid": tid,
            "name": name,
            "cat": kind,
            "ts": start,
            "dur": duration,
            "args": args,
        }
        for tid, name, kind, start, duration, args in [
            (100, "0F0", "forward", 0, 1000, {"stage": 0, "microbatch": 0}),
            (100, "0B0", "backward", 3500, 1500, {"stage": 0, "microbatch": 0}),
            (101, "1F0", "forward", 1000, 1000, {"stage": 1, "microbatch": 0}),
            (101, "1B0", "backward", 2000, 1500, {"stage": 1, "microbatch": 0}),
        ]
    ]
    assert json.loads(draw_trace(timeline))["otherData"] == {
        "schedule": "1f1b: 2 ranks, 1 micro-batch",
        "time": "1 ms is a unit of the costs",
    }


def test_times_are_rounded_to_a_nanosecond() -> None:
    actions = events(simulate(policy_schedule("gpipe", 1, 2), Costs(2 / 3, 0, 0)), "X")
    assert [(action["ts"], action["dur"]) for action in actions[:2]] == [(0, 666.667), (666.667, 666.666)]


def test_the_pipeline_is_a_process_and_each_rank_a_thread_in_order() -> None:
    named = [
        (event["name"], event["tid"], event["args"])
        for event in events(simulate(policy_schedule("gpipe", 2, 3)), "M")
    ]
    assert named == [
        ("process_name", 100, {"name": "gpipe: 2 ranks, 3 micro-batches"}),
        ("thread_name", 100, {"name": "rank 0"}),
        ("thread_sort_index", 100, {"sort_index": 0}),
        ("thread_name", 101, {"name": "rank 1"}),
        ("thread_sort_index", 101, {"sort_index": 1}),
    ]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_each_arrow_touches_its_two_actions_and_no_other(policy: str, costs: Costs) -> None:
    made = policy_schedule(policy, 3, 6)
    timeline = simulate(made, costs)
    actions = events(timeline, "X")
    ends = {event["id"]: event for event in events(timeline, "f")}
    starts = events(timeline, "s")
    assert {event["id"] for event in starts} == set(ends)
    assert {event["bp"] for event in ends.values()} == {"e"}
    told = set()
    for start in starts:
        assert start["ts"] < ends[start["id"]]["ts"]
        (source,), (taker,) = running(actions, start), running(actions, ends[start["id"]])
        told.add((source, taker))
    assert len(told) == len(starts)
    assert told == {
        (str(source), str(taker))
        for source in (action for row in made.actions for action in row)
        for taker in (action for row in made.actions for action in row)
        if source.kind is not Kind.W
        and source.microbatch == taker.microbatch
        and made.rank_of[source.stage] != made.rank_of[taker.stage]
        and (source.kind is Kind.F) == (taker.kind is Kind.F)
        and taker.source_stage(made.stages) == source.stage
    }


def test_a_stage_behind_on_the_same_rank_needs_no_arrow() -> None:
    rows = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    starts = events(simulate(Schedule("by hand", 1, (0, 1, 1, 0), actions)), "s")
    assert [(event["tid"], event["ts"]) for event in starts] == [
        (100, 499),
        (100, 2999),
        (101, 1499),
        (101, 4999),
    ]


def test_actions_too_short_for_an_arrow_have_none() -> None:
    timeline = simulate(policy_schedule("1f1b", 2, 2), Costs(0, 1, 1))
    assert [event["tid"] for event in events(timeline, "s")] == [101, 101]
    assert events(simulate(policy_schedule("1f1b", 2, 2), Costs(0, 0, 0)), "s") == []


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.floats(1e-6, 10), min_size=4, max_size=4))
def test_rounded_actions_of_a_rank_never_overlap(ranks: int, microbatches: int, times: list[float]) -> None:
    actions = events(simulate(policy_schedule("zb-h1", ranks, microbatches), Costs(*times)), "X")
    assert len(actions) == 3 * ranks * microbatches
    for before, after in pairwise(actions):
        assert before["dur"] >= 0
        if before["tid"] == after["tid"]:
            assert nanoseconds(before["ts"], before["dur"]) <= nanoseconds(after["ts"])


def test_counters_follow_the_memory() -> None:
    counted = events(simulate(policy_schedule("1f1b", 2, 2)), "C")
    assert [(event["name"], event["ts"], event["args"]["micro-batches"]) for event in counted] == [
        ("held by rank 0", 0, 1),
        ("held by rank 0", 1000, 2),
        ("held by rank 0", 6000, 1),
        ("held by rank 0", 9000, 0),
        ("held by rank 1", 1000, 1),
        ("held by rank 1", 7000, 0),
    ]


def test_names_of_counters_sort_as_the_ranks_do() -> None:
    names = list(
        dict.fromkeys(event["name"] for event in events(simulate(policy_schedule("gpipe", 11, 1)), "C"))
    )
    assert names[1:3] == ["held by rank 01", "held by rank 02"]
    assert names == sorted(names)


def test_names_in_a_chrome_trace_are_escaped() -> None:
    made = policy_schedule("gpipe", 1, 1)
    named = Schedule('"\\\n<é>', 1, made.rank_of, made.actions)
    assert events(simulate(named), "M")[0]["args"] == {"name": '"\\\n<é>: 1 rank, 1 micro-batch'}


TIMELINE = simulate(policy_schedule("1f1b", 2, 2))


def test_each_format_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    paths = {kind: tmp_path / "new" / f"a.{kind}" for kind in FORMATS}
    assert list(write_pictures(TIMELINE, paths)) == list(paths.values())
    texts = {kind: path.read_text() for kind, path in paths.items()}
    assert texts == {kind: picture(TIMELINE, kind) for kind in FORMATS}
    assert texts["svg"].startswith("<svg")
    assert "<html" in texts["html"]
    assert len(json.loads(texts["trace"])["traceEvents"]) > 8
    assert texts["csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("kind", ["svg", "html", "trace"])
def test_a_given_name_replaces_the_schedules_in_a_picture(kind: str) -> None:
    assert "a name" in picture(TIMELINE, kind, name="a name")
    assert "1f1b: 2 ranks, 2 micro-batches" in picture(TIMELINE, kind)
    assert "1f1b: 2 ranks, 2 micro-batches" not in picture(TIMELINE, kind, name="a name")


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.x\.svg cannot be written .*: give another file"):
        list(write_pictures(TIMELINE, {"svg": tmp_path / "file" / "x.svg"}))
