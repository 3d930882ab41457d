"""Mode native takes a plan's precisions as they are: no false alarm, and how sharp it is in bf16."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest

from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.plan.plan import Plan
from zoo import cases
from zoo.precision import MIXED, TWO_NATIVE_STEPS, travels_in_16_bits
from zoo.row import report_of

USUAL = Plan(pp=2, tp=2, dp=2, microbatches=2, strategy="full", precision="bf16", master_precision="fp32")
"""How large models are trained."""
TABLE = "embedding.token.weight"
FULL = replace(MIXED, strategy="full", reduce="each", schedule="zb-h1", reduce_precision="bf16")
WAYS = (
    FULL,
    replace(cases.TWO_PARTS, precision="fp16", master_precision="fp32", sequence_parallel="keep"),
    replace(cases.TWO_STAGES, precision="bf16", master_precision="fp32", loss_scale=1000.0, schedule="zb-h1"),
    replace(
        cases.TWO_COPIES,
        precision="bf16",
        master_precision="bf16",
        gradient_precision="fp32",
        strategy="gradients",
    ),
    replace(cases.TWO_COPIES, precision="bf16", master_precision="fp32", gradient_precision="bf16"),
    replace(cases.TWO_COPIES, precision="fp32", reduce_precision="fp16", offload="full", strategy="full"),
    replace(cases.TWO_PARTS, precision="bf16", master_precision="bf16"),
    replace(cases.TWO_PARTS, recompute="full", sequence_parallel="regather"),
    replace(USUAL, schedule="zb-h1", reduce="each", sequence_parallel="keep"),
    replace(USUAL, precision="fp16", replicate=2),
)


def named(plan):
    dtypes = (plan.precision, plan.master_precision, plan.gradient_precision, plan.reduce_precision)
    return "-".join([str(plan.world), plan.strategy, *(dtype or "same" for dtype in dtypes)])


@pytest.mark.full
@pytest.mark.parametrize("plan", WAYS, ids=named)
def test_correct_mixed_precision_runs_are_equal(rank_pool, plan):
    for model in (cases.GPT2, cases.SHARING):
        report = report_of(rank_pool, model, plan, nullcontext, TWO_NATIVE_STEPS)
        assert report, report


def off_by(error):
    """The table's final gradient is off by a factor."""
    original = FlatBuffer.finish_gradients

    def finish(self, carried, scale):
        original(self, carried, scale)
        if TABLE in self.shard_gradients:
            self.shard_gradients[TABLE].mul_(1 + error)

    return patch.object(FlatBuffer, "finish_gradients", finish)


def off_by_a_little():
    return off_by(2.0**-16)


@pytest.mark.full
def test_a_usual_bf16_plan_on_eight_ranks_is_equal_and_small_errors_are_found(rank_pool):
    """Equal; and an error of 2^-16 in fp32 gradients is seen, though bf16 rounds by 2^-8."""
    report = report_of(rank_pool, cases.FOUR_HEADS, USUAL, nullcontext, TWO_NATIVE_STEPS)
    assert report, report
    for defect in (off_by_a_little, travels_in_16_bits):
        report = report_of(rank_pool, cases.FOUR_HEADS, USUAL, defect, TWO_NATIVE_STEPS)
        assert "the reduction of" in report.headline(), report
