"""Wrong runs of one rank that one number tells from right ones: each is seen, where it is, and counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from verification_cases import mlp, mlp_case, verify_here

from plait.engine import Engine
from plait.plan.plan import Plan
from plait.verification.candidate.step_comparison import LOSS_SCALE
from plait.verification.step_location import Location, StepPhase

PARAMETERS = len(list(mlp().parameters()))
PLAN = Plan(microbatches=2)
MIXED = Plan(microbatches=2, precision="bf16", master_precision="fp32")
HALF = Plan(microbatches=2, precision="fp16", master_precision="fp32")
Broken = Callable[..., None]
Damage = Callable[[Engine], None]


def gradients_of(engine: Engine) -> list[Tensor]:
    return [one.grad for one in engine.parameters() if one.grad is not None]


def of_wrong_norm(engine: Engine) -> None:
    """Its gradients are clipped by the wrong norm, too."""
    clip = engine.clip_grad_norm_

    def wrong(bound: float, *kind: float) -> Tensor:
        norm = 1.5 * clip(float("inf"), *kind)
        for gradient in gradients_of(engine):
            gradient.mul_(min(1.0, bound / float(norm)))
        return norm

    engine.clip_grad_norm_ = wrong  # type: ignore[method-assign]


def test_a_norm_is_compared_in_each_step_and_once_where_it_differs(broken: Broken) -> None:
    broken(of_wrong_norm)
    plainly, isolated = (verify_here(mlp_case(steps=3, isolate=isolate)) for isolate in (False, True))
    assert plainly.first is not None
    assert plainly.first.difference.location.phase is StepPhase.NORM
    for report in (plainly, isolated):
        norms = report.tallies[StepPhase.NORM]
        assert (norms.compared, norms.different) == (3, 3)
    above_norm = 2 + 1 + 2  # calls with a bound above the norm
    assert plainly.tallies[StepPhase.CLIP].compared == (above_norm + 3) * PARAMETERS
    assert isolated.tallies[StepPhase.CLIP].compared == above_norm * PARAMETERS
    assert isolated.different == 3


def test_all_norms_of_a_right_run_are_compared(broken: Broken) -> None:
    broken()
    report = verify_here(mlp_case(steps=3, isolate=True))
    assert report, report
    assert report.tallies[StepPhase.NORM].compared == 3 + 2 + 3
    assert report.tallies[StepPhase.CLIP].compared == (5 + 3) * PARAMETERS
    assert report.tallies[StepPhase.OPTIMIZER].compared == 3 * (1 + 3) * PARAMETERS + 2


def updates_what_overflowed(engine: Engine) -> None:
    """`Engine.step` updates parameters by gradients that are not finite."""
    step = engine.step

    def wrong(optimizer: torch.optim.Optimizer, *arguments: Any) -> Tensor:
        norm = step(optimizer, *arguments)
        if not bool(norm.isfinite()):
            with torch.no_grad():
                list(engine.parameters())[1].add_(1.0)
        return norm

    engine.step = wrong  # type: ignore[method-assign]


def halves(engine: Engine, when: Callable[[bool], bool]) -> None:
    """Set the loss scale to half after steps with norms that are finite, or are not."""
    step = engine.step

    def wrong(optimizer: torch.optim.Optimizer, *arguments: Any) -> Tensor:
        norm = step(optimizer, *arguments)
        if when(bool(norm.isfinite())):
            engine._runner.scale.value /= 2
        return norm

    engine.step = wrong  # type: ignore[method-assign]


def starts_smaller(engine: Engine) -> None:
    engine._runner.scale.value /= 2


def never_settles(engine: Engine) -> None:
    """Takes nothing from a run state."""
    original = type(engine)
    kept = type("Kept", (original,), {"run_state": property(original.run_state.fget, lambda *_: None)})
    engine.__class__ = kept


SCALED = replace(MIXED, loss_scale=1024.0)


@pytest.mark.parametrize(
    ("plan", "damage", "step", "phase", "name", "cause"),
    [
        pytest.param(
            *(HALF, updates_what_overflowed, 2, StepPhase.OPTIMIZER, "0.bias", "though the gradients"),
            marks=pytest.mark.full,
        ),
        (SCALED, updates_what_overflowed, 2, StepPhase.OPTIMIZER, "0.bias", "though the gradients"),
        (HALF, lambda e: halves(e, lambda finite: not finite), 2, StepPhase.LOSS_GRADIENT, LOSS_SCALE, ""),
        pytest.param(
            *(SCALED, lambda e: halves(e, lambda finite: not finite), 2),
            *(StepPhase.LOSS_GRADIENT, LOSS_SCALE, ""),
            marks=pytest.mark.full,
        ),
        (HALF, lambda e: halves(e, lambda finite: finite), 1, StepPhase.LOSS_GRADIENT, LOSS_SCALE, ""),
        (HALF, starts_smaller, 0, StepPhase.INITIAL, LOSS_SCALE, ""),
        pytest.param(SCALED, starts_smaller, 0, StepPhase.INITIAL, LOSS_SCALE, "", marks=pytest.mark.full),
        pytest.param(HALF, never_settles, 0, StepPhase.LOSS_GRADIENT, LOSS_SCALE, "", marks=pytest.mark.full),
    ],
)
def test_a_step_that_overflows_and_the_loss_scale_are_compared(
    broken: Broken, plan: Plan, damage: Damage, step: int, phase: StepPhase, name: str, cause: str
) -> None:
    broken(damage)
    report = verify_here(mlp_case(mode="native"), plan)
    assert report.first is not None
    location = report.first.difference.location
    assert (location.step, location.phase, location.name) == (step, phase, name), report
    assert cause in report.first.cause


def test_of_a_right_run_in_16_bits_everything_is_compared() -> None:
    """With a loss scale also what must not change in a step that overflows, and the scale itself."""
    for plan, scales, updates in ((MIXED, 0, 0), (SCALED, 1, 1), (HALF, 1, 1)):
        report = verify_here(mlp_case(mode="native"), plan)
        assert report, report
        after_overflow = updates * 4 * PARAMETERS
        loose = 0 if plan is HALF else 1
        assert report.tallies[StepPhase.OPTIMIZER].compared == 2 * 4 * PARAMETERS + after_overflow + loose
        assert report.tallies[StepPhase.NORM].compared == 2 + 3 * loose
        assert report.tallies[StepPhase.INITIAL].compared == PARAMETERS + scales
        seeds = report.tallies[StepPhase.LOSS_GRADIENT].compared
        assert seeds == 2 * PLAN.microbatches + 3 * scales


def normed() -> nn.Sequential:
    """`mlp` with an RMS norm of plain torch."""
    return nn.Sequential(mlp()[0], nn.RMSNorm(8, eps=1e-6), *mlp()[2:])


def norms_in_16_bits(model: nn.Sequential) -> nn.Sequential:
    """The norm adds up its mean square in the dtype of what it is given."""

    def coarse(self: nn.RMSNorm, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return (self.weight * x.float() * torch.rsqrt(mean.float() + 1e-6)).to(x.dtype)

    norm = copy.deepcopy(model[1])
    norm.forward = MethodType(coarse, norm)
    return nn.Sequential(model[0], norm, *model[2:])


def test_a_norm_that_computes_in_16_bits_is_seen(broken: Broken) -> None:
    broken(replace=norms_in_16_bits)
    report = verify_here(replace(mlp_case(mode="native", steps=1, rows=16), model=normed()), MIXED)
    assert report.first is not None
    location = report.first.difference.location
    assert (location.phase, location.layer) == (StepPhase.FORWARD, 1), report
    assert "something in it is computed in 16 bits" in report.first.cause, report


def in_bfloat16_on_the_way(engine: Engine) -> None:
    """A summed gradient passes through bfloat16."""
    run = engine.forward_backward

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        mean = run(*arguments, **options)
        gradient = next(iter(engine.parameters())).grad
        assert gradient is not None
        gradient.copy_(gradient.bfloat16())
        return mean

    engine.forward_backward = wrong  # type: ignore[method-assign]


def test_a_rounding_of_gradients_within_the_tolerance_of_16_bits_is_seen(broken: Broken) -> None:
    broken(in_bfloat16_on_the_way)
    case = mlp_case(mode="native", rows=16, isolate=True)
    for plan, differs in ((MIXED, True), (replace(MIXED, gradient_precision="bf16"), False)):
        report = verify_here(case, replace(plan, microbatches=4))
        assert bool(report) is not differs, report
        if report.first is not None:
            location = report.first.difference.location
            assert (location.step, location.phase, location.name) == (0, StepPhase.REDUCTION, "0.weight")
            assert "it was rounded to bfloat16 on the way" in report.first.cause
            assert report.different == 2


def forgets(kind: str) -> Damage:
    """An engine whose optimizer, or whose `zero_grad`, leaves out a parameter."""

    def damage(engine: Engine) -> None:
        groups = engine.parameter_groups

        def wrong(*arguments: Any) -> list[dict[str, Any]]:
            made = groups(*arguments)
            if kind == "left out":
                made[0]["params"] = made[0]["params"][1:]
            else:
                made[1]["weight_decay"] = made[0]["weight_decay"]
            return made

        engine.parameter_groups = wrong  # type: ignore[method-assign]

    return damage


@pytest.mark.parametrize(
    ("kind", "name", "cause", "different"),
    [("left out", "0.weight", "it was not updated", 1 + 3), ("vectors decay", "0.bias", "", 4)],
)
def test_groups_of_the_optimizer_are_compared_by_what_they_do(
    broken: Broken, kind: str, name: str, cause: str, different: int
) -> None:
    broken(forgets(kind))
    report = verify_here(mlp_case(steps=1, isolate=True))
    assert report.first is not None
    assert report.first.difference.location.phase is StepPhase.OPTIMIZER
    assert report.first.difference.location.name == name
    assert cause in report.first.cause
    assert report.tallies[StepPhase.OPTIMIZER].different == different


class TwiceInTheBackward(nn.Linear):
    """Gives what a linear gives, and twice the gradient of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, 2 * self.weight - self.weight.detach(), self.bias)


def with_twice(model: nn.Sequential) -> nn.Sequential:
    wrong = TwiceInTheBackward(*reversed(model[3].weight.shape))
    wrong.weight, wrong.bias = model[3].weight, model[3].bias
    return nn.Sequential(*model[:3], wrong)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_wrong_weight_gradient_is_counted_once_a_micro_batch_where_it_is_replaced(
    broken: Broken, isolate: bool
) -> None:
    broken(replace=with_twice)
    report = verify_here(mlp_case(steps=2, isolate=isolate))
    assert report.first is not None
    assert report.first.difference.location == Location(0, StepPhase.WEIGHT_GRADIENT, 3, 0, "3.weight")
    assert "it was added twice" in report.first.cause
    different = {phase: tally.different for phase, tally in report.tallies.items() if tally.different}
    if isolate:
        assert different == {StepPhase.WEIGHT_GRADIENT: 2 * PLAN.microbatches}
    else:  # the gradient that was found is that to which the next is added
        assert different[StepPhase.WEIGHT_GRADIENT] >= 2 * PLAN.microbatches
        assert {StepPhase.REDUCTION, StepPhase.NORM} <= different.keys()


def of_another_loss(engine: Engine) -> None:
    """Its mean loss is a little off, and its evaluation more."""
    train, evaluate = engine.forward_backward, engine.evaluate
    engine.forward_backward = lambda *given: train(*given) * (1 + 1e-9)  # type: ignore[method-assign]
    engine.evaluate = lambda *given: evaluate(*given) * (1 + 1e-6)  # type: ignore[method-assign]


def test_mean_losses_are_compared_in_each_step_and_in_the_evaluation(broken: Broken) -> None:
    broken(of_another_loss)
    report = verify_here(mlp_case(steps=2))
    assert report.first is not None
    assert report.first.difference.location == Location(0, StepPhase.MEAN_LOSS, name="")
    different = {phase: tally.different for phase, tally in report.tallies.items() if tally.different}
    assert different == {StepPhase.MEAN_LOSS: 2, StepPhase.EVALUATION: 1}
    (last,) = [one for one in report.others if one.location.phase is StepPhase.EVALUATION]
    assert (last.location.step, last.location.evaluating) == (2, True)
