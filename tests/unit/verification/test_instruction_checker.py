"""What is compared and under which place: a recording is damaged in one place, and that place is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from verification_cases import mlp, mlp_case, phases_of, rows_and_classes

from parity.cases import ONE_STAGE, gpt2
from plait.engine.parallelize import parallelize
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy
from plait.verification.candidate.candidate_run import CandidateRun
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.expected_dtypes import NumberFormats
from plait.verification.findings import Findings
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.reference.recording import ReferenceRecording
from plait.verification.reference.reference_run import ReferenceRun
from plait.verification.reference.rounding_errors import Perturbation
from plait.verification.reference.start_values import unchanged
from plait.verification.step_location import WHOLE_STEP, Location, RecordKey, RecordScope, StepPhase

PLAN = Plan(microbatches=2, precision="fp64")
STEPS = 2
DOUBLE = NumberFormats(compute=torch.float64)


def recorded(microbatches: int = PLAN.microbatches) -> ReferenceRecording:
    """Two steps of `mlp`, as they are and shaken once; tensors may be replaced by others."""
    made = recorded_once(microbatches)
    return ReferenceRecording({scope: dict(values) for scope, values in made.values.items()}, made.tolerances)


@cache
def recorded_once(microbatches: int) -> ReferenceRecording:
    recording, device = ReferenceRecording(), torch.device("cpu")
    inputs, targets = rows_and_classes()
    for number in range(2):
        perturbation = Perturbation(number)
        sequence, options = sequence_of(mlp()), VerifyOptions()
        run = ReferenceRun(sequence, cross_entropy, options, unchanged, DOUBLE, device, perturbation, 0.1)
        for scope, values in run.run([(inputs.double(), targets)] * STEPS, microbatches):
            if number:
                recording.widen(scope, values, run.epsilon)
            else:
                recording.add(scope, values)
    return recording


def found(
    recording: ReferenceRecording,
    *,
    plan: Plan = PLAN,
    order: tuple[int, ...] = (0, 1, 2, 3),
    isolate: bool = False,
) -> Findings:
    """Two steps woven over the plan's ranks, with the rows in another order if asked for."""
    mesh = Mesh(plan)
    engine = parallelize(mlp(), plan, mesh, cross_entropy)
    options = VerifyOptions(isolate=isolate)
    comparison = StepComparison(engine, options, recording, sequence_of(mlp()), DOUBLE)
    candidate = CandidateRun(comparison)
    inputs, targets = rows_and_classes()
    for step in range(STEPS):
        candidate.train(step, inputs[list(order)].double(), targets[list(order)])
    mesh.close()
    return comparison.findings


def compared(findings: Findings) -> dict[StepPhase, int]:
    return {phase: tally.compared for phase, tally in findings.tallies.items()}


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_a_right_run_is_equal_and_all_of_it_is_compared(schedule: str) -> None:
    findings = found(recorded(), plan=replace(PLAN, schedule=schedule))
    assert findings.differences == []
    assert compared(findings) == {
        StepPhase.BATCH: STEPS,
        StepPhase.INPUT: STEPS * 2,
        StepPhase.FORWARD: STEPS * 2 * 4,
        StepPhase.LOSS: STEPS * 2,
        StepPhase.LOSS_GRADIENT: STEPS * 2,
        StepPhase.INPUT_GRADIENT: STEPS * 2 * 3,  # of the batch nobody wants a gradient
        StepPhase.WEIGHT_GRADIENT: STEPS * 2 * 6,
        StepPhase.REDUCTION: STEPS * 6,
        StepPhase.MEAN_LOSS: STEPS,
        StepPhase.NORM: 3 + 2,  # by bounds that do not bite, and by one that does
        StepPhase.CLIP: (3 + 2) * 6,
        StepPhase.OPTIMIZER: STEPS * 6 * 4
        + 1,  # value, step, two moments; and what Engine.step is tried with
    }


def damaged(scope: RecordScope, key: RecordKey, microbatches: int = PLAN.microbatches) -> ReferenceRecording:
    """The recording with one tensor that is wrong."""
    recording = recorded(microbatches)
    tensor = recording.values[scope][key].clone()
    tensor.view(-1)[-1] += 1.0
    recording.values[scope][key] = tensor
    return recording


PLACES = [
    (RecordScope(0, 1), RecordKey("output", -1, "0"), Location(0, StepPhase.INPUT, -1, 1)),
    (RecordScope(0, 1), RecordKey("output", 2, "0"), Location(0, StepPhase.FORWARD, 2, 1)),
    (RecordScope(1, 0), RecordKey("output", 0, "0"), Location(1, StepPhase.FORWARD, 0, 0)),
    (RecordScope(0, 1), RecordKey("total"), Location(0, StepPhase.LOSS, None, 1)),
    (RecordScope(0, 1), RecordKey("gradient", 3, "0"), Location(0, StepPhase.LOSS_GRADIENT, 3, 1)),
    (RecordScope(0, 0), RecordKey("gradient", 1, "0"), Location(0, StepPhase.INPUT_GRADIENT, 2, 0)),
    (
        RecordScope(0, 1),
        RecordKey("contribution", 0, "0.weight"),
        Location(0, StepPhase.WEIGHT_GRADIENT, 0, 1, "0.weight"),
    ),
    (
        RecordScope(1, 0),
        RecordKey("contribution", 1, "1.bias"),
        Location(1, StepPhase.WEIGHT_GRADIENT, 1, 0, "1.bias"),
    ),
    (
        RecordScope(0, WHOLE_STEP),
        RecordKey("final", name="3.bias"),
        Location(0, StepPhase.REDUCTION, name="3.bias"),
    ),
    (RecordScope(1, WHOLE_STEP), RecordKey("whole"), Location(1, StepPhase.BATCH)),
    (RecordScope(0, WHOLE_STEP), RecordKey("mean"), Location(0, StepPhase.BATCH)),
    (RecordScope(1, WHOLE_STEP), RecordKey("norm"), Location(1, StepPhase.NORM)),
    (
        RecordScope(0, WHOLE_STEP),
        RecordKey("clipped", name="1.weight"),
        Location(0, StepPhase.CLIP, name="1.weight"),
    ),
    (
        RecordScope(0, WHOLE_STEP),
        RecordKey("value", name="0.bias"),
        Location(0, StepPhase.OPTIMIZER, name="0.bias"),
    ),
    (
        RecordScope(1, WHOLE_STEP),
        RecordKey("state", name="0.bias/exp_avg_sq"),
        Location(1, StepPhase.OPTIMIZER, name="0.bias/exp_avg_sq"),
    ),
]


@pytest.mark.parametrize(
    ("scope", "key", "location", "schedule"),
    [(*place, schedule) for place, schedule in zip(PLACES, cycle(["1f1b", "zb-h1"]))],
)
def test_a_changed_recording_is_found_at_its_place(
    scope: RecordScope, key: RecordKey, location: Location, schedule: str
) -> None:
    findings = found(damaged(scope, key), plan=replace(PLAN, schedule=schedule))
    assert findings.differences[0].location == location
    # The recording is wrong in one place, so that nothing follows from it.
    others = {difference.location.phase for difference in findings.differences[1:]}
    assert others <= {StepPhase.MEAN_LOSS}


def test_micro_batches_in_another_order_are_recognised() -> None:
    findings = found(recorded(), order=(2, 3, 0, 1))
    assert findings.differences[0].location == Location(0, StepPhase.INPUT, -1, 0)
    assert findings.differences[0].hint == "it is that of micro-batch 1"


def test_a_wrong_contribution_says_what_was_added_instead() -> None:
    recording = recorded()
    key = RecordKey("contribution", 3, "3.weight")
    one, two = (recording.values[RecordScope(0, number)] for number in range(2))
    one[key], two[key] = two[key], one[key]
    difference = found(recording).differences[0]
    assert difference.location == Location(0, StepPhase.WEIGHT_GRADIENT, 3, 0, "3.weight")
    assert difference.hint == "what was added is that of micro-batch 1"


def test_a_contribution_missing_or_added_twice_is_named_so() -> None:
    recording = recorded()
    key = RecordKey("contribution", 3, "3.weight")
    recording.values[RecordScope(0, 1)][key] = recording.values[RecordScope(0, 1)][key] * 0.5
    difference = found(recording).differences[0]
    assert difference.location.microbatch == 1
    assert difference.hint == "it was added twice"


def test_with_isolate_one_mistake_makes_one_difference() -> None:
    """A wrong input: everything downstream is that of the reference again."""
    order = (0, 1, 3, 2)
    downstream = {difference.location.phase for difference in found(recorded(), order=order).differences}
    assert {StepPhase.FORWARD, StepPhase.INPUT_GRADIENT} <= downstream
    alone = found(recorded(), order=order, isolate=True)
    places = {difference.location for difference in alone.differences}
    inputs = {Location(step, StepPhase.INPUT, -1, 1) for step in range(STEPS)}
    # The loss is given its targets apart from that, and in the wrong order as well.
    phases = {location.phase for location in places - inputs}
    assert inputs <= places
    assert phases <= {StepPhase.LOSS, StepPhase.LOSS_GRADIENT, StepPhase.MEAN_LOSS}


def found_over(plan: Plan, steps: int = 1) -> dict[StepPhase, int]:
    outcome = verify_rank(mlp_case(steps=steps), plan)
    assert outcome.findings.differences == []
    return compared(outcome.findings)


def test_each_rank_compares_its_own_part(thread_ranks: RankPool) -> None:
    plan = Plan(pp=2, microbatches=2, layers_per_stage=(2, 2))
    first, second = thread_ranks.run(found_over, plan, ranks=2)
    assert first == {
        StepPhase.BATCH: 1,
        StepPhase.INITIAL: 4,
        StepPhase.INPUT: 4,  # two in the step, two in the evaluation
        StepPhase.FORWARD: 8,
        StepPhase.GRADIENT_MESSAGE: 2,
        StepPhase.INPUT_GRADIENT: 2,
        StepPhase.WEIGHT_GRADIENT: 8,
        StepPhase.REDUCTION: 4,
        StepPhase.MEAN_LOSS: 1,
        StepPhase.NORM: 3,
        StepPhase.CLIP: 12,
        StepPhase.OPTIMIZER: 17,
        StepPhase.EVALUATION: 1,
    }
    assert second == {
        StepPhase.INITIAL: 2,
        StepPhase.MESSAGE: 4,
        StepPhase.FORWARD: 8,
        StepPhase.LOSS: 4,
        StepPhase.LOSS_GRADIENT: 2,
        StepPhase.INPUT_GRADIENT: 4,
        StepPhase.WEIGHT_GRADIENT: 4,
        StepPhase.REDUCTION: 2,
        StepPhase.MEAN_LOSS: 1,
        StepPhase.NORM: 3,
        StepPhase.CLIP: 6,
        StepPhase.OPTIMIZER: 9,
        StepPhase.EVALUATION: 1,
    }


WAYS = [
    Plan(dp=2, microbatches=2, precision="fp64", strategy="optimizer"),
    Plan(dp=2, microbatches=2, precision="fp64", strategy="gradients", reduce="each", offload="parameters"),
    Plan(dp=2, microbatches=2, precision="fp64", strategy="full", offload="full", schedule="zb-h1"),
    Plan(dp=2, microbatches=2, precision="fp64", strategy="full", reduce="each", schedule="zb-h1"),
]


def way(plan: Plan) -> str:
    return f"{plan.strategy}-{plan.reduce}-{plan.offload}"


def found_of(plan: Plan) -> Findings:
    """On one of its ranks; the recording is whole on each."""
    return found(recorded(plan.dp * plan.microbatches), plan=plan)


@pytest.mark.parametrize("plan", WAYS, ids=way)
def test_a_rank_compares_its_parts_and_the_whole_weight_gradients(plan: Plan, thread_ranks: RankPool) -> None:
    first, second = thread_ranks.run(found_of, plan, ranks=2)
    assert first.differences == second.differences == []
    assert compared(first) == compared(second) | {StepPhase.BATCH: STEPS}
    gathers = 9 if plan.strategy == "full" else 3  # what two layers in a row use is gathered once
    assert compared(second) == {
        StepPhase.INPUT: STEPS * 2,
        StepPhase.PARAMETERS: STEPS * gathers * 2,
        StepPhase.FORWARD: STEPS * 2 * 4,
        StepPhase.LOSS: STEPS * 2,
        StepPhase.LOSS_GRADIENT: STEPS * 2,
        StepPhase.INPUT_GRADIENT: STEPS * 2 * 3,
        StepPhase.WEIGHT_GRADIENT: STEPS * 2 * 6,
        StepPhase.REDUCTION: STEPS * 6,
        StepPhase.MEAN_LOSS: STEPS,
        StepPhase.NORM: 3 + 2,
        StepPhase.CLIP: (3 + 2) * 6,
        StepPhase.OPTIMIZER: STEPS * 6 * 4 + 1,  # of a part without elements as well
    }


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_weight_gradients_that_come_after_a_scatter_are_no_difference(
    schedule: str, thread_ranks: RankPool
) -> None:
    """With zero bubbles a stage runs `I` of a micro-batch before the one before it is scattered."""
    plan = Plan(
        pp=2,
        dp=2,
        microbatches=2,
        precision="fp64",
        strategy="full",
        reduce="each",
        schedule=schedule,
        layers_per_stage=(2, 2),
    )
    for findings in thread_ranks.run(found_of, plan, ranks=4):
        assert findings.differences == []


@pytest.mark.parametrize("plan", WAYS, ids=way)
def test_gathered_parameters_are_those_that_the_step_before_left(plan: Plan, thread_ranks: RankPool) -> None:
    key = RecordKey("value", name="3.weight")
    for findings in thread_ranks.run(found_in_damaged, RecordScope(0, WHOLE_STEP), key, plan, ranks=2):
        places = {difference.location for difference in findings.differences}
        gathered = Location(1, StepPhase.PARAMETERS, 3, name="3.weight")
        assert gathered in places
        assert places <= {gathered, Location(0, StepPhase.OPTIMIZER, name="3.weight")}


def found_in_damaged(scope: RecordScope, key: RecordKey, plan: Plan, isolate: bool = False) -> Findings:
    return found(damaged(scope, key, plan.dp * plan.microbatches), plan=plan, isolate=isolate)


def test_with_isolate_a_layer_runs_on_the_parameters_that_it_should_have(thread_ranks: RankPool) -> None:
    """The recording is wrong here, and so is then what is computed from it."""
    scope, key = RecordScope(-1), RecordKey("value", name="3.weight")
    for isolate in (False, True):
        for findings in thread_ranks.run(found_in_damaged, scope, key, WAYS[3], isolate, ranks=2):
            places = {one.location for one in findings.differences}
            assert Location(0, StepPhase.PARAMETERS, 3, name="3.weight") in places
            computed = {one.microbatch for one in places if one.phase is StepPhase.FORWARD and not one.step}
            assert bool(computed) is isolate


@pytest.mark.parametrize("plan", WAYS, ids=way)
@pytest.mark.parametrize("microbatch", [0, 1, 3])
def test_a_wrong_weight_gradient_is_found_before_it_is_scattered(
    microbatch: int, plan: Plan, thread_ranks: RankPool
) -> None:
    key, name = RecordKey("contribution", 3, "3.weight"), "3.weight"
    results = thread_ranks.run(found_in_damaged, RecordScope(0, microbatch), key, plan, ranks=2)
    wrong = results.pop(microbatch // 2)
    assert [one.location for one in wrong.differences] == [
        Location(0, StepPhase.WEIGHT_GRADIENT, 3, microbatch, name)
    ]
    assert wrong.differences[0].box == ((4, 5), (7, 8))
    assert results[0].differences == []


@pytest.mark.parametrize("plan", WAYS, ids=way)
def test_the_place_in_a_flat_part_is_that_in_the_global_tensor(plan: Plan, thread_ranks: RankPool) -> None:
    """Of 48 elements in rows of 6 rank 1 has the last 16."""
    key = RecordKey("final", name="0.weight")
    first, second = thread_ranks.run(found_in_damaged, RecordScope(1, WHOLE_STEP), key, plan, ranks=2)
    assert first.differences == []
    (difference,) = second.differences
    assert difference.location == Location(1, StepPhase.REDUCTION, name="0.weight")
    assert (difference.shape, difference.box) == ((1, 16), ((7, 8), (5, 6)))
    assert (difference.worst, difference.share) == ((7, 5), 1 / 16)


def scaled(model: Any, plan: Plan) -> list[tuple[StepPhase, int | None, tuple[tuple[int, int], ...]]]:
    """On tp, after the last row of a part of the head was changed: where that is seen."""
    case = gpt2(layers=1)
    batches = case.batches(2, 1, torch.float64)
    options, mesh = VerifyOptions(steps=1), Mesh(plan)
    engine = parallelize(model, plan, mesh, case.loss, seed=0)
    recording = ReferenceRecording()
    run = ReferenceRun(
        sequence_of(model), case.loss, options, unchanged, DOUBLE, torch.device("cpu"), Perturbation(0), None
    )
    for scope, values in run.run(batches, 1):
        recording.add(scope, values)
        recording.widen(scope, values, run.epsilon)
    comparison = StepComparison(engine, options, recording, sequence_of(model), DOUBLE)
    candidate = CandidateRun(comparison)
    name = "head.output.weight"
    with torch.no_grad():
        dict(engine.named_parameters())[name][-1].mul_(1.5)
    candidate.train(0, *batches[0])
    mesh.close()
    differences = comparison.findings.differences
    return [(d.location.phase, d.location.layer, d.box) for d in differences[:1]]


def test_parts_are_compared_with_parts(thread_ranks: RankPool) -> None:
    """The head's last row of each part: 37 classes over two ranks are 19 and 18."""
    case = gpt2(layers=1, tied=False)
    plan = Plan(tp=2, precision="fp64")
    one, two = thread_ranks.run(scaled, case.build(), plan, ranks=2)
    layers = len(sequence_of(case.build()).layers)
    assert one == [(StepPhase.FORWARD, layers - 1, ((0, 2), (0, 8), (18, 19)))]
    assert two == [(StepPhase.FORWARD, layers - 1, ((0, 2), (0, 8), (36, 37)))]


def test_a_verified_run_has_all_phases_but_loading_messages_and_those_of_experts_and_float8() -> None:
    outcome = verify_rank(mlp_case(steps=1), PLAN)
    absent = {StepPhase.LOAD, StepPhase.PARAMETERS, StepPhase.MESSAGE, StepPhase.GRADIENT_MESSAGE}
    absent |= {StepPhase.ROUTING, StepPhase.RECOMPUTED_ROUTING, StepPhase.EXPERT_LOAD}
    absent |= {StepPhase.SCALES, StepPhase.GRADIENT_SCALES}
    assert phases_of([outcome]) == set(StepPhase) - absent
