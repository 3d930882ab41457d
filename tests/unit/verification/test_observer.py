"""What is compared and under which place: a recording is damaged in one place, and that place is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from verification_cases import mlp, mlp_case, phases_of, rows_and_classes

from parity.cases import ONE_STAGE, gpt2
from plait.comm.mesh import Mesh
from plait.comm.pool import RankPool
from plait.composer import parallelize
from plait.layers.layer_sequence import sequence_of
from plait.plan import Plan
from plait.tensor.losses import cross_entropy
from plait.verification.difference import Findings
from plait.verification.formats import Formats
from plait.verification.noise import Noise
from plait.verification.place import WHOLE, Key, Moment, Phase, Place
from plait.verification.rank import run_rank
from plait.verification.recipe import Recipe
from plait.verification.recording import Recording
from plait.verification.reference import Reference
from plait.verification.values import unchanged
from plait.verification.woven import Woven

PLAN = Plan(microbatches=2, precision="fp64")
STEPS = 2
DOUBLE = Formats(compute=torch.float64)


def recorded(microbatches: int = PLAN.microbatches) -> Recording:
    """Two steps of `mlp`, as they are and shaken once."""
    recording, device = Recording(), torch.device("cpu")
    inputs, targets = rows_and_classes()
    for number in range(2):
        noise = Noise(number)
        sequence, recipe = sequence_of(mlp()), Recipe()
        run = Reference(sequence, cross_entropy, recipe, unchanged, DOUBLE, device, noise, 0.1)
        for moment, values in run.run([(inputs.double(), targets)] * STEPS, microbatches):
            if number:
                recording.widen(moment, values, run.epsilon)
            else:
                recording.add(moment, values)
    return recording


def found(
    recording: Recording, *, plan: Plan = PLAN, order: tuple[int, ...] = (0, 1, 2, 3), isolate: bool = False
) -> Findings:
    """Two steps woven over the plan's ranks, with the rows in another order if asked for."""
    mesh = Mesh(plan)
    engine = parallelize(mlp(), plan, mesh, cross_entropy)
    woven = Woven(engine, Recipe(isolate=isolate), recording, sequence_of(mlp()), DOUBLE)
    inputs, targets = rows_and_classes()
    for step in range(STEPS):
        woven.train(step, inputs[list(order)].double(), targets[list(order)])
    mesh.close()
    return woven.findings


def compared(findings: Findings) -> dict[Phase, int]:
    return {phase: tally.compared for phase, tally in findings.tallies.items()}


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_a_right_run_is_equal_and_all_of_it_is_compared(schedule: str) -> None:
    findings = found(recorded(), plan=replace(PLAN, schedule=schedule))
    assert findings.differences == []
    assert compared(findings) == {
        Phase.BATCH: STEPS,
        Phase.INPUT: STEPS * 2,
        Phase.FORWARD: STEPS * 2 * 4,
        Phase.LOSS: STEPS * 2,
        Phase.LOSS_GRADIENT: STEPS * 2,
        Phase.INPUT_GRADIENT: STEPS * 2 * 3,  # of the batch nobody wants a gradient
        Phase.WEIGHT_GRADIENT: STEPS * 2 * 6,
        Phase.REDUCTION: STEPS * 6,
        Phase.MEAN_LOSS: STEPS,
        Phase.NORM: 3 + 2,  # by bounds that do not bite, and by one that does
        Phase.CLIP: (3 + 2) * 6,
        Phase.OPTIMIZER: STEPS * 6 * 4 + 1,  # value, step, two moments; and what Engine.step is tried with
    }


def damaged(moment: Moment, key: Key, microbatches: int = PLAN.microbatches) -> Recording:
    """The recording with one tensor that is wrong."""
    recording = recorded(microbatches)
    tensor = recording.values[moment][key].clone()
    tensor.view(-1)[-1] += 1.0
    recording.values[moment][key] = tensor
    return recording


PLACES = [
    (Moment(0, 1), Key("output", -1, "0"), Place(0, Phase.INPUT, -1, 1)),
    (Moment(0, 1), Key("output", 2, "0"), Place(0, Phase.FORWARD, 2, 1)),
    (Moment(1, 0), Key("output", 0, "0"), Place(1, Phase.FORWARD, 0, 0)),
    (Moment(0, 1), Key("total"), Place(0, Phase.LOSS, None, 1)),
    (Moment(0, 1), Key("gradient", 3, "0"), Place(0, Phase.LOSS_GRADIENT, 3, 1)),
    (Moment(0, 0), Key("gradient", 1, "0"), Place(0, Phase.INPUT_GRADIENT, 2, 0)),
    (Moment(0, 1), Key("contribution", 0, "0.weight"), Place(0, Phase.WEIGHT_GRADIENT, 0, 1, "0.weight")),
    (Moment(1, 0), Key("contribution", 1, "1.bias"), Place(1, Phase.WEIGHT_GRADIENT, 1, 0, "1.bias")),
    (Moment(0, WHOLE), Key("final", name="3.bias"), Place(0, Phase.REDUCTION, name="3.bias")),
    (Moment(1, WHOLE), Key("whole"), Place(1, Phase.BATCH)),
    (Moment(0, WHOLE), Key("mean"), Place(0, Phase.BATCH)),
    (Moment(1, WHOLE), Key("norm"), Place(1, Phase.NORM)),
    (Moment(0, WHOLE), Key("clipped", name="1.weight"), Place(0, Phase.CLIP, name="1.weight")),
    (Moment(0, WHOLE), Key("value", name="0.bias"), Place(0, Phase.OPTIMIZER, name="0.bias")),
    (
        Moment(1, WHOLE),
        Key("state", name="0.bias/exp_avg_sq"),
        Place(1, Phase.OPTIMIZER, name="0.bias/exp_avg_sq"),
    ),
]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("moment", "key", "place"), PLACES)
def test_the_place_is_found(moment: Moment, key: Key, place: Place, schedule: str) -> None:
    findings = found(damaged(moment, key), plan=replace(PLAN, schedule=schedule))
    assert findings.differences[0].place == place
    # The recording is wrong in one place, so that nothing follows from it.
    others = {difference.place.phase for difference in findings.differences[1:]}
    assert others <= {Phase.MEAN_LOSS}


def test_micro_batches_in_another_order_are_recognised() -> None:
    findings = found(recorded(), order=(2, 3, 0, 1))
    assert findings.differences[0].place == Place(0, Phase.INPUT, -1, 0)
    assert findings.differences[0].hint == "it is that of micro-batch 1"


def test_a_wrong_contribution_says_what_was_added_instead() -> None:
    recording = recorded()
    key = Key("contribution", 3, "3.weight")
    one, two = (recording.values[Moment(0, number)] for number in range(2))
    one[key], two[key] = two[key], one[key]
    difference = found(recording).differences[0]
    assert difference.place == Place(0, Phase.WEIGHT_GRADIENT, 3, 0, "3.weight")
    assert difference.hint == "what was added is that of micro-batch 1"


def test_a_contribution_that_is_left_out_says_so() -> None:
    recording = recorded()
    key = Key("contribution", 3, "3.weight")
    recording.values[Moment(0, 1)][key] = recording.values[Moment(0, 1)][key] * 0.5
    difference = found(recording).differences[0]
    assert difference.place.microbatch == 1
    assert difference.hint == "it was added twice"


def test_with_isolate_one_mistake_makes_one_difference() -> None:
    """A wrong input: everything downstream is that of the reference again."""
    order = (0, 1, 3, 2)
    downstream = {difference.place.phase for difference in found(recorded(), order=order).differences}
    assert {Phase.FORWARD, Phase.INPUT_GRADIENT} <= downstream
    alone = found(recorded(), order=order, isolate=True)
    places = {difference.place for difference in alone.differences}
    inputs = {Place(step, Phase.INPUT, -1, 1) for step in range(STEPS)}
    # The loss is given its targets apart from that, and in the wrong order as well.
    phases = {place.phase for place in places - inputs}
    assert inputs <= places
    assert phases <= {Phase.LOSS, Phase.LOSS_GRADIENT, Phase.MEAN_LOSS}


def found_over(plan: Plan, steps: int = 1) -> dict[Phase, int]:
    outcome = run_rank(mlp_case(steps=steps), plan)
    assert outcome.findings.differences == []
    return compared(outcome.findings)


def test_each_rank_compares_its_own_part(rank_pool: RankPool) -> None:
    plan = Plan(pp=2, microbatches=2, layers_per_stage=(2, 2))
    first, second = rank_pool.run(found_over, plan, ranks=2)
    assert first == {
        Phase.BATCH: 1,
        Phase.INITIAL: 4,
        Phase.INPUT: 2,
        Phase.FORWARD: 4,
        Phase.GRADIENT_MESSAGE: 2,
        Phase.INPUT_GRADIENT: 2,
        Phase.WEIGHT_GRADIENT: 8,
        Phase.REDUCTION: 4,
        Phase.MEAN_LOSS: 1,
        Phase.NORM: 3,
        Phase.CLIP: 12,
        Phase.OPTIMIZER: 17,
        Phase.EVALUATION: 1,
    }
    assert second == {
        Phase.INITIAL: 2,
        Phase.MESSAGE: 2,
        Phase.FORWARD: 4,
        Phase.LOSS: 2,
        Phase.LOSS_GRADIENT: 2,
        Phase.INPUT_GRADIENT: 4,
        Phase.WEIGHT_GRADIENT: 4,
        Phase.REDUCTION: 2,
        Phase.MEAN_LOSS: 1,
        Phase.NORM: 3,
        Phase.CLIP: 6,
        Phase.OPTIMIZER: 9,
        Phase.EVALUATION: 1,
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
def test_a_rank_compares_its_pieces_and_the_whole_weight_gradients(plan: Plan, rank_pool: RankPool) -> None:
    first, second = rank_pool.run(found_of, plan, ranks=2)
    assert first.differences == second.differences == []
    assert compared(first) == compared(second) | {Phase.BATCH: STEPS}
    gathers = 9 if plan.strategy == "full" else 3  # what two layers in a row use is gathered once
    assert compared(second) == {
        Phase.INPUT: STEPS * 2,
        Phase.PARAMETERS: STEPS * gathers * 2,
        Phase.FORWARD: STEPS * 2 * 4,
        Phase.LOSS: STEPS * 2,
        Phase.LOSS_GRADIENT: STEPS * 2,
        Phase.INPUT_GRADIENT: STEPS * 2 * 3,
        Phase.WEIGHT_GRADIENT: STEPS * 2 * 6,
        Phase.REDUCTION: STEPS * 6,
        Phase.MEAN_LOSS: STEPS,
        Phase.NORM: 3 + 2,
        Phase.CLIP: (3 + 2) * 6,
        Phase.OPTIMIZER: STEPS * 6 * 4 + 1,  # of a piece without elements as well
    }


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_weight_gradients_that_come_after_a_scatter_are_no_difference(
    schedule: str, rank_pool: RankPool
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
    for findings in rank_pool.run(found_of, plan, ranks=4):
        assert findings.differences == []


@pytest.mark.parametrize("plan", WAYS, ids=way)
def test_gathered_parameters_are_those_that_the_step_before_left(plan: Plan, rank_pool: RankPool) -> None:
    key = Key("value", name="3.weight")
    for findings in rank_pool.run(found_in_damaged, Moment(0, WHOLE), key, plan, ranks=2):
        places = {difference.place for difference in findings.differences}
        gathered = Place(1, Phase.PARAMETERS, 3, name="3.weight")
        assert gathered in places
        assert places <= {gathered, Place(0, Phase.OPTIMIZER, name="3.weight")}


def found_in_damaged(moment: Moment, key: Key, plan: Plan) -> Findings:
    return found(damaged(moment, key, plan.dp * plan.microbatches), plan=plan)


@pytest.mark.parametrize("plan", WAYS, ids=way)
@pytest.mark.parametrize("microbatch", [0, 1, 3])
def test_a_wrong_weight_gradient_is_found_before_it_is_scattered(
    microbatch: int, plan: Plan, rank_pool: RankPool
) -> None:
    key, name = Key("contribution", 3, "3.weight"), "3.weight"
    results = rank_pool.run(found_in_damaged, Moment(0, microbatch), key, plan, ranks=2)
    wrong = results.pop(microbatch // 2)
    assert [one.place for one in wrong.differences] == [Place(0, Phase.WEIGHT_GRADIENT, 3, microbatch, name)]
    assert wrong.differences[0].box == ((4, 5), (7, 8))
    assert results[0].differences == []


@pytest.mark.parametrize("plan", WAYS, ids=way)
def test_the_place_in_a_flat_piece_is_that_in_the_global_tensor(plan: Plan, rank_pool: RankPool) -> None:
    """Of 48 elements in rows of 6 rank 1 has the last 16."""
    key = Key("final", name="0.weight")
    first, second = rank_pool.run(found_in_damaged, Moment(1, WHOLE), key, plan, ranks=2)
    assert first.differences == []
    (difference,) = second.differences
    assert difference.place == Place(1, Phase.REDUCTION, name="0.weight")
    assert (difference.shape, difference.box) == ((1, 16), ((7, 8), (5, 6)))
    assert (difference.worst, difference.share) == ((7, 5), 1 / 16)


def scaled(model: Any, plan: Plan) -> list[tuple[Phase, int | None, tuple[tuple[int, int], ...]]]:
    """On tp, after the last row of a piece of the head was changed: where that is seen."""
    case = gpt2(layers=1)
    batches = case.batches(2, 1, torch.float64)
    recipe, mesh = Recipe(steps=1), Mesh(plan)
    engine = parallelize(model, plan, mesh, case.loss, seed=0)
    recording = Recording()
    run = Reference(
        sequence_of(model), case.loss, recipe, unchanged, DOUBLE, torch.device("cpu"), Noise(0), None
    )
    for moment, values in run.run(batches, 1):
        recording.add(moment, values)
        recording.widen(moment, values, run.epsilon)
    woven = Woven(engine, recipe, recording, sequence_of(model), DOUBLE)
    name = "head.output.weight"
    with torch.no_grad():
        dict(engine.named_parameters())[name][-1].mul_(1.5)
    woven.train(0, *batches[0])
    mesh.close()
    differences = woven.findings.differences
    return [(d.place.phase, d.place.layer, d.box) for d in differences[:1]]


def test_pieces_are_compared_with_pieces(rank_pool: RankPool) -> None:
    """The head's last row of each piece: 37 classes over two ranks are 19 and 18."""
    case = gpt2(layers=1, tied=False)
    plan = Plan(tp=2, precision="fp64")
    one, two = rank_pool.run(scaled, case.build(), plan, ranks=2)
    layers = len(sequence_of(case.build()).layers)
    assert one == [(Phase.FORWARD, layers - 1, ((0, 2), (0, 8), (18, 19)))]
    assert two == [(Phase.FORWARD, layers - 1, ((0, 2), (0, 8), (36, 37)))]


def test_what_a_user_sees_of_the_phases() -> None:
    outcome = run_rank(mlp_case(steps=1), PLAN)
    absent = {Phase.PARAMETERS, Phase.MESSAGE, Phase.GRADIENT_MESSAGE}
    assert phases_of([outcome]) == set(Phase) - absent
