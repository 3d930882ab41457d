"""What a verification does, and what it refuses to do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.verification.expected_dtypes import formats_of
from plait.verification.options import VerifyOptions, adamw, usual_steps

MIXED = Plan(precision="bf16", master_precision="fp32", reduce_precision="bf16")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "fast"}, "mode is 'fast': choose one of exact, float64, native."),
    ({"steps": 0}, "steps is 0: give a whole number of at least 1."),
    ({"steps": 1.0}, "steps is 1.0: give a whole number of at least 1."),
    ({"steps": True}, "steps is True: give a whole number of at least 1."),
    ({"seed": -1}, "seed is -1: give a whole number of at least 0."),
    ({"perturbations": 0}, "perturbations is 0: give a whole number of at least 1."),
    ({"clip": 0.0}, "clip is 0.0: give a number above 0, or math.inf for no limit."),
    ({"clip": float("nan")}, "clip is nan: give a number above 0, or math.inf for no limit."),
    ({"clip": "1"}, "clip is '1': give a number above 0, or math.inf for no limit."),
    ({"optimizer": 3}, "optimizer is 3: give a function of parameter groups."),
    ({"isolate": 1}, "isolate is 1: give True or False."),
    (
        {"mode": "exact", "steps": 1, "optimizer": partial(plait.Muon, lr=0.1)},
        "mode exact compares bits, which sums in another order change in an optimizer of whole matrices: "
        "choose float64.",
    ),
    ({"mode": "exact"}, "steps is 2: mode exact takes 1, as numbers grow too large after it."),
]


def test_invalid_verify_options_are_refused() -> None:
    for changes, told in REFUSED:
        with pytest.raises(PlanError) as caught:
            VerifyOptions(**changes)
        assert str(caught.value) == told


def test_default_and_exact_verify_options_are_accepted() -> None:
    assert VerifyOptions() == VerifyOptions(mode="float64", steps=2, clip=None, optimizer=adamw)
    assert VerifyOptions(mode="exact", steps=1, clip=float("inf"), seed=0).steps == 1


def test_muon_iterates_in_float64_but_in_mode_native() -> None:
    muon = partial(plait.Muon, lr=0.1, dtype=torch.float32)
    of_float64 = VerifyOptions(optimizer=muon).make_optimizer
    assert isinstance(of_float64, partial)
    assert of_float64.keywords == {"lr": 0.1, "dtype": torch.float64}
    assert VerifyOptions(mode="native", optimizer=muon).make_optimizer is muon
    assert VerifyOptions().make_optimizer is adamw


def test_verify_runs_two_steps_by_default_and_one_in_exact_mode() -> None:
    assert [usual_steps(mode) for mode in ("float64", "native", "exact")] == [2, 2, 1]


def test_a_run_is_perturbed_twice_and_more_often_in_16_bits() -> None:
    wide, narrow = formats_of(Plan()), formats_of(MIXED)
    for options, expected in (
        (VerifyOptions(), (2, 6)),
        (VerifyOptions(perturbations=7), (7, 7)),
        (VerifyOptions(mode="exact", steps=1), (0, 0)),
    ):
        assert (options.perturbed_runs(wide), options.perturbed_runs(narrow)) == expected


def test_only_mode_native_keeps_the_precision_of_the_plan() -> None:
    assert VerifyOptions().applied_to(MIXED) == Plan(precision="fp64")
    assert VerifyOptions(mode="exact", steps=1).applied_to(Plan()).precision == "fp64"
    assert VerifyOptions(mode="native").applied_to(MIXED) == MIXED
    assert VerifyOptions(mode="native").applied_to(Plan()) == Plan()


def test_verification_keeps_every_field_of_the_plan_but_its_precisions() -> None:
    plan = Plan(dp=4, replicate=2, strategy="full", reduce="each", offload="full", microbatches=3)
    assert VerifyOptions().applied_to(plan) == replace(plan, precision="fp64")
    assert VerifyOptions(mode="native").applied_to(plan) == plan


@pytest.mark.parametrize(
    "plan",
    [
        Plan(precision="bf16", gradient_precision="fp32", loss_scale=8.0),
        Plan(precision="fp16", master_precision="fp32"),
    ],
)
def test_mode_native_keeps_gradients_and_the_loss_scale(plan: Plan) -> None:
    assert VerifyOptions(mode="native").applied_to(plan) == plan
    assert VerifyOptions().applied_to(plan) == Plan(precision="fp64")


def test_the_optimizer_keeps_the_decay_of_its_groups() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    groups = [
        {"params": [parameter], "weight_decay": decay}
        for parameter, decay in zip(parameters, (0.1, 0.0), strict=True)
    ]
    made = adamw(groups)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert (made.defaults["lr"], made.defaults["betas"]) == (1e-3, (0.9, 0.95))
