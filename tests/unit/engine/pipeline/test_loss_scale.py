from __future__ import annotations

import pytest

from plait.engine.sharding.loss_scale import FIRST, LossScale, loss_scale
from plait.errors import PlanError


def test_only_fp16_has_a_loss_scale_by_default() -> None:
    assert loss_scale(None, in_fp16=True) == LossScale(FIRST, dynamic=True)
    assert loss_scale(128.0, in_fp16=True) == LossScale(128.0)
    assert loss_scale(None, in_fp16=False) == LossScale(1.0)


def test_a_dynamic_loss_scale_halves_on_overflow_and_doubles_after_2000_steps() -> None:
    scale = LossScale(1024.0, dynamic=True)
    scale.update(finite=False)
    assert scale.value == 512
    for _ in range(1999):  # 2000, as torch.amp.GradScaler
        scale.update(finite=True)
    assert scale.value == 512
    scale.update(finite=True)
    assert (scale.value, scale.good_steps) == (1024, 0)
    scale.update(finite=True)
    scale.update(finite=False)
    assert (scale.value, scale.good_steps) == (512, 0), "good steps are counted anew"


def test_a_dynamic_loss_scale_refuses_unchecked_gradients() -> None:
    scale = LossScale(dynamic=True)
    scale.require_checked(anew=True)
    scale.require_checked(anew=True)  # the first step failed
    scale.end()
    scale.require_checked(anew=False)  # the second step adds to the first
    scale.end()
    with pytest.raises(PlanError, match="not checked"):
        scale.require_checked(anew=True)
    scale.update(finite=True)
    scale.require_checked(anew=True)


def test_a_fixed_loss_scale_never_changes_and_needs_no_check() -> None:
    scale = LossScale(8.0)
    scale.require_checked(anew=True)
    scale.end()
    scale.require_checked(anew=True)
    scale.update(finite=False)
    assert scale.value == 8
