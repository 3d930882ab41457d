from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_cases import any_costs, searched

from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, AlternatingPolicy, BlockPolicy, policy_schedule
from plait.schedules.schedule import Placement, Schedule
from plait.schedules.search.schedule_by_policy import POLICY_NAMES, default_chunks, schedule

IN_TURNS = [name for name, policy in POLICIES.items() if isinstance(policy, AlternatingPolicy)]
IN_PATTERN = {"zb-v": 4, "v-half": 3, "v-min": 2}
"""And how much a rank of four holds at most."""


def test_the_policy_names_are_the_listed_ones() -> None:
    assert POLICY_NAMES == (
        "gpipe",
        "1f1b",
        "interleaved",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "v-half",
        "v-min",
        "auto",
    )
    assert [name for name, policy in POLICIES.items() if isinstance(policy, BlockPolicy)] == [*IN_PATTERN]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_each_policy_has_a_default_number_of_chunks(policy: str) -> None:
    made = schedule(policy, ranks=2, microbatches=2)
    if policy != "auto":
        assert default_chunks(policy, ranks=2, stages=6) == made.stages // 2


def test_auto_takes_the_chunks_that_make_the_given_number_of_stages() -> None:
    assert [default_chunks("auto", ranks=2, stages=stages) for stages in (1, 2, 3, 6)] == [1, 1, 1, 3]
    with pytest.raises(ScheduleError, match="there is no schedule policy '1f1a': did you mean 1f1b"):
        default_chunks("1f1a", ranks=2, stages=2)


@pytest.mark.parametrize("policy", IN_TURNS)
def test_orders_of_policies_without_patterns_do_not_depend_on_costs(policy: str) -> None:
    made = schedule(policy, ranks=3, microbatches=6, costs=Costs(1, 5, 0, comm=3))
    assert made == schedule(policy, ranks=3, microbatches=6) == policy_schedule(policy, 3, 6)
    assert (made.policy, made.bound) == (policy, None)


@pytest.mark.parametrize(
    ("policy", "chunks", "rank_of"),
    [
        ("1f1b", None, (0, 1)),
        ("zb-h1", 1, (0, 1)),
        ("interleaved", None, (0, 1, 0, 1)),
        ("interleaved", 3, (0, 1, 0, 1, 0, 1)),
        ("zb-v", None, (0, 1, 1, 0)),
        ("v-min", 2, (0, 1, 1, 0)),
    ],
)
def test_the_number_of_chunks_decides_the_rank_of_each_stage(
    policy: str, chunks: int | None, rank_of: tuple[int, ...]
) -> None:
    assert schedule(policy, ranks=2, microbatches=4, chunks=chunks).rank_of == rank_of


@pytest.mark.parametrize("policy", IN_PATTERN)
def test_v_patterns_in_unit_costs_have_the_published_memory_and_span(policy: str) -> None:
    timeline = simulate(schedule(policy, ranks=4, microbatches=8))
    assert max(timeline.peak) <= IN_PATTERN[policy]
    # Its authors measure the span; zb-v has no bubble in it.
    assert timeline.span == {"zb-v": 24, "v-half": 26.5, "v-min": 29.5}[policy]


@given(
    st.sampled_from(sorted(IN_PATTERN)),
    st.integers(1, 4).flatmap(lambda ranks: st.tuples(st.just(ranks), any_costs(2 * ranks))),
    st.integers(1, 8),
)
def test_a_pattern_is_legal_within_its_memory_for_any_costs(
    policy: str, case: tuple[int, Costs], microbatches: int
) -> None:
    ranks, costs = case
    made = schedule(policy, ranks=ranks, microbatches=microbatches, costs=costs)
    kind = POLICIES[policy]
    assert isinstance(kind, BlockPolicy)
    check(made, kind.peak(ranks))
    assert (made.policy, made.rank_of) == (policy, Placement.V.rank_of(ranks, 2))
    unsettled = policy_schedule(policy, ranks, microbatches)
    assert simulate(made, costs).span <= simulate(unsettled, costs).span


@pytest.mark.parametrize(
    ("policy", "span", "of_unit_costs"),
    [("zb-v", 26.35, 27), ("v-half", 32.05, 34.9), ("v-min", 31.3, 35.65)],
)
def test_a_pattern_depends_on_costs(policy: str, span: float, of_unit_costs: float) -> None:
    slow = Costs(1, 2, 0.5, comm=0.3)
    timed, other = (schedule(policy, ranks=3, microbatches=6, costs=costs) for costs in (slow, None))
    assert (simulate(timed, slow).span, simulate(other, slow).span) == (span, of_unit_costs)


@pytest.mark.parametrize("limit", [inf, 8, 1e30])
@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "auto"])
def test_a_memory_limit_that_a_policy_keeps_changes_nothing(policy: str, limit: float) -> None:
    assert schedule(policy, ranks=3, microbatches=8, limit=limit) == schedule(policy, ranks=3, microbatches=8)


def refusal(**arguments: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        schedule(**{"policy": "1f1b", "ranks": 2, "microbatches": 4, **arguments})  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("policy", "rest"),
    [
        ("zbv", "did you mean zb-v?"),
        ("1F1B", "did you mean 1f1b?"),
        ("Auto", "did you mean auto?"),
        ("zebra", "choose one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, auto."),
    ],
)
def test_schedule_refuses_an_unknown_policy(policy: str, rest: str) -> None:
    assert refusal(policy=policy) == f"there is no schedule policy {policy!r}: {rest}"


@pytest.mark.parametrize("policy", ["1f1b", "zb-v", "auto"])
def test_schedule_refuses_an_unknown_measure(policy: str) -> None:
    assert refusal(policy=policy, measure="time") == "measure is 'time': choose one of makespan, span."


def test_schedule_refuses_costs_that_are_no_costs_object() -> None:
    told = refusal(costs=1.5)
    assert told == "costs is 1.5: give plait.Costs(F=…, I=…, W=…, comm=…), or None."


def test_refuses_stages_that_go_in_no_loop_and_no_v() -> None:
    told = refusal(policy="auto", rank_of=(0, 0, 1, 1))
    assert told == (
        "rank_of is [0, 0, 1, 1], and auto searches orders for a loop (0, 1, 0, 1) or a V (0, 1, 1, 0) "
        "only: give one of these."
    )


@pytest.mark.parametrize("policy", ["1f1b", "zb-v", "auto"])
@pytest.mark.parametrize("name", ["ranks", "microbatches", "chunks"])
@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_refuses_counts_below_one_and_what_is_no_count(policy: str, name: str, count: object) -> None:
    told = refusal(policy=policy, **{name: count})
    assert told == f"{name} is {count!r}: give a whole number from 1 to 1,000,000."


@pytest.mark.parametrize(
    ("policy", "chunks", "only"), [("1f1b", 2, 1), ("zb-h2", 3, 1), ("zb-v", 1, 2), ("v-min", 4, 2)]
)
def test_refuses_chunks_that_the_policy_cannot_have(policy: str, chunks: int, only: int) -> None:
    told = refusal(policy=policy, chunks=chunks)
    assert told == f"chunks is {chunks}, but {policy} takes {only} only: set it to that."


@pytest.mark.parametrize("policy", ["1f1b", "zb-v", "auto"])
@pytest.mark.parametrize("limit", [-1, -0.5, -inf, nan])
def test_schedule_refuses_a_negative_or_nan_limit(policy: str, limit: float) -> None:
    told = refusal(policy=policy, limit=limit)
    assert told == f"limit is {limit}: give the most that a rank may hold, in micro-batches."


@pytest.mark.parametrize(
    ("policy", "limit", "start"),
    [
        ("gpipe", 3, "rule 'memory limit' is broken on rank 0 by 0F3: with it the rank holds 4, above the"),
        ("1f1b", 1.5, "rule 'memory limit' is broken on rank 0 by 0F1: with it the rank holds 2, above the"),
        ("zb-v", 1, "rule 'memory limit' is broken on rank 0 by"),
    ],
)
def test_refuses_a_limit_that_a_named_policy_does_not_keep(policy: str, limit: float, start: str) -> None:
    assert refusal(policy=policy, limit=limit).startswith(start)


def test_memory_is_counted_as_costs_say() -> None:
    half = Costs(until_I=0.5, until_W=0.5)
    assert isinstance(schedule("gpipe", ranks=2, microbatches=4, limit=2, costs=half), Schedule)
    assert "above the limit of 2" in refusal(policy="gpipe", limit=2)
    assert "above the limit of 2" in refusal(limit=2, costs=Costs(until_W=3))


@pytest.mark.parametrize(("policy", "stages"), [("zb-v", 4), ("auto", 2)])
def test_refuses_costs_for_another_number_of_stages(policy: str, stages: int) -> None:
    told = refusal(policy=policy, costs=Costs([1, 2, 3]))
    assert told.startswith(f"costs.F has 3 values, but the schedule has {stages} stages: ")


def test_auto_minimises_the_measure_that_is_given() -> None:
    by_makespan = searched(4, 8, limit=7, chunks=1, budget=50_000).schedule
    by_span = searched(4, 8, limit=7, chunks=1, measure="span", budget=50_000).schedule
    assert (by_makespan.bound, by_span.bound) == (27, 24)
