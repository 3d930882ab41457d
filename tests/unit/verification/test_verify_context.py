"""`verify` under context parallelism: equal in all modes, and where a tensor of one position differs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from verification_cases import case_of, verify_here

from parity.case import Case as ParityCase
from parity.cases import gpt2, llama
from parity.contexts import mixing, packed
from parity.pairs import in_quick, in_turns
from parity.sequence_parts import of_length
from plait.engine.parallelize import parallelize
from plait.errors import ModelError
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.plan import Plan
from plait.ranks.mesh import Mesh
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
from plait.verification.report import VerificationReport
from plait.verification.step_location import Location, RecordKey, RecordScope, StepPhase
from plait.verification.verify import build_report

RING = Plan(cp=2, microbatches=2, context_parallel="ring")
GPT2 = gpt2(layers=1, hidden=24, heads=12)
CASES: dict[str, ParityCase] = {
    "gpt2": of_length(GPT2, 7),
    "short": of_length(GPT2, 3),
    "llama": llama(layers=1, heads=12, kv_heads=2),
    "packed": packed(llama(layers=1, heads=12, kv_heads=4), 8),
    "packed-window": packed(mixing(8, window=3), 8),
    "both-sides": mixing(7, causal=False, kv_heads=2),
}
PLANS: dict[str, Plan] = {
    "ring": replace(RING, recompute="full"),
    "ulysses": replace(RING, context_parallel="ulysses", cp=3, context_layout="contiguous"),
    "striped": replace(RING, context_layout="striped", pp=2, schedule="zb-h1"),
    "full": replace(RING, dp=2, strategy="full", reduce="each"),
    "tp": replace(RING, tp=2, sequence_parallel="keep"),
    "four": replace(RING, cp=4, strategy="gradients"),
}
WITHOUT_RULES = ("packed-window", "both-sides")
MODES = ("float64", "exact", "native")


def report_of(ranks: Any, model: ParityCase, plan: Plan, mode: str) -> VerificationReport:
    plan = replace(plan, precision="bf16", master_precision="fp32") if mode == "native" else plan
    steps = 1 if mode == "exact" else 2
    case = case_of(model, rows=2 * plan.dp * plan.microbatches, mode=mode, steps=steps)
    return build_report(ranks.run(verify_rank, case, plan, ranks=plan.world), plan, case.options)


@pytest.mark.parametrize(("model", "plan"), in_turns(CASES, PLANS))
def test_each_attention_on_each_layout_is_equal(
    thread_ranks: Any, model: ParityCase, plan: Plan, request: pytest.FixtureRequest
) -> None:
    """Each in another mode in turns; see below for all of them."""
    name, way = request.node.callspec.id.rsplit("-", 1)
    plan = replace(plan, tp=1, sequence_parallel="none") if name in WITHOUT_RULES else plan
    mode = MODES[(list(CASES).index(name) + list(PLANS).index(way) // 2) % len(MODES)]
    assert report_of(thread_ranks, model, plan, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_context_parallel_models_are_equal_in_every_mode(
    thread_ranks: Any, name: str, way: str, mode: str
) -> None:
    plan = PLANS[way]
    plan = replace(plan, tp=1, sequence_parallel="none") if name in WITHOUT_RULES else plan
    assert report_of(thread_ranks, CASES[name], plan, mode)


@pytest.mark.parametrize("mode", in_quick(("float64", "exact"), "exact"))
def test_verify_finds_packed_documents_on_one_rank_equal(mode: str) -> None:
    case = case_of(CASES["packed"], mode=mode, steps=1)
    report = verify_here(case, Plan(microbatches=2))
    assert report
    without = case_of(replace(CASES["packed"], draw=without_documents), mode=mode, steps=1)
    assert verify_here(without, Plan(microbatches=2)).clip != report.clip


def without_documents(rows: int, generator: torch.Generator) -> Any:
    inputs, targets = CASES["packed"].draw(rows, generator)
    return inputs["tokens"], targets


def recorded(model: ParityCase) -> ReferenceRecording:
    """One step."""
    recording, device = ReferenceRecording(), torch.device("cpu")
    for number in range(2):
        formats, perturbation = NumberFormats(compute=torch.float64), Perturbation(number)
        sequence, options = sequence_of(model.build()), VerifyOptions(steps=1)
        run = ReferenceRun(sequence, model.loss, options, unchanged, formats, device, perturbation, 0.1)
        for scope, values in run.run(model.batches(4, 1, torch.float64), 2):
            if number:
                recording.widen(scope, values, run.epsilon)
            else:
                recording.add(scope, values)
    return recording


def found(model: ParityCase, plan: Plan, key: RecordKey, index: tuple[int, ...]) -> Findings:
    """One step on this rank, compared with a recording of which one element of micro-batch 1 is wrong."""
    recording = recorded(model)
    recording.values[RecordScope(0, 1)][key][index] += 1
    mesh = Mesh(plan)
    build = model.build()
    engine = parallelize(build, plan, mesh, model.loss)
    formats, options = NumberFormats(compute=torch.float64), VerifyOptions(steps=1)
    comparison = StepComparison(engine, options, recording, sequence_of(build), formats)
    CandidateRun(comparison).train(0, *model.batches(4, 1, torch.float64)[0])
    mesh.close()
    return comparison.findings


@pytest.mark.parametrize(
    ("key", "phase", "layer", "index"),
    [
        (RecordKey("output", -1, "0"), StepPhase.INPUT, -1, (1, 5)),
        (RecordKey("output", 1, "0"), StepPhase.FORWARD, 1, (1, 5, 3)),
        (RecordKey("gradient", 0, "0"), StepPhase.INPUT_GRADIENT, 1, (0, 5, 3)),
    ],
)
def test_a_position_is_compared_by_the_rank_that_has_it(
    thread_ranks: Any, key: RecordKey, phase: StepPhase, layer: int, index: tuple[int, ...]
) -> None:
    """Position 5 is in the middle of the second rank's: 2 to 5."""
    plan = replace(RING, precision="fp64")
    model = gpt2(layers=1)
    first, second = thread_ranks.run(found, model, plan, key, index, ranks=2)
    assert first.differences == []
    (difference,) = second.differences
    assert difference.location == Location(0, phase, layer, 1)
    assert difference.worst == index
    assert difference.box == tuple((place, place + 1) for place in index)


class LastPosition:
    """A loss of the last position of a part: no sum over positions."""

    def total(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output[:, -1].sum()

    def weight(self, targets: torch.Tensor) -> int:
        return len(targets)


def test_a_loss_that_is_no_sum_over_positions_is_named(thread_ranks: Any) -> None:
    report = report_of(thread_ranks, replace(gpt2(layers=1), loss=LastPosition()), RING, "float64")
    assert report.first is not None
    assert report.first.difference.location == Location(0, StepPhase.LOSS, None, 0)
    assert report.first.ranks == (0, 1)
    assert "the loss is no sum over positions" in report.first.cause


def test_a_model_that_mixes_positions_is_refused_on_every_rank(thread_ranks: Any) -> None:
    """Its attention does not go through `plait.attention`."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(37, 8),
        torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        torch.nn.Linear(8, 37),
    )
    case = case_of(replace(gpt2(), build=lambda: model), steps=1)
    with pytest.raises(ModelError, match="mixes positions"):
        thread_ranks.run(partial(verify_rank, case, RING), ranks=2)
