"""Changes of one field: they help, and none that would help more is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.hardware import load_hardware
from plait.prediction.plan_changes import best_changes
from plait.prediction.step_prediction import predict

MODEL = Decoder(layers=6, hidden=512, heads=8, vocab=5000, context=512, gated=True, rotary=True)
H100 = load_hardware("h100-sxm")
PLAN = Plan(pp=2, dp=2, microbatches=2, recompute="full", precision="bf16", master_precision="fp32")


def test_changes_of_a_plan_that_fits_save_time_most_first() -> None:
    found = predict(MODEL, PLAN, H100, rows=8)
    changes = best_changes(found, most=20)
    assert {"recompute", "microbatches", "schedule"} <= {one.field for one in changes}
    assert [one.seconds for one in changes] == sorted(one.seconds for one in changes)
    assert changes[-1].seconds < 0
    assert best_changes(found) == changes[:3]
    for one in changes:
        again = predict(MODEL, replace(one.after.plan, **{one.field: getattr(PLAN, one.field)}), H100, rows=8)
        assert again.step_seconds == found.step_seconds
        assert one.value == getattr(one.after.plan, one.field) != getattr(PLAN, one.field)


@pytest.mark.parametrize("room", [0.9, 0.3])
def test_changes_that_make_a_plan_fit_come_first(room: float) -> None:
    plan = replace(PLAN, recompute="none")
    needed = predict(MODEL, plan, H100, rows=8).peak_memory
    found = predict(MODEL, plan, replace(H100, memory=needed * room, reserved=0.0), rows=8)
    assert not found.fits
    changes = best_changes(found, most=20)
    fitting = [one for one in changes if one.after.fits]
    assert bool(fitting) == (room == 0.9)
    assert [*changes[: len(fitting)]] == sorted(fitting, key=lambda one: one.seconds)
    rest = [one.memory for one in changes[len(fitting) :]]
    assert rest == sorted(rest)
    assert all(memory < 0 for memory in rest)
