"""The reference in few digits: masters, sums, the loss scale; how far a run that is reset to it deviates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from verification_cases import mlp, mlp_case, rows_and_classes, verify_here

from plait.errors import ModelError
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.plan import Plan
from plait.tensor.losses import cross_entropy
from plait.verification.expected_dtypes import formats_of
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import settled_scale
from plait.verification.reference.recording import ReferenceRecording
from plait.verification.reference.reference_run import ReferenceRun
from plait.verification.reference.reference_update import exact_bound
from plait.verification.reference.rounding_errors import Perturbation
from plait.verification.reference.start_values import unchanged
from plait.verification.step_location import WHOLE_STEP, RecordKey, Records, RecordScope

MIXED = Plan(microbatches=2, precision="bf16", master_precision="fp32")
STEPS = 2


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def reference_of(
    plan: Plan,
    perturbation: int = 0,
    baseline: ReferenceRecording | None = None,
    clip: float | None = math.inf,
    scale: float | None = None,
) -> ReferenceRun:
    options = VerifyOptions(mode="native", optimizer=momentum, weight_decay=0.0, clip=clip)
    given = (sequence_of(mlp()), cross_entropy, options, unchanged, formats_of(plan), torch.device("cpu"))
    return ReferenceRun(*given, Perturbation(perturbation), clip, baseline=baseline, scale=scale)


def run_of(reference: ReferenceRun, steps: int = STEPS, microbatches: int = 2) -> dict[RecordScope, Records]:
    inputs, targets = rows_and_classes()
    batch = inputs.to(reference.formats.compute or torch.float64), targets
    return dict(reference.run([batch] * steps, microbatches))


def recorded(
    plan: Plan, perturbation: int = 0, baseline: ReferenceRecording | None = None
) -> dict[RecordScope, Records]:
    return run_of(reference_of(plan, perturbation, baseline), STEPS, plan.microbatches)


def by_hand(microbatches: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The last gradients and the parameters of plain PyTorch: fp32 parameters, layers in bf16."""
    master = mlp().float()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05, momentum=0.9)
    inputs, targets = rows_and_classes()
    for _ in range(STEPS):
        sums = {name: torch.zeros_like(p) for name, p in master.named_parameters()}
        for input, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            layers = mlp().bfloat16()
            layers.load_state_dict(master.state_dict())
            total = nn.functional.cross_entropy(layers(input.bfloat16()).float(), target, reduction="sum")
            total.div(len(targets)).backward()  # type: ignore[no-untyped-call]
            for name, p in layers.named_parameters():
                assert p.grad is not None
                sums[name] += p.grad.float()
        for name, p in master.named_parameters():
            p.grad = sums[name]
        optimizer.step()
    return sums, {name: p.detach() for name, p in master.named_parameters()}


def test_masters_and_sums_in_fp32_are_those_of_plain_pytorch() -> None:
    records = recorded(MIXED)[RecordScope(STEPS - 1, WHOLE_STEP)]
    gradients, parameters = by_hand(2)
    for name, value in parameters.items():
        final, master = records[RecordKey("final", name=name)], records[RecordKey("value", name=name)]
        assert final.dtype == master.dtype == torch.float32
        assert torch.allclose(final, gradients[name], rtol=1e-6, atol=1e-8), name
        assert torch.allclose(master, value, rtol=1e-6, atol=1e-8), name


def test_a_loss_scale_is_in_the_backward_and_in_no_final_gradient() -> None:
    plain, scaled = recorded(MIXED), recorded(replace(MIXED, loss_scale=1024.0))
    key = RecordKey("contribution", 0, "0.weight")
    assert torch.equal(scaled[RecordScope(0, 0)][key], plain[RecordScope(0, 0)][key] * 1024)
    whole = RecordScope(STEPS - 1, WHOLE_STEP)
    assert all(torch.equal(scaled[whole][k], v) for k, v in plain[whole].items() if k.kind != "scale")


def test_gradients_are_added_up_in_their_own_dtype() -> None:
    narrow = recorded(replace(MIXED, gradient_precision="bf16"))[RecordScope(0, WHOLE_STEP)]
    final = narrow[RecordKey("final", name="0.weight")]
    assert final.dtype == torch.float32
    assert torch.equal(final, final.bfloat16().float())
    wide = recorded(MIXED)[RecordScope(0, WHOLE_STEP)][RecordKey("final", name="0.weight")]
    assert not torch.equal(wide, wide.bfloat16().float())


def test_a_run_that_follows_deviates_by_roundings_of_what_it_just_made() -> None:
    """Contributions by those of bf16; sums, clipped gradients and parameters by those of fp32."""
    main = ReferenceRecording()
    for scope, values in recorded(MIXED).items():
        main.add(scope, values)
    run = reference_of(MIXED, perturbation=1, baseline=main)
    shaken = run_of(run)

    def apart(scope: RecordScope, kind: str) -> float:
        pairs = [(v, shaken[scope][k]) for k, v in main.values[scope].items() if k.kind == kind]
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)

    last = RecordScope(STEPS - 1, WHOLE_STEP)
    assert apart(RecordScope(1, 0), "contribution") > 1e-3
    for kind in ("final", "clipped", "value", "state"):
        assert 0 < apart(last, kind) < 1e-5 or kind == "value", kind
    assert apart(last, "value") < 1e-6
    recorded_last = main.values[last]  # which each step of the run goes on from
    for name, parameter in run.parameters.items():
        assert torch.equal(parameter, recorded_last[RecordKey("value", name=name)])
        momenta = run.update.optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momenta, recorded_last[RecordKey("state", name=f"{name}/momentum_buffer")])


def test_a_fixed_scale_that_overflows_is_refused() -> None:
    plan = Plan(microbatches=2, precision="fp16", master_precision="fp32", loss_scale=2.0**30)
    with pytest.raises(ModelError, match="gradients are not finite in step 1 at a loss scale of"):
        verify_here(mlp_case(mode="native"), plan)


@given(st.integers(1, 2**30), st.sampled_from([2.0**-16, 2.0**-8, 1.0]))
def test_a_bound_by_which_gradients_are_scaled_without_rounding(norm: int, grain: float) -> None:
    largest = torch.tensor(norm * grain, dtype=torch.float64)
    factor = float(exact_bound(largest) / (largest + 1e-6))
    assert factor in (1 / 2, 3 / 4, 5 / 8, 7 / 8)


def test_nothing_is_clipped_where_there_is_nothing() -> None:
    assert exact_bound(torch.tensor(0.0, dtype=torch.float64)) == math.inf


HALF = replace(MIXED, precision="fp16")
EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}


@pytest.mark.parametrize(
    ("plan", "loss", "final", "norm"),
    [
        (Plan(precision="fp64"), torch.float64, torch.float64, None),
        (MIXED, torch.float32, torch.float32, torch.float32),
        (replace(MIXED, reduce_precision="bf16"), torch.float32, torch.bfloat16, torch.float32),
        (replace(MIXED, master_precision="bf16"), torch.float32, torch.bfloat16, torch.float32),
        (
            replace(HALF, gradient_precision="fp16", loss_scale=8.0),
            torch.float32,
            torch.float16,
            torch.float32,
        ),
    ],
)
def test_losses_gradients_and_norms_have_the_epsilon_of_what_they_were_computed_in(
    plan: Plan, loss: torch.dtype, final: torch.dtype, norm: torch.dtype | None
) -> None:
    reference = reference_of(plan)
    assert reference.epsilon(RecordKey("total")) == 0.0
    run_of(reference, steps=1)
    for kind in ("total", "mean", "whole", "evaluation"):
        assert reference.epsilon(RecordKey(kind)) == EPSILON[loss]
    assert reference.epsilon(RecordKey("final", name="0.weight")) == EPSILON[final]
    for kind in ("norm", "largest"):
        assert reference.epsilon(RecordKey(kind)) == (EPSILON[norm] if norm else 0.0)
    for kind in ("output", "clipped", "value", "state", "scale", "clip"):
        assert reference.epsilon(RecordKey(kind, name="0.weight")) == 0.0


@pytest.mark.parametrize(("plan", "clip"), [(HALF, 0.05), (HALF, None), (MIXED, 0.05), (MIXED, None)])
def test_the_bound_of_each_step(plan: Plan, clip: float | None) -> None:
    """The given one in all steps; else a third of the first norm, or each second one of twice its own."""
    scopes = run_of(reference_of(plan, clip=clip, scale=64.0), steps=3)
    steps = [scopes[RecordScope(step, WHOLE_STEP)] for step in range(3)]
    norms, bounds = ([float(step[RecordKey(kind)]) for step in steps] for kind in ("norm", "clip"))
    usual = (norms[0] + 1e-6) / 3 if clip is None else clip
    second = 2 * (norms[1] + 1e-6) if plan is HALF and clip is None else usual
    assert bounds == [usual, second, usual]
    scales = [float(step[RecordKey("scale")]) for step in steps]
    assert scales == ([64.0, 128.0, 128.0] if plan is HALF else [1.0] * 3)


def test_a_dynamic_scale_settles_at_half_of_the_largest_that_does_not_overflow() -> None:
    def settled(largest: float, *, overflows: bool = True) -> tuple[float, list[float]]:
        tried: list[float] = []

        def make(perturbation: Perturbation, clip: float | None, *, scale: float) -> Any:
            def run(batches: Any, microbatches: int) -> Iterator[None]:
                yield
                if scale > largest:
                    raise ModelError("the gradients are not finite")

            tried.append(scale)
            return SimpleNamespace(run=run, update=SimpleNamespace(overflowed=overflows))

        return settled_scale(make, None, [], 2), tried

    assert settled(2.0**20) == (2.0**15, [2.0**16])
    assert settled(2.0**13) == (2.0**12, [2.0**16, 2.0**15, 2.0**14, 2.0**13])
    assert settled(1.0)[0] == 0.5
    for largest, overflows in ((0.5, True), (2.0**13, False)):
        with pytest.raises(ModelError, match="not finite"):
            settled(largest, overflows=overflows)
