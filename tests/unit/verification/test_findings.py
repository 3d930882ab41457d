"""What is kept of tensors that differ: where, by how much, and which of them was first."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from plait.plan.layout import Flat, Layout, Shard, shard
from plait.verification.findings import (
    EVIDENCE_ELEMENTS,
    MAX_LISTED,
    MIN_ROUNDED_ELEMENTS,
    ComparedBox,
    Findings,
    Tally,
    box_of,
    has_only_small_digits_of_float16,
)
from plait.verification.reference.recording import Tolerance
from plait.verification.step_location import Location, StepPhase

FORWARD = Location(0, StepPhase.FORWARD, 1, 0)
BOUND = Tolerance(size=8.0, allowed=1e-3)
EXPECTED = torch.arange(24, dtype=torch.float64).view(4, 6)


@pytest.fixture
def findings() -> Findings:
    return Findings(layers=3)


def changed(*indices: tuple[int, int], by: float = 1.0) -> Tensor:
    """`EXPECTED` but for some elements."""
    tensor = EXPECTED.clone()
    for index in indices:
        tensor[index] += by
    return tensor


def test_a_difference_within_the_tolerance_counts_as_equal(findings: Findings) -> None:
    assert findings.compare(FORWARD, changed((1, 2), by=2.5e-4), EXPECTED, BOUND)
    assert findings.compare(FORWARD, EXPECTED, EXPECTED, BOUND)
    assert findings.differences == []
    assert findings.evidence is None
    tally = findings.tallies[StepPhase.FORWARD]
    assert (tally.used, tally.relative) == (pytest.approx(0.25), pytest.approx(2.5e-4 / 8))
    for share in (4.0, 4.5):  # of a size of 8: half of it, and more than half
        assert findings.compare(FORWARD, changed((1, 2), by=1.0), EXPECTED, Tolerance(8.0, share))
    assert tally == Tally(4, 0, tally.used, 1 / 8, vague=1)
    assert not findings.empty


def test_a_difference_is_recorded_with_its_box_and_worst_element(findings: Findings) -> None:
    actual = changed((1, 2), (2, 4))
    actual[2, 3] -= 5
    assert not findings.compare(FORWARD, actual, EXPECTED, BOUND)
    (difference,) = findings.differences
    assert difference.location == FORWARD
    assert difference.shape == (4, 6)
    assert difference.box == ((1, 3), (2, 5))
    assert not difference.whole_box
    assert difference.share == 3 / 24
    assert (difference.worst, difference.values) == ((2, 3), (10.0, 15.0))
    assert (difference.largest, difference.size, difference.allowed) == (5.0, 8.0, 1e-3)
    assert findings.tallies[StepPhase.FORWARD] == Tally(1, 1)


def box_at(row: int, column: int) -> ComparedBox:
    """A box of the shape of `EXPECTED` at these offsets."""
    return ComparedBox((20, 200), lambda whole: whole[row : row + 4, column : column + 6])


def interval_of(box: ComparedBox) -> ComparedBox:
    """Elements 9 to 18 of a box, as a sharded parameter has them."""
    return ComparedBox(box.shape, lambda whole: box.of(whole).reshape(1, -1)[:, 9:18])


def test_boxes_of_differences_are_those_of_the_global_tensor(findings: Findings) -> None:
    findings.compare(FORWARD, changed((1, 2)), EXPECTED, BOUND, box=box_at(10, 100))
    assert findings.differences[0].box == ((11, 12), (102, 103))
    assert findings.differences[0].worst == (11, 102)


def test_a_difference_spanning_the_whole_box_is_recorded_as_whole(findings: Findings) -> None:
    findings.compare(FORWARD, changed((0, 0), (3, 5)), EXPECTED, BOUND, box=box_at(4, 0))
    assert findings.differences[0].whole_box
    assert findings.differences[0].box == ((4, 8), (0, 6))


AXES = {"shard": 3, "tp": 2}


def flat(shape: tuple[int, ...], *tolerances: int, rows_over_tp: bool = False, blocks: int = 1) -> Layout:
    """Cut between three ranks of `shard` at these elements; over `tp` by rows, of `blocks`, or not."""
    over_tp = {"tp": Shard(0, blocks=blocks)} if rows_over_tp else {}
    return Layout(shape, AXES, {"shard": Flat(tolerances)} | over_tp)


def test_boxes_of_differences_in_flat_shards_are_those_of_the_global_tensor(findings: Findings) -> None:
    """Elements 9 to 18 of `EXPECTED`, from the middle of a row to the end of another, in rows 10 to 13."""
    actual, interval = changed((1, 5), (2, 3)).view(1, -1)[:, 9:18], EXPECTED.view(1, -1)[:, 9:18]
    findings.compare(FORWARD, actual, interval, BOUND, box=interval_of(box_at(10, 100)))
    (difference,) = findings.differences
    assert difference.box == ((11, 13), (103, 106))
    assert difference.worst == (11, 105)
    assert (difference.shape, difference.share, difference.whole_box) == ((1, 9), 2 / 9, False)


def test_a_difference_spanning_a_whole_flat_shard_is_recorded_as_whole(findings: Findings) -> None:
    interval = EXPECTED.view(1, -1)[:, 9:18]
    findings.compare(FORWARD, interval + 1, interval, BOUND, box=interval_of(box_at(0, 0)))
    assert findings.differences[0].whole_box
    assert findings.differences[0].box == ((1, 3), (0, 6))


def test_an_empty_shard_is_equal(findings: Findings) -> None:
    """As where there are more ranks than elements."""
    layout = flat((2,), 0, 1, 2, 2)
    nothing = shard(torch.ones(2), layout, {"shard": 2, "tp": 0})
    box = box_of(layout, {"shard": 2, "tp": 0})
    assert nothing.shape == (0,)
    assert findings.compare(FORWARD, nothing, nothing.clone(), BOUND, box=box)
    assert findings.tallies[StepPhase.FORWARD].compared == 1
    assert findings.empty == {FORWARD}


def test_a_scalar_difference_is_recorded_with_both_values(findings: Findings) -> None:
    location = Location(0, StepPhase.LOSS, None, 0)
    assert not findings.compare(location, torch.tensor(2.0), torch.tensor(1.0), BOUND)
    difference = findings.differences[0]
    assert (difference.largest, difference.values, difference.shape) == (1.0, (2.0, 1.0), ())


def test_boolean_and_integer_tensors_are_compared_exactly(findings: Findings) -> None:
    exact = Tolerance(1.0, 0.0)
    mask = torch.tensor([True, True, False])
    assert findings.compare(FORWARD, mask, mask.clone(), exact)
    assert not findings.compare(FORWARD, ~mask, mask, exact)
    assert not findings.compare(FORWARD, torch.tensor([1, 2]), torch.tensor([1, 3]), exact)
    assert [difference.largest for difference in findings.differences] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("actual", "hint"),
    [
        (EXPECTED[:2], "its shape is [2, 6] instead of [4, 6]"),
        (EXPECTED[:1], "its shape is [1, 6] instead of [4, 6]"),
        (EXPECTED.float(), "its dtype is float32 instead of float64"),
        (torch.empty(0, 6, dtype=torch.float64), "its shape is [0, 6] instead of [4, 6]"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_differs_whatever_its_values(
    findings: Findings, actual: Tensor, hint: str
) -> None:
    assert not findings.compare(FORWARD, actual, EXPECTED, Tolerance(8.0, 1e9))
    (difference,) = findings.differences
    assert (difference.hint, difference.shape, difference.box) == (hint, tuple(actual.shape), ())
    assert (difference.largest, difference.size, difference.allowed) == (math.inf, 8.0, 1e9)
    assert (difference.whole_box, difference.share, difference.worst) == (True, 1.0, ())
    assert all(math.isnan(value) for value in difference.values)


def test_empty_tensors_are_equal(findings: Findings) -> None:
    assert findings.compare(FORWARD, torch.empty(0, 3), torch.empty(0, 3), BOUND)
    assert not findings.compare(FORWARD, torch.empty(0, 3), torch.empty(3, 0), BOUND)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_or_infinity_on_one_side_is_an_infinite_difference(findings: Findings, broken: float) -> None:
    actual = EXPECTED.clone()
    actual[3, 1] = broken
    assert not findings.compare(FORWARD, actual, EXPECTED, BOUND)
    difference = findings.differences[0]
    assert (difference.largest, difference.worst, difference.box) == (math.inf, (3, 1), ((3, 4), (1, 2)))


@pytest.mark.parametrize("same", [math.nan, math.inf, -math.inf])
def test_equal_nan_or_infinity_on_both_sides_is_no_difference(findings: Findings, same: float) -> None:
    expected, actual = EXPECTED.clone(), changed((1, 2))
    expected[3, 1] = actual[3, 1] = same
    findings.compare(FORWARD, actual, expected, BOUND)
    difference = findings.differences[0]
    assert (difference.largest, difference.worst, difference.box) == (1.0, (1, 2), ((1, 2), (2, 3)))


def test_a_reference_of_zero_may_have_a_tolerance(findings: Findings) -> None:
    """The reference's is zero, and that of a shaken run is not."""
    location = Location(0, StepPhase.LOSS, None, 0)
    assert findings.compare(location, torch.tensor(1e-14), torch.tensor(0.0), Tolerance(0.0, 1e-13))
    assert math.isfinite(findings.tallies[StepPhase.LOSS].used)


def test_the_first_difference_is_the_first_in_the_order_of_execution(findings: Findings) -> None:
    later, first, between = (
        Location(0, StepPhase.LOSS, None, 0),
        Location(0, StepPhase.FORWARD, 0, 1),
        FORWARD,
    )
    for location, value in ((later, 1.0), (first, 2.0), (between, 3.0)):
        findings.compare(location, changed((0, 0), by=value), EXPECTED, BOUND)
    assert findings.differences[0].location == first
    assert {difference.location for difference in findings.differences} == {later, first, between}
    assert findings.evidence is not None
    assert findings.evidence.location == first
    assert float(findings.evidence.actual[0]) == 2.0
    assert torch.equal(findings.evidence.expected, EXPECTED.flatten())


def test_evidence_is_a_copy(findings: Findings) -> None:
    """The memory of what was compared may be used again."""
    actual = changed((0, 0))
    findings.compare(FORWARD, actual, EXPECTED.clone(), BOUND)
    actual.zero_()
    assert findings.evidence is not None
    assert torch.equal(findings.evidence.actual, changed((0, 0)).flatten())


def test_evidence_has_what_flowed_into_the_layer_where_it_can_be_part_of_it(findings: Findings) -> None:
    findings.compare(FORWARD, changed((0, 0)), EXPECTED, BOUND, base=torch.ones(4, 6, dtype=torch.float64))
    assert findings.evidence is not None
    assert findings.evidence.base is not None
    for misfit in (torch.ones(4, 5, dtype=torch.float64), torch.ones(4, 6)):
        other = Findings(layers=3)
        other.compare(FORWARD, changed((0, 0)), EXPECTED, BOUND, base=misfit)
        assert other.evidence is not None
        assert other.evidence.base is None


def test_evidence_of_large_tensors_is_shortened(findings: Findings) -> None:
    findings.compare(FORWARD, torch.ones(EVIDENCE_ELEMENTS + 8), torch.zeros(EVIDENCE_ELEMENTS + 8), BOUND)
    assert findings.evidence is not None
    assert findings.evidence.actual.shape == findings.evidence.expected.shape == (EVIDENCE_ELEMENTS,)


def test_of_many_differences_the_first_is_kept_and_the_rest_counted(findings: Findings) -> None:
    for number in range(MAX_LISTED + 10, 0, -1):
        findings.compare(Location(0, StepPhase.FORWARD, 1, number), changed((0, 0)), EXPECTED, BOUND)
    assert findings.tallies[StepPhase.FORWARD].different == MAX_LISTED + 10
    assert findings.differences[0].location.microbatch == 1
    assert len(findings.differences) <= MAX_LISTED + 10


def test_the_number_of_listed_differences_is_limited(findings: Findings) -> None:
    for number in range(MAX_LISTED + 10):
        findings.compare(Location(0, StepPhase.FORWARD, 1, number), changed((0, 0)), EXPECTED, BOUND)
    assert len(findings.differences) == MAX_LISTED


def test_a_difference_names_the_first_alternative_that_equals_the_tensor(findings: Findings) -> None:
    def alternatives() -> Iterator[tuple[str, Tensor]]:
        yield "it is twice as much", 2 * EXPECTED
        yield "it is that of another", changed((0, 0))
        raise AssertionError("nobody asks for more")

    findings.compare(FORWARD, changed((0, 0)), EXPECTED, BOUND, alternatives=alternatives())
    assert findings.differences[0].hint == "it is that of another"


def test_alternatives_are_not_computed_for_equal_tensors(findings: Findings) -> None:
    alternatives = (pytest.fail("nobody asks") for _ in range(1))
    assert findings.compare(FORWARD, EXPECTED, EXPECTED, BOUND, alternatives=alternatives)


def test_a_gradient_that_is_compared_may_want_a_gradient(findings: Findings) -> None:
    leaf = EXPECTED.clone().requires_grad_()
    assert findings.compare(FORWARD, leaf * 1, EXPECTED, BOUND)
    assert not findings.compare(FORWARD, leaf * 2, EXPECTED, BOUND)


SMALL, FINE, REAL = 1e-9, 2.0**-52, torch.linspace(1.1, 2.2, MIN_ROUNDED_ELEMENTS, dtype=torch.float64)
SINGLE, BRAIN, HALF = 2.0**-23, 2.0**-7, 2.0**-10
"""Machine epsilons of float32, bfloat16 and float16."""


ROUNDED: list[tuple[Tensor, Tensor, float | None, float, str | None]] = [
    (REAL.bfloat16(), REAL, SINGLE, 0.1, "it was rounded to bfloat16 on the way"),
    (REAL.bfloat16(), REAL, SINGLE, SMALL, "it was rounded to bfloat16 on the way"),
    (REAL.bfloat16(), REAL, BRAIN, 0.1, None),
    (REAL.bfloat16(), REAL, None, 0.1, None),
    (REAL.half(), REAL, SINGLE, 0.1, "it was rounded to float16 on the way"),
    (REAL.half(), REAL, HALF, 0.1, None),
    (REAL.float(), REAL, FINE, 0.1, "it was rounded to float32 on the way"),
    (REAL.float(), REAL, SINGLE, 0.1, None),
    (REAL[1:].float(), REAL[1:], FINE, 0.1, None),
    (2 * REAL.bfloat16(), REAL, SINGLE, SMALL, ""),
    (REAL.mul(1e-5).half(), REAL * 1e-5, SINGLE, SMALL, "it was rounded to float16 on the way"),
    (REAL.half().bfloat16(), REAL.half(), SINGLE, 0.1, None),
]


def test_a_rounding_on_the_way_is_a_difference_within_the_tolerance_too() -> None:
    """Not if `rounding` allows for it, of few elements, of 16-bit numbers, or where it is no rounding."""
    for actual, expected, rounding, allowed, hint in ROUNDED:
        findings, bound = Findings(layers=3), Tolerance(4.0, allowed)
        equal = findings.compare(FORWARD, actual.to(expected.dtype), expected, bound, rounding=rounding)
        assert equal is (hint is None), (actual.dtype, rounding)
        for difference in findings.differences:
            assert (difference.hint, difference.size) == (hint, 4.0)
            assert difference.allowed == (0.0 if hint else allowed)


TINY, DIGIT = REAL * 1e-5, 2.0**-24
"""Numbers that float16 has few digits for; the last of these digits."""


def test_small_elements_may_have_only_the_digits_of_float16() -> None:
    coarse = TINY.half().double()
    several, off, other = TINY.repeat(10), coarse.repeat(10), coarse.repeat(10)
    off[:32] += 2 * DIGIT  # a tenth of them
    other[:31] += 2 * DIGIT
    for expected, actual, few in (
        (TINY, coarse, True),
        (TINY, TINY, False),
        (TINY, coarse + DIGIT, False),
        (TINY[1:], coarse[1:], False),
        (TINY, coarse.float(), False),
        (REAL, REAL.half().double(), False),
        (several, off, False),
        (several, other, True),
    ):
        assert has_only_small_digits_of_float16(actual, expected) is few


def test_of_complex_numbers_the_larger_part_counts(findings: Findings) -> None:
    actual, expected = torch.tensor([1 + 1j, 2 + 0j, 3 - 4j]), torch.tensor([1 + 1j, 2 + 0.5j, 3 + 0j])
    assert not findings.compare(FORWARD, actual, expected, BOUND)
    (difference,) = findings.differences
    assert (difference.largest, difference.share, difference.box) == (4.0, 2 / 3, ((1, 3),))
    assert (difference.worst, difference.values) == ((2,), (5.0, 3.0))
