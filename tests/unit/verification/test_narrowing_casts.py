"""A layer that computes in float32 inside, in float64: no false alarm, and others are compared as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from verification_cases import verify_here

from parity.case import Case as ParityCase
from parity.cases import GPT2_VOCAB, draw_contexts
from parity.contexts import HIDDEN, MLP, Attention, Start
from parity.pairs import in_quick
from plait.engine.pipeline.stage import Stage
from plait.plan.plan import Plan
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.reference.rounding_errors import NarrowingCasts, Perturbation
from plait.verification.report import VerificationReport
from plait.verification.verify import build_report
from zoo.patching import each_alone


class SingleNorm(nn.Module):
    """A norm that computes in float32, its weight and the sum of its gradient over positions too (Gemma)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.2, 0.2, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return x + (normed * (1.0 + self.weight.float())).type_as(x)


def build() -> nn.Module:
    layers = [Attention(True, None, 6), SingleNorm(), MLP(), SingleNorm()]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        return nn.Sequential(Start(), *layers, nn.Linear(HIDDEN, GPT2_VOCAB))


SINGLE = ParityCase("single", build, draw_contexts(GPT2_VOCAB))
RING = Plan(cp=2, microbatches=2)


def case_of(steps: int = 2) -> Case:
    options = VerifyOptions(steps=steps, perturbations=1)
    batches = SINGLE.batches(4, steps, torch.float64)
    return Case(build(), SINGLE.loss, batches, options, device="cpu", timeout=60.0)


def test_parts_of_a_sequence_with_narrowing_casts_are_equal(thread_ranks: Any) -> None:
    """A sum over positions in float32, which each rank has a part of, has other digits."""
    case = case_of()
    report = build_report(thread_ranks.run(verify_rank, case, RING, ranks=2), RING, case.options)
    assert report, report
    assert report.used < 0.5


@contextmanager
def off_by(layer: int, error: float) -> Iterator[None]:
    """The output of a layer is off by a factor."""
    original = Stage.forward

    def run(self: Stage, microbatch: int, number: int) -> None:
        original(self, microbatch, number)
        if number == layer:
            self.values[microbatch].data.mul_(1 + error)

    with patch.object(Stage, "forward", each_alone(run)):
        yield


def report_with(layer: int, error: float) -> VerificationReport:
    with off_by(layer, error):
        return verify_here(case_of(1))


@pytest.mark.parametrize(
    ("layer", "error"),
    in_quick([(0, 1e-12), (1, 1e-12), (2, 1e-5), (3, 1e-12)], (1, 1e-12), (2, 1e-5)),
)
def test_mistakes_around_and_in_layers_with_narrowing_casts_are_found(layer: int, error: float) -> None:
    report = report_with(layer, error)
    assert report.first is not None
    assert report.first.difference.location.layer == layer
    assert report.first.difference.allowed < error * report.first.difference.size


def noted(dtype: torch.dtype | None, run: Any, number: int = 0) -> tuple[bool, Tensor]:
    casts = NarrowingCasts(dtype, Perturbation(number))
    with casts:
        result = run()
    return casts.found, result


WIDE = torch.linspace(1, 2, 9, dtype=torch.float64)


def test_a_cast_to_less_digits_than_the_layers_have_is_noted() -> None:
    assert noted(torch.float64, WIDE.float)[0]
    assert noted(torch.float64, lambda: WIDE.softmax(0, dtype=torch.float32))[0]
    assert noted(torch.float32, WIDE.float().bfloat16)[0]
    assert not noted(torch.float64, lambda: WIDE * 2)[0]
    assert not noted(torch.float32, WIDE.float)[0], "float64 is no dtype of these layers"
    assert not noted(torch.bfloat16, WIDE.float().bfloat16)[0]
    assert not noted(None, WIDE.float)[0]


def test_casts_in_the_context_for_casts_that_belong_to_a_computation_are_not_noted() -> None:
    casts = NarrowingCasts(torch.float64, Perturbation(1))
    value = torch.linspace(0.1, 1, 5, dtype=torch.float64)
    with casts, casts.unnoted():
        assert torch.equal(value.float(), value.clone().float())
    assert not casts.found
    with casts:
        value.float()
    assert casts.found


def test_a_narrowing_cast_in_a_backward_is_noted() -> None:
    x = WIDE.float().requires_grad_()
    loss = (x.double() * WIDE).sum()
    assert noted(torch.float64, lambda: loss.backward() or x.grad)[0]


def test_a_perturbed_run_has_rounding_errors_of_the_narrower_dtype() -> None:
    _, plain = noted(torch.float64, WIDE.float)
    _, perturbed = noted(torch.float64, WIDE.float, number=1)
    assert torch.equal(plain, WIDE.float())
    apart = (perturbed - plain).abs().max()
    assert 0 < float(apart) <= 3 * torch.finfo(torch.float32).eps * 2
