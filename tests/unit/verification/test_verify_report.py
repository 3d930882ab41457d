"""The report: what it says, that a terminal holds it, and that programs can read it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from verification_cases import coordinates_of, mlp_case, verify_here

from plait.plan.plan import Plan
from plait.verification.findings import ComparedBox, Findings
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome
from plait.verification.reference.differences_within_layers import InnerDifference
from plait.verification.reference.recording import Tolerance
from plait.verification.report import LISTED, VerificationReport, formats_in, layout_of
from plait.verification.step_location import Location, StepPhase
from plait.verification.verify import build_report

PATHS = ("embedding", "blocks.0.attention", "blocks.0.mlp", "head")
PLAN = Plan(pp=1, dp=2, tp=2, microbatches=4, schedule="zb-h1")
RIGHT = torch.linspace(1, 2, 8, dtype=torch.float64).view(2, 4)
BOUND = Tolerance(2.0, 1e-13)
EVERYWHERE = (
    Location(0, StepPhase.BATCH),
    Location(0, StepPhase.INPUT, -1, 0),
    Location(0, StepPhase.MESSAGE, 1, 0),
    Location(0, StepPhase.FORWARD, 2, 0),
    Location(0, StepPhase.LOSS, None, 0),
    Location(0, StepPhase.LOSS_GRADIENT, 3, 0),
    Location(0, StepPhase.GRADIENT_MESSAGE, 1, 0),
    Location(0, StepPhase.INPUT_GRADIENT, 2, 0),
    Location(0, StepPhase.WEIGHT_GRADIENT, 2, 0, "blocks.0.mlp.up.weight"),
    Location(0, StepPhase.REDUCTION, name="blocks.0.mlp.up.weight"),
    Location(0, StepPhase.MEAN_LOSS),
    Location(0, StepPhase.NORM),
    Location(0, StepPhase.CLIP, name="blocks.0.mlp.up.weight"),
    Location(0, StepPhase.OPTIMIZER, name="blocks.0.mlp.up.weight"),
    Location(1, StepPhase.EVALUATION),
)
FORWARD, REDUCTION = EVERYWHERE[3], EVERYWHERE[9]


def columns_from(start: int) -> ComparedBox:
    return ComparedBox((RIGHT.shape[0], 100), lambda whole: whole[:, start : start + RIGHT.shape[1]])


def outcomes(wrong: Mapping[int, Mapping[Location, Tensor]], plan: Plan = PLAN) -> list[RankOutcome]:
    """Every rank has compared every phase; some have found something else than `RIGHT`."""
    made = []
    for rank, coordinate in enumerate(coordinates_of(plan)):
        findings, own = Findings(len(PATHS), partitioned={2} if plan.tp > 1 else set()), wrong.get(rank, {})
        for location in EVERYWHERE:
            findings.compare(location, RIGHT, RIGHT, BOUND)
        for location, actual in own.items():
            findings.compare(location, actual, RIGHT, BOUND, box=columns_from(4 * rank))
        made.append(RankOutcome(rank, coordinate, PATHS, findings, 0.125, 1.25 + rank))
    return made


def report_of(
    wrong: Mapping[int, Mapping[Location, Tensor]] | None = None, plan: Plan = PLAN, **options: Any
) -> VerificationReport:
    return build_report(outcomes(wrong or {}, plan), plan, VerifyOptions(**options))


def as_json(report: VerificationReport) -> dict[str, Any]:
    """By way of strict JSON, which knows neither NaN nor infinity."""
    read: dict[str, Any] = json.loads(json.dumps(report.as_json(), allow_nan=False))
    return read


def test_a_report_without_differences_is_equal() -> None:
    report = report_of()
    assert report
    assert report.equal
    assert (report.compared, report.different, report.first, report.others) == (60, 0, None, ())
    assert report.headline() == (
        "EQUAL to one rank: 60 tensors differ by at most 0.0e+00 of their size, 0% of what rounding explains."
    )
    assert report.seconds == 4.25


def test_a_report_states_how_much_of_the_tolerance_was_used() -> None:
    findings = outcomes({0: {FORWARD: RIGHT + 2.5e-14}, 1: {REDUCTION: RIGHT + 5e-14}})
    report = build_report(findings, PLAN, VerifyOptions())
    assert report
    assert report.used == pytest.approx(0.5, rel=0.01)
    assert "differ by at most 2.5e-14 of their size, 50% of what rounding explains." in report.headline()
    assert report.tallies[StepPhase.FORWARD].used == pytest.approx(0.25, rel=0.01)


def test_a_report_in_exact_mode_says_bit_by_bit() -> None:
    assert (
        report_of(mode="exact", steps=1).headline() == "EQUAL to one rank, bit by bit: 60 tensors compared."
    )


def test_a_report_with_differences_is_not_equal_and_names_the_first() -> None:
    report = report_of({2: {FORWARD: 2 * RIGHT}, 3: {FORWARD: 2 * RIGHT, REDUCTION: 0 * RIGHT}})
    assert not report
    assert not report.equal
    assert (report.compared, report.different) == (63, 3)
    assert report.first is not None
    assert report.first.difference.location == FORWARD
    assert report.first.ranks == (2, 3)
    assert report.first.layer == "blocks.0.mlp"
    assert [coordinate["shard"] for coordinate in report.first.coordinates] == [1, 1]
    assert (
        report.headline()
        == "NOT EQUAL to one rank: the forward of blocks.0.mlp differs by 1.0e+00 of its size."
    )
    assert [difference.location for difference in report.others] == [REDUCTION]


def test_the_first_difference_is_the_first_of_all_ranks() -> None:
    report = report_of({0: {REDUCTION: 0 * RIGHT}, 3: {FORWARD: 2 * RIGHT}})
    assert report.first is not None
    assert (report.first.difference.location, report.first.ranks) == (FORWARD, (3,))
    assert [difference.location for difference in report.others] == [REDUCTION]


def test_the_cause_is_made_of_what_all_ranks_have() -> None:
    report = report_of({0: {FORWARD: RIGHT / 4}, 1: {FORWARD: RIGHT * 3 / 4 + 0}})
    assert report.first is not None
    assert report.first.cause.startswith("the ranks of tp hold summands of all of it")


def test_ranks_that_compared_the_same_and_are_equal_are_told() -> None:
    perturbation = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    one_of_two = report_of({2: {FORWARD: perturbation}})
    assert one_of_two.first is not None
    assert one_of_two.first.cause.endswith("; equal on tp 1.")  # other ranks of dp have other data
    one_of_four = report_of({2: {REDUCTION: perturbation}})
    assert one_of_four.first is not None
    assert one_of_four.first.cause.endswith("; equal on rank 0, 1, 3.")


def test_ranks_that_differ_in_other_parameters_are_named_too() -> None:
    """Where each rank has parts of its own."""
    other = replace(REDUCTION, name="head.output.weight")
    report = report_of({0: {REDUCTION: 2 * RIGHT}, 2: {other: 2 * RIGHT}, 3: {FORWARD: RIGHT}})
    assert report.first is not None
    assert (report.first.difference.location, report.first.ranks) == (REDUCTION, (0, 2))
    assert report.first.cause.endswith("; equal on tp 1.")


def test_ranks_without_an_element_are_not_told_to_be_equal() -> None:
    made = outcomes({0: {REDUCTION: 2 * RIGHT}})
    made[2].findings.compare(REDUCTION, RIGHT[:0], RIGHT[:0], BOUND)
    report = build_report(made, PLAN, VerifyOptions())
    assert report.first is not None
    assert report.first.cause.endswith("; equal on tp 1.")


def test_ranks_that_did_not_compare_are_not_told_to_be_equal() -> None:
    """Only rank 0 compares how the batch is cut."""
    made = outcomes({0: {EVERYWHERE[0]: 2 * RIGHT}})
    for outcome in made[1:]:
        del outcome.findings.tallies[StepPhase.BATCH]
    report = build_report(made, PLAN, VerifyOptions())
    assert report.first is not None
    assert "equal on" not in report.first.cause


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (Location(0, StepPhase.FORWARD, 2, 0), "the forward of blocks.0.mlp"),
        (Location(0, StepPhase.INPUT, -1, 0), "the input of the batch"),
        (
            Location(0, StepPhase.WEIGHT_GRADIENT, 2, 0, "up.weight"),
            "the weight gradient of up.weight in blocks.0.mlp",
        ),
        (Location(0, StepPhase.OPTIMIZER, name="up.weight/exp_avg"), "the optimizer of up.weight/exp_avg"),
        (Location(0, StepPhase.NORM), "the norm"),
    ],
)
def test_a_location_is_described_in_words(location: Location, words: str) -> None:
    assert report_of().what(location) == words


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PLAN, "pp 1 · dp 2 · tp 2"),
        (Plan(dp=4, replicate=2), "pp 1 · dp 4 · tp 1 (2 x 2)"),
        (Plan(cp=2, context_parallel="ring"), "pp 1 · dp 1 · cp 2 · tp 1 · ring zigzag"),
        (Plan(dp=2, strategy="optimizer"), "pp 1 · dp 2 · tp 1 · optimizer"),
        (
            Plan(dp=4, replicate=2, strategy="full", reduce="each", offload="parameters"),
            "pp 1 · dp 4 · tp 1 (2 x 2) · full each · offload parameters",
        ),
        (Plan(pp=2, recompute="full"), "pp 2 · dp 1 · tp 1 · recompute full"),
        (Plan(tp=2, sequence_parallel="keep"), "pp 1 · dp 1 · tp 2 · sequence keep"),
        (Plan(loss_rows=5), "pp 1 · dp 1 · tp 1 · loss of 5 rows"),
        (
            Plan(dp=2, strategy="full", recompute=("none", "selective")),
            "pp 1 · dp 2 · tp 1 · full · recompute by layer",
        ),
    ],
)
def test_the_plan_of_a_report_is_described_in_words(plan: Plan, words: str) -> None:
    assert layout_of(plan) == words


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(), ""),
        (Plan(precision="bf16", master_precision="bf16"), "bf16, master bf16"),
        (
            Plan(precision="fp16", master_precision="fp32", loss_scale=1024.0),
            "fp16, master fp32, loss scale 1024",
        ),
        (Plan(gradient_precision="fp32", reduce_precision="bf16"), "gradient fp32, reduce bf16"),
    ],
)
def test_formats_in_words_which_mode_native_names(plan: Plan, words: str) -> None:
    assert formats_in(plan) == words
    text = " ".join(str(report_of(plan=plan, mode="native")).split())
    assert f"native{f' ({words})' if words else ''}, 1" in text
    assert "float64, 1" in " ".join(str(report_of(plan=plan)).split())


def test_the_text_of_a_scalar_difference_has_both_values() -> None:
    findings = Findings(len(PATHS))
    findings.compare(Location(0, StepPhase.MEAN_LOSS), torch.tensor(2.0), torch.tensor(1.5), BOUND)
    report = build_report(
        [RankOutcome(0, coordinates_of(Plan())[0], PATHS, findings, 0.1, 1.0)], Plan(), VerifyOptions()
    )
    assert "  where    2 instead of 1.5" in str(report).splitlines()


def test_the_text_of_a_difference_names_place_size_and_cause() -> None:
    report = report_of({3: {Location(1, StepPhase.FORWARD, 2, 5): 2 * RIGHT}})
    lines = str(report).splitlines()
    assert lines[:2] == [report.headline(), ""]
    assert "  plan     pp 1 · dp 2 · tp 2, zb-h1; float64, 4 micro-batches, 2 steps, clipped" in lines
    assert "  first    step 2, forward, micro-batch 5: layer 2, blocks.0.mlp" in lines
    assert "  on       rank 3 (pp 0 · replicate 0 · shard 1 · cp 0 · tp 1)" in lines
    assert "  where    100% of [2, 4]; worst at [1, 15]: 4 instead of 2" in lines
    assert any(
        line.startswith("  likely   all of it is 2 times what it should be, the size of tp") for line in lines
    )
    assert any(line.startswith("  in all   1 of 61 tensors differ") for line in lines)


def test_the_earliest_place_inside_a_layer_of_all_ranks_is_reported() -> None:
    """What one of them gives is summed over all: behind that all differ."""
    made = outcomes({})
    for rank, order in ((0, 5), (1, 2)):
        made[rank].findings.compare(
            FORWARD,
            -3.5 * RIGHT,
            RIGHT,
            BOUND,
            inside=partial(InnerDifference, order, f"{order} is the first to differ"),
        )
    first = build_report(made, PLAN, VerifyOptions()).first
    assert first is not None
    assert first.cause.endswith("; 2 is the first to differ.")


def test_a_layer_that_is_not_cut_is_not_blamed_for_that() -> None:
    for layer, told in ((1, "scaled by one number"), (2, "the size of tp")):
        first = report_of({0: {replace(FORWARD, layer=layer): 2 * RIGHT}}).first
        assert first is not None
        assert told in first.cause


def test_a_model_of_one_layer_has_no_path() -> None:
    made = outcomes({0: {Location(0, StepPhase.FORWARD, 0, 0): 2 * RIGHT}})
    made = [RankOutcome(one.rank, one.coordinate, ("",), one.findings, one.clip, one.seconds) for one in made]
    text = str(build_report(made, PLAN, VerifyOptions()))
    assert "  first    step 1, forward, micro-batch 0: layer 0\n" in text


def test_with_isolate_further_differences_are_listed() -> None:
    many = dict.fromkeys(EVERYWHERE, 2 * RIGHT)
    text = str(report_of({0: many, 1: many}, isolate=True))
    assert text.count("  also     ") == LISTED + 1
    assert f"  also     {len(EVERYWHERE) - 1 - LISTED} more places" in text
    assert "  also     the input of the batch" in text
    assert "fed downstream" in text


@pytest.mark.parametrize(("places", "isolate"), [(EVERYWHERE[3:], False), (EVERYWHERE[7:10], True)])
@pytest.mark.parametrize("ranks", [(3,), (0, 1, 2, 3)])
def test_a_report_of_differences_fits_a_terminal(
    ranks: tuple[int, ...], places: tuple[Location, ...], isolate: bool
) -> None:
    """What a defect usually looks like: from one place on all is different, or a few by themselves."""
    perturbation = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    following = dict.fromkeys(places, perturbation)
    lines = str(report_of(dict.fromkeys(ranks, following), isolate=isolate)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_an_equal_report_fits_a_terminal() -> None:
    lines = str(verify_here(mlp_case())).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 110


def test_an_equal_report_is_written_as_json() -> None:
    read = as_json(report_of())
    assert {name: read[name] for name in ("equal", "mode", "steps", "clip", "compared", "different")} == {
        "equal": True,
        "mode": "float64",
        "steps": 2,
        "clip": 0.125,
        "compared": 60,
        "different": 0,
    }
    assert read["first"] is None
    assert read["plan"]["schedule"] == "zb-h1"
    assert read["phases"]["forward"] == {
        "compared": 4,
        "different": 0,
        "used": 0.0,
        "relative": 0.0,
        "vague": 0,
    }


def test_a_difference_is_written_as_json() -> None:
    read = as_json(report_of({3: {Location(1, StepPhase.FORWARD, 2, 5): 2 * RIGHT}}))
    first = read["first"]
    cause = first.pop("cause")
    assert cause.startswith("all of it is 2 times what it should be, the size of tp")
    assert read["equal"] is False
    assert first == {
        "step": 1,
        "evaluating": False,
        "phase": "forward",
        "layer": "blocks.0.mlp",
        "parameter": None,
        "tensor": 0,
        "microbatch": 5,
        "ranks": [3],
        "coordinates": [{"pp": 0, "replicate": 0, "shard": 1, "cp": 0, "tp": 1}],
        "largest": 2.0,
        "size": 2.0,
        "allowed": 1e-13,
        "shape": [2, 4],
        "box": [[0, 2], [12, 16]],
        "index": [1, 15],
        "actual": 4.0,
        "expected": 2.0,
    }


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_in_a_difference_is_written_as_null_in_json(broken: float) -> None:
    first = as_json(report_of({0: {FORWARD: RIGHT * broken}}))["first"]
    assert (first["largest"], first["actual"]) == (None, None)
    assert first["expected"] == 1.0


def test_a_difference_of_shapes_is_written_as_json() -> None:
    first = as_json(report_of({0: {FORWARD: RIGHT[:1]}}))["first"]
    assert (first["shape"], first["box"], first["largest"], first["actual"]) == ([1, 4], [], None, None)
    assert "its shape is [1, 4] instead of [2, 4]" in first["cause"]


def test_the_text_of_a_report_names_a_difference_of_shapes() -> None:
    text = str(report_of({0: {FORWARD: RIGHT[:1]}}))
    assert "likely   its shape is [1, 4] instead of [2, 4]" in text
    assert "nan" not in text


def test_a_non_finite_reference_value_is_written_as_json() -> None:
    findings = Findings(len(PATHS))
    findings.compare(FORWARD, RIGHT, RIGHT * math.nan, Tolerance(math.nan, 0.0))
    outcome = RankOutcome(0, coordinates_of(Plan())[0], PATHS, findings, math.nan, 1.0)
    read = as_json(build_report([outcome], Plan(), VerifyOptions()))
    assert (read["clip"], read["first"]["expected"], read["first"]["size"]) == (None, None, None)


def test_json_in_whole_numbers_has_the_bound_of_the_largest_element() -> None:
    report = verify_here(mlp_case(mode="exact", steps=1))
    assert as_json(report)["clip"] == pytest.approx(2.572266125)
    assert "inf" not in str(report)
