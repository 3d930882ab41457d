"""What a plan's precisions mean, said apart from the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.plan.plan import Plan
from plait.verification.expected_dtypes import GROWTH_INTERVAL, ReferenceLossScale, formats_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WEIGHT = nn.Parameter(torch.ones(2))
FROZEN = nn.Parameter(torch.ones(2), requires_grad=False)
MIXED = Plan(precision="bf16", master_precision="fp32")


@pytest.mark.parametrize(
    ("plan", "dtypes"),
    [
        (Plan(), (FP32, FP32, FP32, FP32)),
        (Plan(precision="bf16"), (BF16, FP32, FP32, FP32)),
        (Plan(precision="bf16", master_precision="bf16"), (BF16, BF16, BF16, BF16)),
        (MIXED, (BF16, FP32, FP32, FP32)),
        (
            Plan(precision="bf16", master_precision="fp32", gradient_precision="bf16"),
            (BF16, FP32, BF16, BF16),
        ),
        (Plan(precision="bf16", master_precision="fp32", reduce_precision="bf16"), (BF16, FP32, FP32, BF16)),
        (
            Plan(precision="bf16", master_precision="bf16", gradient_precision="fp32"),
            (BF16, BF16, FP32, FP32),
        ),
    ],
)
def test_each_expected_precision_defaults_to_the_one_before(
    plan: Plan, dtypes: tuple[torch.dtype, ...]
) -> None:
    formats = formats_of(plan)
    kinds = (formats.compute_of, formats.master_of, formats.gradient_of, formats.reduce_of)
    assert tuple(kind(WEIGHT) for kind in kinds) == dtypes
    assert formats.epsilon_of_gradient(WEIGHT) == max(torch.finfo(dtype).eps for dtype in dtypes[1:])


def test_a_frozen_parameter_has_no_master_dtype() -> None:
    assert formats_of(MIXED).master_of(FROZEN) == BF16


def test_whole_numbers_keep_their_dtype() -> None:
    assert formats_of(MIXED).compute_of(torch.ones(2, dtype=torch.int64)) == torch.int64


@pytest.mark.parametrize(
    ("plan", "overflows"),
    [
        (MIXED, False),
        (Plan(precision="fp16", master_precision="fp32"), True),
        (Plan(precision="fp32", gradient_precision="fp16"), True),
        (Plan(precision="fp32", reduce_precision="fp16"), True),
    ],
)
def test_gradients_overflow_where_something_is_fp16(plan: Plan, overflows: bool) -> None:
    assert formats_of(plan).may_overflow(WEIGHT) is overflows
    assert not formats_of(plan).may_overflow(FROZEN)


def test_a_dynamic_loss_scale_is_doubled_after_many_finite_steps() -> None:
    scale = ReferenceLossScale(8.0, dynamic=True, finite_steps=GROWTH_INTERVAL - 2)
    for value in (8.0, 16.0, 16.0):
        scale.update()
        assert scale.value == value
    fixed = ReferenceLossScale(8.0)
    fixed.update()
    assert fixed.value == 8.0
