"""Changes of one field: they help, and none that would help more is left out."""

from __future__ import annotations

from dataclasses import replace

from plait.estimate.prediction.prediction import predict
from plait.estimate.search.plan_changes import PlanChange, _by_help, _candidates, _helps, best_changes
from plait.estimate.time.hardware import load_hardware
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

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


def test_changes_that_make_a_plan_fit_come_first() -> None:
    for room in [0.9, 0.3]:
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


def test_impossible_plan_changes_are_left_out() -> None:
    """Six layers are too few for two stages on each of four ranks."""
    plan = replace(PLAN, pp=4, dp=1, microbatches=1, recompute="none")
    found = predict(replace(MODEL, layers=2), plan, replace(H100, memory=1e6, reserved=0.0), rows=1)
    changes = best_changes(found, most=20)
    assert changes
    for one in changes:
        assert one.after.plan == replace(plan, **{one.field: one.value}), one.field


ALONE = ("recompute", ["selective", "full"]), ("microbatches", [1, 4, 8]), ("loss_rows", [1024])
STATES = ["none", "optimizer", "gradients", "full"]
POLICIES = ["1f1b", "interleaved", "zb-h1", "zb-v", "v-half"]


def test_plan_changes_are_tried_only_for_fields_that_matter() -> None:
    for plan, expected in [
        (Plan(microbatches=2), dict(ALONE)),
        (Plan(microbatches=2, loss_rows=7), {**dict(ALONE), "loss_rows": [None]}),
        (
            Plan(tp=2, dp=4, microbatches=2, loss_rows=1024),
            {
                **dict(ALONE),
                "loss_rows": [None],
                "sequence_parallel": ["keep", "regather"],
                "strategy": STATES[1:],
            },
        ),
        (
            Plan(dp=4, microbatches=2, strategy="full", reduce="each"),
            {**dict(ALONE), "strategy": STATES[:3], "reduce": ["last"], "replicate": [2, 4]},
        ),
        (
            Plan(cp=2, microbatches=2, strategy="optimizer"),
            {**dict(ALONE), "strategy": ["none", "gradients", "full"]},
        ),
        (Plan(pp=2, microbatches=2), {**dict(ALONE), "schedule": POLICIES[1:]}),
        (
            Plan(pp=2, microbatches=2, schedule="interleaved"),
            {**dict(ALONE), "schedule": [POLICIES[0], *POLICIES[2:]], "chunks": [3, 4]},
        ),
        (
            Plan(pp=2, microbatches=2, schedule="interleaved", chunks=3, layers_per_stage=(2, 2, 2, 2, 3, 3)),
            {**dict(ALONE), "schedule": [POLICIES[0], *POLICIES[2:]], "chunks": [2, 4]},
        ),
    ]:
        tried: dict[str, list[object]] = {}
        for field, one in _candidates(predict(MODEL, plan, H100, rows=8)):
            tried.setdefault(field, []).append(getattr(one, field))
            others = {"chunks": None} if field == "schedule" else {}
            cut = {"layers_per_stage": None} if field in ("schedule", "chunks") else {}
            assert one == replace(plan, **{**others, **cut, field: getattr(one, field)})
        assert tried == expected


def test_a_change_helps_if_it_fits_or_else_is_faster_or_smaller() -> None:
    small = predict(MODEL, replace(PLAN, recompute="full"), H100, rows=8)
    quick = predict(MODEL, replace(PLAN, recompute="none"), H100, rows=8)
    faster, smaller = (
        PlanChange("recompute", "none", small, quick),
        PlanChange("recompute", "full", quick, small),
    )
    assert faster.seconds == quick.step_seconds - small.step_seconds == -smaller.seconds < 0
    assert faster.memory == quick.peak_memory - small.peak_memory == -smaller.memory > 0
    assert (_helps(faster), _helps(smaller)) == (True, False)
    assert not _helps(PlanChange("recompute", "full", small, small))
    none = {True: H100, False: replace(H100, memory=1.0)}

    def changed(before: bool, after: bool) -> list[PlanChange]:
        return [
            replace(
                one,
                before=replace(one.before, hardware=none[before]),
                after=replace(one.after, hardware=none[after]),
            )
            for one in (faster, smaller)
        ]

    assert [*map(_helps, changed(True, False))] == [False, False]
    assert [*map(_helps, changed(False, True))] == [True, True]
    assert [*map(_helps, changed(False, False))] == [False, True]
    same = replace(
        smaller, before=replace(small, hardware=none[False]), after=replace(small, hardware=none[False])
    )
    assert not _helps(same)
    keys = [_by_help(one) for after in (True, False) for one in changed(False, after)]
    assert keys == [
        *((False, faster.seconds), (False, smaller.seconds), (True, faster.memory), (True, smaller.memory)),
    ]
