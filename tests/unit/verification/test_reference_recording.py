"""What a recording allows to be missed, and how two tensors are told apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import ModelError
from plait.verification.location import WHOLE_STEP, RecordKey, RecordScope
from plait.verification.reference_recording import (
    LEAST_EPSILONS,
    LOSS_KINDS,
    MARGIN,
    MARGIN_16_BIT,
    SIZE_FLOOR,
    ReferenceRecording,
    largest_difference,
    largest_magnitude,
)

MOMENT = RecordScope(0, 0)
OUTPUT = RecordKey("output", 0, "0")


FINE = 2.0**-52
"""Machine epsilon of float64."""


def recorded(**tensors: Tensor) -> ReferenceRecording:
    """Outputs of layers 0, 1, … in one moment."""
    recording = ReferenceRecording()
    recording.add(MOMENT, {RecordKey("output", i, "0"): tensor for i, tensor in enumerate(tensors.values())})
    return recording


def test_at_first_nothing_may_be_missed() -> None:
    recording = recorded(a=torch.tensor([1.0, -4.0]))
    assert recording.tolerances[MOMENT] == {OUTPUT: (4.0, 0.0)}


def test_what_is_small_among_its_kind_is_measured_against_the_largest() -> None:
    recording = ReferenceRecording()
    tensors = {
        RecordKey("final", name="big"): torch.tensor([8.0]),
        RecordKey("final", name="none"): torch.zeros(3),
    }
    recording.add(MOMENT, tensors | {RecordKey("value", name="none"): torch.tensor([0.125])})
    sizes = {
        key.name + "/" + key.kind: tolerance.size for key, tolerance in recording.tolerances[MOMENT].items()
    }
    assert sizes == {"big/final": 8.0, "none/final": SIZE_FLOOR * 8.0, "none/value": 0.125}


def test_a_few_roundings_are_allowed_in_any_case() -> None:
    tensor = torch.tensor([2.0], dtype=torch.float64)
    recording = recorded(a=tensor)
    recording.widen(MOMENT, {OUTPUT: tensor})
    assert recording.tolerances[MOMENT][OUTPUT] == (2.0, LEAST_EPSILONS * 2.0**-52 * 2.0)


def test_a_shaken_run_that_is_off_allows_a_multiple_of_that() -> None:
    tensor = torch.tensor([2.0, 1.0], dtype=torch.float64)
    recording = recorded(a=tensor)
    recording.widen(MOMENT, {OUTPUT: tensor + torch.tensor([2.0**-20, -(2.0**-30)], dtype=torch.float64)})
    assert recording.tolerances[MOMENT][OUTPUT] == (2.0, MARGIN * 2.0**-20)


@given(st.lists(st.floats(0, 1e-3), min_size=1, max_size=5))
def test_bounds_only_grow(errors: list[float]) -> None:
    tensor = torch.tensor([1.0], dtype=torch.float64)
    recording, allowed = recorded(a=tensor), 0.0
    for error in errors:
        recording.widen(MOMENT, {OUTPUT: tensor + error})
        assert recording.tolerances[MOMENT][OUTPUT].allowed >= allowed
        allowed = recording.tolerances[MOMENT][OUTPUT].allowed
    assert allowed >= MARGIN * max(float(tensor + error - tensor) for error in errors)


@pytest.mark.parametrize(("dtype", "margin"), [(torch.bfloat16, MARGIN_16_BIT), (torch.float32, MARGIN)])
def test_of_16_bit_numbers_less_is_allowed(dtype: torch.dtype, margin: float) -> None:
    tensor = torch.tensor([1.0, 0.5], dtype=dtype)
    recording = recorded(a=tensor)
    recording.widen(MOMENT, {OUTPUT: tensor + torch.tensor([0.125, 0.0], dtype=dtype)})
    assert recording.tolerances[MOMENT][OUTPUT] == (1.0, margin * 0.125)


def test_what_is_made_of_the_loss_keeps_the_epsilon_of_the_loss() -> None:
    one = {RecordKey(kind): torch.tensor(1.0, dtype=torch.float64) for kind in ("total", "mean", "norm")}
    recording = ReferenceRecording()
    recording.add(MOMENT, one)
    recording.widen(MOMENT, one, lambda key: 2.0**-23 if key.kind in LOSS_KINDS else 0.0)
    allowed = {key.kind: tolerance.allowed for key, tolerance in recording.tolerances[MOMENT].items()}
    assert allowed == {
        "total": LEAST_EPSILONS * 2.0**-23,
        "mean": LEAST_EPSILONS * 2.0**-23,
        "norm": LEAST_EPSILONS * FINE,
    }


def test_whole_numbers_may_not_be_missed() -> None:
    tokens = torch.tensor([1, 5])
    recording = recorded(tokens=tokens)
    recording.widen(MOMENT, {OUTPUT: tokens})
    assert recording.tolerances[MOMENT][OUTPUT] == (5.0, 0.0)


def test_a_mask_may_flow_between_layers() -> None:
    mask = torch.tensor([True, False])
    recording = recorded(mask=mask, none=torch.zeros(2, dtype=torch.bool), empty=torch.empty(0))
    recording.widen(MOMENT, {OUTPUT: mask})
    assert recording.tolerances[MOMENT][OUTPUT] == (1.0, 0.0)


def test_an_infinity_that_is_meant_does_not_allow_everything() -> None:
    mask = torch.tensor([0.0, -torch.inf, 2.0], dtype=torch.float64)
    recording = recorded(mask=mask)
    recording.widen(MOMENT, {OUTPUT: mask})
    assert recording.tolerances[MOMENT][OUTPUT] == (2.0, LEAST_EPSILONS * 2.0**-52 * 2.0)


def test_a_shaken_run_without_numbers_does_not_allow_everything() -> None:
    """It overflowed, or divided by zero: that says nothing about what rounding explains."""
    tensor = torch.tensor([1.0], dtype=torch.float64)
    recording = recorded(a=tensor)
    for broken in (torch.nan, torch.inf):
        recording.widen(MOMENT, {OUTPUT: tensor * broken})
    assert math.isfinite(recording.tolerances[MOMENT][OUTPUT].allowed)


@pytest.mark.parametrize("kind", ["total", "mean", "final", "norm"])
def test_results_that_are_nan_are_refused(kind: str) -> None:
    recording = ReferenceRecording()
    recording.add(RecordScope(0, 1), {RecordKey("output", 2, "0"): torch.tensor([1.0, torch.nan])})
    with pytest.raises(ModelError) as caught:
        recording.add(RecordScope(0, WHOLE_STEP), {RecordKey(kind): torch.tensor(torch.nan)})
    told = f"the reference's {kind} is NaN, first in the output of layer 2 (step 1, micro-batch 1)"
    assert str(caught.value) == f"{told}: there is nothing to compare."


def test_outputs_are_measured_against_themselves() -> None:
    """Layers have little to do with each other; gradients of one tensor's place have."""
    recording = ReferenceRecording()
    big, small = torch.tensor([8.0]), torch.tensor([2.0**-20])
    recording.add(
        MOMENT,
        {RecordKey(kind, i, "0"): t for kind in ("output", "gradient") for i, t in enumerate((big, small))},
    )
    sizes = {(key.kind, key.layer): tolerance.size for key, tolerance in recording.tolerances[MOMENT].items()}
    assert (sizes["output", 1], sizes["gradient", 1]) == (2.0**-20, SIZE_FLOOR * 8.0)


def test_complex_numbers_differ_by_their_parts() -> None:
    one, other = torch.tensor([1 + 1j, 2.0]), torch.tensor([1 + 3j, 2.0])
    assert largest_difference(one, other) == 2.0
    assert largest_magnitude(other) == 3.0


def test_exact_means_whole_numbers_but_for_the_norm() -> None:
    recording, whole = ReferenceRecording(), RecordScope(0, WHOLE_STEP)
    recording.add(whole, {RecordKey("norm"): torch.tensor(2.0).sqrt(), RecordKey("clip"): torch.tensor(0.1)})
    recording.require_exact()
    assert recording.tolerances[whole][RecordKey("clip")].allowed == 0.0
    assert 0.0 < recording.tolerances[whole][RecordKey("norm")].allowed < 1e-11


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (RecordKey("output", 3, "0"), "the reference's output of layer 3 holds 0.1"),
        (RecordKey("contribution", 1, "mlp.weight"), "the reference's contribution of layer 1 (mlp.weight)"),
        (RecordKey("final", name="mlp.weight"), "the reference's final (mlp.weight) holds 0.1"),
        (RecordKey("total"), "the reference's total holds 0.1"),
    ],
)
def test_what_is_not_whole_is_named(key: RecordKey, named: str) -> None:
    recording = ReferenceRecording()
    recording.add(MOMENT, {key: torch.tensor([1.0, 0.1])})
    with pytest.raises(ModelError) as caught:
        recording.require_exact()
    assert str(caught.value).startswith(named)


def test_micro_batches_are_counted_by_step() -> None:
    recording = ReferenceRecording()
    for scope in (
        RecordScope(0, 0),
        RecordScope(0, 1),
        RecordScope(0, WHOLE_STEP),
        RecordScope(1, 0),
        RecordScope(2, WHOLE_STEP),
    ):
        recording.add(scope, {})
    assert [recording.microbatches(step) for step in range(3)] == [2, 1, 0]


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("actual", "expected", "expected_difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.5, 4.0], 2.0),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [NAN, 1.25], 0.25),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([INF, 1.0], [INF, 3.0], 2.0),
        ([INF], [-INF], INF),
        ([1.0], [-INF], INF),
        ([INF], [NAN], INF),
        ([True, False], [True, False], 0.0),
        ([True, False], [True, True], 1.0),
        ([3, -4], [3, 4], 8.0),
        ([], [], 0.0),
        (2.0, 1.0, 1.0),
    ],
)
def test_the_largest_difference(actual: object, expected: object, expected_difference: float) -> None:
    assert largest_difference(torch.tensor(actual), torch.tensor(expected)) == expected_difference


def test_a_difference_over_dtypes_is_that_of_the_values() -> None:
    assert largest_difference(torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.float64)) == 0.0
    assert (
        largest_difference(torch.tensor([1.0]), torch.tensor([1 + 2.0**-40], dtype=torch.float64)) == 2.0**-40
    )


@pytest.mark.parametrize(
    ("tensor", "largest"),
    [
        (torch.tensor([1.0, -3.0]), 3.0),
        (torch.tensor([-7, 2]), 7.0),
        (torch.tensor(-0.5), 0.5),
        (torch.empty(0), 0.0),
        (torch.tensor([False, True]), 1.0),
        (torch.tensor([-torch.inf, 2.0]), 2.0),
        (torch.tensor([-torch.inf]), 0.0),
    ],
)
def test_the_size_of_a_tensor_is_its_largest_number(tensor: Tensor, largest: float) -> None:
    assert largest_magnitude(tensor) == largest
