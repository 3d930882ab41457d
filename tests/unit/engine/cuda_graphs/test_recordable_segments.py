from __future__ import annotations

from typing import Any

import pytest

from plait.engine.cuda_graphs.recordable_segments import places_of
from plait.plan.parameter_units import UnitTiming
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import LayerIndex, LoweringSpec, segments_of
from plait.schedules.named_schedules import forward_only
from plait.schedules.search.schedule_by_policy import schedule


def placed(rank: int, policy: str, spec: LoweringSpec, **options: Any) -> list[tuple[Any, ...]]:
    """The name of each computing segment of a rank's program, its number, and whether its result leaves."""
    program = lower(schedule(policy, **options), spec)[rank]
    return [
        (one.name, one.number, one.leaves_stage, one.is_last)
        for one in places_of(segments_of(program))
        if one is not None
    ]


def test_segments_are_numbered_from_their_micro_batchs_first_to_its_last_at_a_stage() -> None:
    spec = LoweringSpec((2, 2), {})
    first = placed(0, "1f1b", spec, ranks=2, microbatches=2)
    assert first == [
        ("0F0", 0, True, False),
        ("0F1", 0, True, False),
        ("0B0", 1, True, True),
        ("0B1", 1, True, True),
    ]
    last = placed(1, "1f1b", spec, ranks=2, microbatches=1)
    assert last == [
        ("1F0", 0, True, False),  # with the loss
        ("seed 1I0", 1, False, False),
        ("1I0", 2, True, False),  # is sent before the weight gradients
        ("1W0", 3, False, True),
    ]


def test_gathers_cut_segments_of_which_the_last_of_a_kind_hands_on() -> None:
    units = {name: (LayerIndex(0, number),) for number, name in enumerate("ab")}
    timing = UnitTiming(gathers="each use", scatters="last", allocates=True)
    spec = LoweringSpec((2,), units, timings=dict.fromkeys(units, timing))
    rows = placed(0, "1f1b", spec, ranks=1, microbatches=1)
    assert [(name, leaves_stage) for name, _, leaves_stage, _ in rows] == [
        ("0F0", False),
        ("0F0", True),
        ("seed 0I0", False),
        ("0B0", False),
        ("0B0", True),
    ]


def test_micro_batches_that_run_alike_have_equal_parts() -> None:
    program = lower(schedule("zb-h1", ranks=2, microbatches=3), LoweringSpec((1, 1), {}))[1]
    parts = {one.microbatch: one.parts for one in places_of(segments_of(program)) if one is not None}
    assert parts[0] == parts[1] == parts[2]


@pytest.mark.parametrize("ending", ["loss", "output"])
def test_a_program_without_a_backward_has_no_places(ending: Any) -> None:
    program = lower(forward_only((0,), ranks=1, microbatches=2), LoweringSpec((1,), {}), ending)[0]
    assert places_of(segments_of(program)) == [None] * len(segments_of(program))
