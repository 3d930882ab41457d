"""What a recording allows to be missed, and how two tensors are told apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import ModelError
from plait.verification.reference.integer_mode import GRAIN
from plait.verification.reference.recording import (
    LEAST_EPSILONS,
    LOSS_KINDS,
    MARGIN,
    MARGIN_16_BIT,
    MARGIN_OF_UPDATES,
    NORM_TOLERANCE,
    SIZE_FLOOR,
    ReferenceRecording,
    largest_difference,
    largest_magnitude,
)
from plait.verification.step_location import WHOLE_STEP, RecordKey, RecordScope

MOMENT = RecordScope(0, 0)
OUTPUT = RecordKey("output", 0, "0")


FINE = 2.0**-52
"""Machine epsilon of float64."""


def recorded(**tensors: Tensor) -> ReferenceRecording:
    """Outputs of layers 0, 1, … in one moment."""
    recording = ReferenceRecording()
    recording.add(MOMENT, {RecordKey("output", i, "0"): tensor for i, tensor in enumerate(tensors.values())})
    return recording


def test_a_recording_without_perturbed_runs_has_zero_tolerance() -> None:
    recording = recorded(a=torch.tensor([1.0, -4.0]))
    assert recording.tolerances[MOMENT] == {OUTPUT: (4.0, 0.0)}


def test_small_tensors_are_measured_against_the_largest_of_their_kind() -> None:
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


@given(st.lists(st.floats(0, 1e-3), min_size=1, max_size=5))
def test_tolerances_only_grow_with_perturbed_runs(errors: list[float]) -> None:
    tensor = torch.tensor([1.0], dtype=torch.float64)
    recording, allowed = recorded(a=tensor), 0.0
    for error in errors:
        recording.widen(MOMENT, {OUTPUT: tensor + error})
        assert recording.tolerances[MOMENT][OUTPUT].allowed >= allowed
        allowed = recording.tolerances[MOMENT][OUTPUT].allowed
    assert allowed >= MARGIN * max(float(tensor + error - tensor) for error in errors)


def test_tolerances_of_loss_values_use_the_epsilon_of_the_loss() -> None:
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


@pytest.mark.parametrize(
    ("kind", "dtype", "epsilon", "margin", "least"),
    [
        ("output", torch.float64, 0.0, MARGIN, LEAST_EPSILONS * FINE),
        ("final", torch.float32, 0.0, MARGIN, LEAST_EPSILONS * 2.0**-23),
        ("final", torch.float32, 2.0**-7, MARGIN_16_BIT, MARGIN_16_BIT * 2.0**-7),
        ("final", torch.float64, 2.0**-23, MARGIN, LEAST_EPSILONS * 2.0**-23),
        ("value", torch.float64, 0.0, MARGIN_OF_UPDATES, LEAST_EPSILONS * FINE),
        ("state", torch.float32, 0.0, MARGIN_OF_UPDATES, LEAST_EPSILONS * 2.0**-23),
        ("value", torch.float16, 0.0, MARGIN_16_BIT, MARGIN_16_BIT * 2.0**-10),
        ("state", torch.bfloat16, 0.0, MARGIN_16_BIT, MARGIN_16_BIT * 2.0**-7),
    ],
)
def test_how_much_is_allowed_of_each_kind_and_dtype(
    kind: str, dtype: torch.dtype, epsilon: float, margin: float, least: float
) -> None:
    """At least some epsilons of its size; of a larger deviation of a perturbed run a multiple; the larger."""
    key, tensor = RecordKey(kind, name="a"), torch.tensor([4.0, 1.0], dtype=dtype)
    recording = ReferenceRecording()
    recording.add(MOMENT, {key: tensor})
    recording.widen(MOMENT, {key: tensor}, lambda _: epsilon)
    assert recording.tolerances[MOMENT][key] == (4.0, least * 4.0)
    for off in (2.0, 1.0):
        recording.widen(MOMENT, {key: tensor + off}, lambda _: epsilon)
        assert recording.tolerances[MOMENT][key] == (4.0, margin * 2.0)


def test_integer_tensors_have_no_tolerance() -> None:
    tokens = torch.tensor([1, 5])
    recording = recorded(tokens=tokens)
    recording.widen(MOMENT, {OUTPUT: tokens})
    assert recording.tolerances[MOMENT][OUTPUT] == (5.0, 0.0)


def test_a_mask_may_flow_between_layers() -> None:
    mask = torch.tensor([True, False])
    recording = recorded(mask=mask, none=torch.zeros(2, dtype=torch.bool), empty=torch.empty(0))
    recording.widen(MOMENT, {OUTPUT: mask})
    assert recording.tolerances[MOMENT][OUTPUT] == (1.0, 0.0)


def test_an_infinite_mask_value_does_not_make_the_tolerance_infinite() -> None:
    mask = torch.tensor([0.0, -torch.inf, 2.0], dtype=torch.float64)
    recording = recorded(mask=mask)
    recording.widen(MOMENT, {OUTPUT: mask})
    assert recording.tolerances[MOMENT][OUTPUT] == (2.0, LEAST_EPSILONS * 2.0**-52 * 2.0)


def test_a_perturbed_run_with_nan_or_infinity_leaves_the_tolerance_finite() -> None:
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
    for outputs, since in (
        ({}, ", though no output of a layer is (is the loss's weight zero?)"),
        (
            {RecordKey("output", -1, "0"): torch.tensor(torch.nan)},
            ", first in the batch (step 1, micro-batch 0)",
        ),
    ):
        recording = ReferenceRecording()
        recording.add(RecordScope(0, 0), outputs | {RecordKey("whole"): torch.tensor(torch.nan)})
        with pytest.raises(ModelError) as caught:
            recording.add(RecordScope(0), {RecordKey(kind): torch.tensor(torch.nan)})
        assert str(caught.value) == f"the reference's {kind} is NaN{since}: there is nothing to compare."


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


def test_tensors_of_one_family_have_a_common_floor_of_size() -> None:
    def sized(big: RecordKey, small: RecordKey) -> float:
        recording = ReferenceRecording()
        recording.add(MOMENT, {big: torch.tensor([8.0]), small: torch.zeros(1)})
        assert recording.tolerances[MOMENT][big].size == 8.0
        return recording.tolerances[MOMENT][small].size

    for one, other, alike in (
        (RecordKey("state", name="a/exp_avg"), RecordKey("state", name="b/exp_avg"), True),
        (RecordKey("state", name="a/step"), RecordKey("state", name="a/exp_avg"), False),
        (RecordKey("contribution", 0, "a"), RecordKey("contribution", 1, "b"), True),
        (RecordKey("output", 0, "0"), RecordKey("output", 0, "1"), False),
        (RecordKey("inside", 0, "a"), RecordKey("inside", 0, "b"), False),
        (RecordKey("inside", 0, "a"), RecordKey("inside", 1, "a"), False),
        (RecordKey("gradient", 0, "0"), RecordKey("gradient", 1, "0"), True),
        (RecordKey("gradient", 0, "0"), RecordKey("gradient", 0, "1"), False),
        (RecordKey("final", name="a"), RecordKey("clipped", name="a"), False),
    ):
        assert sized(one, other) == (SIZE_FLOOR * 8.0 if alike else 0.0)


def test_complex_numbers_differ_by_their_parts() -> None:
    one, other = torch.tensor([1 + 1j, 2.0]), torch.tensor([1 + 3j, 2.0])
    assert largest_difference(one, other) == 2.0
    assert largest_magnitude(other) == 3.0


def test_exact_mode_requires_exact_values_of_all_but_the_norm() -> None:
    recording, whole = ReferenceRecording(), RecordScope(0, WHOLE_STEP)
    odd = {RecordKey(kind): torch.tensor(0.1) for kind in ("clip", "scale", "evaluation")}
    fine = {RecordKey(kind, name="a"): torch.tensor(GRAIN / 8) for kind in ("clipped", "value", "state")}
    recording.add(whole, {RecordKey("norm"): torch.tensor(2.0).double().sqrt(), **odd, **fine})
    recording.require_exact()
    allowed = {key.kind: tolerance.allowed for key, tolerance in recording.tolerances[whole].items()}
    assert allowed.pop("norm") == pytest.approx(NORM_TOLERANCE * math.sqrt(2.0))
    assert set(allowed.values()) == {0.0}
    for kind in ("final", "output"):
        recording = ReferenceRecording()
        recording.add(MOMENT, {RecordKey(kind, 0, "a"): torch.tensor(GRAIN)})
        recording.require_exact()
        recording.add(whole, {RecordKey(kind, 0, "a"): torch.tensor(GRAIN / 2)})
        with pytest.raises(ModelError):
            recording.require_exact()


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (RecordKey("output", 3, "0"), "the reference's output of layer 3 holds 0.1"),
        (RecordKey("contribution", 1, "mlp.weight"), "the reference's contribution of layer 1 (mlp.weight)"),
        (RecordKey("final", name="mlp.weight"), "the reference's final (mlp.weight) holds 0.1"),
        (RecordKey("total"), "the reference's total holds 0.1"),
    ],
)
def test_a_recorded_tensor_with_inexact_values_is_named_in_exact_mode(key: RecordKey, named: str) -> None:
    recording = ReferenceRecording()
    recording.add(MOMENT, {key: torch.tensor([1.0, 0.1])})
    with pytest.raises(ModelError) as caught:
        recording.require_exact()
    assert str(caught.value).startswith(named)


def test_micro_batches_are_counted_by_step() -> None:
    recording = ReferenceRecording()
    recording.add(RecordScope(0, 2, evaluated=True), {RecordKey("total"): torch.tensor(2.5)})
    assert recording.find(RecordScope(0, 2), RecordKey("total")) is None
    assert recording.find(RecordScope(0, 2, evaluated=True), RecordKey("mean")) is None
    assert recording.find(RecordScope(0, 2, evaluated=True), RecordKey("total")) is not None
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


DIFFERENCES: list[tuple[object, object, float]] = [
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
]


def test_the_largest_difference_of_two_tensors_is_the_listed_one() -> None:
    for actual, expected, difference in DIFFERENCES:
        assert largest_difference(torch.tensor(actual), torch.tensor(expected)) == difference, (
            actual,
            expected,
        )


def test_a_difference_over_dtypes_is_that_of_the_values() -> None:
    assert largest_difference(torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.float64)) == 0.0
    assert (
        largest_difference(torch.tensor([1.0]), torch.tensor([1 + 2.0**-40], dtype=torch.float64)) == 2.0**-40
    )


def test_the_size_of_a_tensor_is_its_largest_number() -> None:
    for tensor, largest in (
        (torch.tensor([1.0, -3.0]), 3.0),
        (torch.tensor([-7, 2]), 7.0),
        (torch.tensor(-0.5), 0.5),
        (torch.empty(0), 0.0),
        (torch.tensor([False, True]), 1.0),
        (torch.tensor([-torch.inf, 2.0]), 2.0),
        (torch.tensor([-torch.inf]), 0.0),
    ):
        assert largest_magnitude(tensor) == largest, tensor
