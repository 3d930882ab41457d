"""`likely` says nothing false of a mistake whose cause is known, and names what the numbers show of it."""

import pytest

from zoo.computing import COMPUTING
from zoo.exchanging import EXCHANGING
from zoo.held_out import HELD_OUT
from zoo.reducing import REDUCING
from zoo.row import report_of
from zoo.training import TRAINING

MISTAKES = (*COMPUTING, *TRAINING, *EXCHANGING, *REDUCING, *HELD_OUT)
REPORTED = (
    "query_positions_shifted",
    "query_heads_swapped",
    "rms_epsilon_doubled",
    "scores_divided_by_the_head_size",
    "backward_of_relu_for_gelu",
)
"""Of which it was said that something was bfloat16, or that a region's border at tp 1 was wrong."""


def marks_of(number, mistake):
    return [pytest.mark.full] if number % 7 and mistake.name not in REPORTED else []


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=f"{mistake.name}-{mistake.plan.world}", marks=marks_of(number, mistake))
        for number, mistake in enumerate(MISTAKES)
    ],
)
def test_the_cause_named_for_each_mistake_is_true(rank_pool, mistake):
    report = report_of(rank_pool, mistake.model, mistake.plan, mistake.defect, mistake.options)
    assert report.first is not None, "no difference at all"
    said = report.first.cause
    assert not mistake.false_in(said), f"{mistake.false_in(said)} in: {said}"
    assert mistake.is_named_in(said), said


def test_each_mistake_has_a_name_of_its_own():
    shown = [(mistake.name, mistake.plan, mistake.model) for mistake in MISTAKES]
    assert len({str(one) for one in shown}) == len(shown)
