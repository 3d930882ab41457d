"""What a comparison allows, and which mistakes it names: division in float16, a step that was left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from plait.verification.candidate.instruction_checker import InstructionChecker
from plait.verification.candidate.step_comparison import DIVIDED_IN_FLOAT16, StepComparison
from plait.verification.expected_dtypes import NumberFormats
from plait.verification.reference.recording import RecordKey, RecordScope, Tolerance
from plait.verification.step_location import StepPhase


def test_a_gradient_that_was_divided_in_float16_is_not_tolerated() -> None:
    """Small gradients times the loss scale, divided by it where their digits are lost."""
    parameter, scale = nn.Parameter(torch.zeros(65)), 2.0**10
    expected = torch.cat([torch.linspace(-3e-6, 3e-6, 64), torch.ones(1)])
    lost = expected.to(torch.float16).float()
    scope, key = RecordScope(0), RecordKey("gradient", -1, "w")
    found: list[Any] = []

    def compared(location: Any, actual: Any, expected: Any, tolerance: Tolerance, **told: Any) -> bool:
        found.append((tolerance.allowed, [name for name, _ in told["alternatives"]]))
        return False

    def judged(phase: StepPhase, actual: torch.Tensor, dtype: torch.dtype, used_scale: float) -> Any:
        recording = SimpleNamespace(
            values={scope: {key: expected}},
            tolerances={scope: {key: Tolerance(1.0, 0.5)}},
            number=lambda step, name: {"scale": used_scale}[name],
        )
        formats = NumberFormats(torch.float32, torch.float32, torch.float32, dtype)
        own: Any = SimpleNamespace(
            recording=recording,
            resynchronizes=False,
            sequence=SimpleNamespace(parameters={"w": parameter}),
            formats=formats,
            findings=SimpleNamespace(compare=compared),
            options=SimpleNamespace(isolate=False),
            expected=lambda value, parameter, actual: (value, None),
        )
        own._was_divided_in_float16 = lambda *given: StepComparison._was_divided_in_float16(own, *given)
        StepComparison.compare(own, 0, phase, key, actual, "w", inherited=0.25)
        return found.pop()

    half, single = torch.float16, torch.float32
    assert judged(StepPhase.REDUCTION, lost, half, scale) == (0.0, [DIVIDED_IN_FLOAT16])
    for case in [
        (StepPhase.OPTIMIZER, lost, half, scale),
        (StepPhase.REDUCTION, lost, single, scale),
        (StepPhase.REDUCTION, lost, half, 1.0),
        (StepPhase.REDUCTION, expected, half, scale),
    ]:
        assert judged(*case) == (0.75, []), case


def test_a_parameter_that_the_last_step_left_as_it_was_is_named() -> None:
    key, expected = RecordKey("value", name="w"), torch.tensor([1.0, 2.0, 3.0])
    values = {RecordScope(1): torch.tensor([0.5, 1.5, 2.5]), RecordScope(2): expected}
    recording = SimpleNamespace(
        values={scope: {key: value} for scope, value in values.items()},
        tolerances={scope: {key: Tolerance(3.0, 0.1)} for scope in values},
        find=lambda scope, _: values.get(scope),
    )
    found: list[Any] = []

    def compared(location: Any, actual: Any, expected: Any, *_: Any, **told: Any) -> bool:
        found.extend(told["alternatives"])
        return True

    own: Any = SimpleNamespace(
        step=3,
        evaluating=False,
        recording=recording,
        weights=SimpleNamespace(box=lambda name: SimpleNamespace(of=lambda tensor: tensor)),
        comparison=SimpleNamespace(resynchronizes=False, findings=SimpleNamespace(compare=compared)),
        options=SimpleNamespace(isolate=False),
    )
    InstructionChecker._compare_parameter(own, "w", torch.tensor([1.05, 1.5, 2.5]), 0)
    ((text, alternative),) = found
    assert text == "what differs is as it was before the last step of the optimizer"
    assert alternative.tolist() == [1.0, 1.5, 2.5]
