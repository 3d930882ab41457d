"""With `isolate` each difference has a cause of its own."""

from contextlib import ExitStack, contextmanager

import pytest

from plait.verification.options import VerifyOptions
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.context import RING, labels_shifted_after_the_cut, weight_gradient_of_the_second_part_twice
from zoo.forward import message_of_another_microbatch, other_epsilon
from zoo.row import ONE_STEP, report_of
from zoo.updates import clipped_twice
from zoo.weights import work_of_one_layer_left_out

ISOLATED = VerifyOptions(steps=1, perturbations=1, isolate=True)


def together(*defects):
    @contextmanager
    def entered():
        with ExitStack() as stack:
            for defect in defects:
                stack.enter_context(defect())
            yield

    return entered


def places_of(report):
    """Of a step: in the evaluation after it a mistake shows once more."""
    every = [difference.location for difference in (report.first.difference, *report.others)]
    return [location for location in every if not location.evaluating]


def test_with_isolate_two_mistakes_are_both_listed(rank_pool):
    defect = together(message_of_another_microbatch, work_of_one_layer_left_out)
    report = report_of(rank_pool, cases.LLAMA, cases.TWO_STAGES, defect, ISOLATED)
    phases = {location.phase for location in places_of(report)}
    assert {StepPhase.MESSAGE, StepPhase.WEIGHT_GRADIENT} == phases
    assert {report.path_of(location) for location in places_of(report)} == {cases.ATTENTION}
    said = " ".join(str(report).split())
    assert "forward message, micro-batch 1: layer 1, blocks.0.attention" in said
    assert "also the weight gradient of blocks.0.attention.key.weight in blocks.0.attention" in said


def test_a_mistake_behind_another_is_listed(rank_pool):
    defect = together(other_epsilon, clipped_twice)
    report = report_of(rank_pool, cases.LLAMA, cases.TWO_STAGES, defect, ISOLATED)
    assert report.first.layer == cases.MLP
    assert {report.path_of(one) for one in places_of(report) if one.layer is not None} == {cases.MLP}
    assert {location.phase for location in places_of(report) if location.layer is None} == {StepPhase.CLIP}


@pytest.mark.full
def test_a_mistake_of_a_layer_makes_differences_in_that_layer_only(rank_pool):
    report = report_of(rank_pool, cases.LLAMA, cases.TWO_STAGES, other_epsilon, ISOLATED)
    assert {report.path_of(location) for location in places_of(report)} == {cases.MLP}
    together = report_of(rank_pool, cases.LLAMA, cases.TWO_STAGES, other_epsilon, ONE_STEP)
    assert len({together.path_of(location) for location in places_of(together)}) > 1


@pytest.mark.full
def test_a_wrong_message_makes_one_difference_for_each(rank_pool):
    report = report_of(rank_pool, cases.GPT2, cases.TWO_STAGES, message_of_another_microbatch, ISOLATED)
    assert [(location.phase, location.microbatch) for location in places_of(report)] == [
        (StepPhase.MESSAGE, 1)
    ]


def test_mistakes_in_parts_of_a_sequence_are_listed_at_their_places(rank_pool):
    """A gradient that is a sum over the ranks of cp is replaced on one of them, and is 0 on the others."""
    defect = together(labels_shifted_after_the_cut, weight_gradient_of_the_second_part_twice)
    report = report_of(rank_pool, cases.UNTIED, RING, defect, ISOLATED)
    assert {(location.phase, location.name, location.microbatch) for location in places_of(report)} == {
        *((StepPhase.LOSS, "", microbatch) for microbatch in range(2)),
        *((StepPhase.LOSS_GRADIENT, "", microbatch) for microbatch in range(2)),
        *((StepPhase.WEIGHT_GRADIENT, "head.output.weight", microbatch) for microbatch in range(2)),
    }
