import math
from typing import Any

import pytest

from plait.app.config.config_parser import config_from_arguments
from plait.app.train.one_rank_comparison import Comparison, _tolerance, largest_differences, single_rank_plan
from plait.plan.plan import Plan


def test_the_largest_relative_differences_of_loss_and_norm_are_found() -> None:
    woven = [(5.0, 1.0), (4.0, 2.2)]
    alone = [(5.0, 1.0), (4.4, 2.0)]
    assert largest_differences(woven, alone).tolist() == pytest.approx([0.4 / 4.4, 0.1])


def test_a_nan_loss_on_either_side_is_a_difference() -> None:
    for woven in ([(5.0, 1.0), (math.nan, 1.0)], [(math.nan, 1.0), (5.0, 1.0)]):
        loss, norm = largest_differences(woven, [(5.0, 1.0), (5.0, 1.0)]).tolist()
        assert math.isnan(loss)
        assert norm == 0
        assert not Comparison(2, loss, norm, 1e-4).matches


def test_a_comparison_is_described_in_a_sentence() -> None:
    assert str(Comparison(3, 2.1e-7, 3.4e-7, 1e-4)) == (
        "The first 3 steps match one rank: loss to 2.1e-07, gradient norm to 3.4e-07 (relative)."
    )
    assert str(Comparison(1, 0.0, 0.0, 1e-4)).startswith("The first step matches one rank")
    different = Comparison(3, 2e-7, 3e-2, 1e-4)
    assert not different.matches
    assert str(different) == (
        "The first 3 steps do NOT match one rank: "
        "loss to 2.0e-07, gradient norm to 3.0e-02 (relative), beyond 0.0001."
    )


def test_one_rank_runs_everyone_s_micro_batches() -> None:
    plan = Plan(pp=2, dp=3, microbatches=4, schedule="gpipe", precision="fp64")
    assert single_rank_plan(plan) == Plan(microbatches=12, schedule="gpipe", precision="fp64")


def test_the_one_rank_comparison_run_has_the_same_number_formats() -> None:
    formats: dict[str, Any] = {"master_precision": "fp32", "gradient_precision": "bf16", "loss_scale": 8.0}
    plan = Plan(dp=2, strategy="full", precision="bf16", reduce_precision="bf16", **formats)
    assert single_rank_plan(plan) == Plan(
        microbatches=2, precision="bf16", reduce_precision="bf16", **formats
    )


def test_norms_that_overflow_alike_are_equal() -> None:
    assert largest_differences([(5.0, math.inf)], [(5.0, math.inf)]).tolist() == [0.0, 0.0]
    assert largest_differences([(5.0, 2.0)], [(5.0, math.inf)])[1].isnan()


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ("--train.precision fp64", 1e-10),
        ("", 1e-4),
        ("--train.precision bf16", 2e-2),
        ("--train.precision fp16", 1e-2),
        ("--train.reduce-precision bf16", 2e-2),
    ],
)
def test_the_coarsest_precision_says_how_close(options: str, most: float) -> None:
    assert _tolerance(config_from_arguments(options.split()).plan()) == most
