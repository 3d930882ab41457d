"""Each signature of the table with symptoms made by hand, and with a near miss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from verification_cases import coordinates_of, difference_at, evidence_of

from plait.plan import Plan
from plait.verification.causes import TABLE, USUAL, Symptoms, likely_cause, rounded
from plait.verification.place import Phase, Place

ONE, TP, CUBE = Plan(), Plan(tp=2), Plan(pp=2, dp=2, tp=2, microbatches=4)
FORWARD = Place(0, Phase.FORWARD, 1, 0)
REDUCTION = Place(0, Phase.REDUCTION, name="weight")
EXPECTED = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def symptoms(
    actual: Tensor | dict[int, Tensor],
    *,
    place: Place = FORWARD,
    expected: Tensor = EXPECTED,
    plan: Plan = ONE,
    base: Tensor | None = None,
    judges: tuple[int, ...] | None = None,
    **told: Any,
) -> Symptoms:
    """One tensor, or those of several ranks, in the place of `expected`."""
    by_rank = actual if isinstance(actual, dict) else {0: actual}
    return Symptoms(
        difference_at(place, expected, by_rank[min(by_rank)], **told),
        evidence_of(place, expected, by_rank, base),
        coordinates_of(plan),
        tuple(by_rank) if judges is None else judges,
        plan,
    )


def cause(*arguments: Any, **told: Any) -> str:
    return likely_cause(symptoms(*arguments, **told))


def fitting(made: Symptoms) -> list[str]:
    """The rows of the table that fit."""
    return [row.__name__ for row in TABLE if row(made)]


def test_where_nothing_fits_it_is_what_is_usual_for_the_phase() -> None:
    for phase in Phase:
        if phase is not Phase.NORM:
            made = symptoms(NOISE, place=Place(0, phase, 1, 0))
            assert fitting(made) == []
            assert likely_cause(made) == f"{USUAL[phase]}."


def test_every_phase_has_a_usual_cause() -> None:
    assert USUAL.keys() == set(Phase)


def test_what_the_rank_saw_itself_comes_first() -> None:
    assert cause(2 * EXPECTED, hint="it is that of micro-batch 3") == "it is that of micro-batch 3."


class TestNoNumber:
    @pytest.mark.parametrize("broken", [torch.nan, torch.inf])
    def test_fits_nan_and_infinity(self, broken: float) -> None:
        actual = EXPECTED.clone()
        actual[0, 0] = broken
        assert cause(actual).startswith("it is not a number where the reference is: a division by zero")

    def test_does_not_fit_where_the_reference_has_none_either(self) -> None:
        expected = EXPECTED.clone()
        expected[0, 0] = torch.inf
        assert "no_number" not in fitting(symptoms(expected * 1.5, expected=expected))


class TestSummands:
    def test_over_one_axis(self) -> None:
        parts = {0: NOISE, 1: EXPECTED - NOISE}
        told = "hold summands of all of it: their sum over tp is missing."
        assert cause(parts, plan=TP) == f"the ranks of tp {told}"

    @pytest.mark.parametrize(("plan", "axis"), [(Plan(dp=2), "dp"), (Plan(pp=2), "pp")])
    def test_over_another_axis(self, plan: Plan, axis: str) -> None:
        parts = {0: NOISE, 1: EXPECTED - NOISE}
        assert f"their sum over {axis} is missing" in cause(parts, plan=plan, place=REDUCTION)

    def test_over_both_axes_of_dp(self) -> None:
        plan = Plan(dp=4, replicate=2)
        parts = {0: NOISE, 1: EXPECTED, 2: -NOISE, 3: 0 * NOISE}
        assert "their sum over dp is missing" in cause(parts, plan=plan, place=REDUCTION)

    def test_over_replicate_where_ranks_of_shard_hold_other_pieces(self) -> None:
        plan = Plan(dp=4, replicate=2, strategy="gradients")
        parts = {0: NOISE, 2: EXPECTED - NOISE}
        assert "their sum over replicate is missing" in cause(parts, plan=plan, place=REDUCTION)

    def test_over_two_axes(self) -> None:
        plan = Plan(dp=2, tp=2)
        parts = {0: NOISE, 1: EXPECTED, 2: -3 * NOISE, 3: 2 * NOISE}
        assert "the ranks of tp and dp hold summands" in cause(parts, plan=plan, place=REDUCTION)

    def test_a_near_miss(self) -> None:
        parts = {0: NOISE, 1: EXPECTED - 1.01 * NOISE}
        assert fitting(symptoms(parts, plan=TP)) == []

    def test_halves_are_a_factor(self) -> None:
        parts = {0: EXPECTED / 2, 1: EXPECTED / 2}
        assert fitting(symptoms(parts, plan=TP)) == ["factor"]

    def test_needs_more_than_one_rank(self) -> None:
        assert fitting(symptoms({0: NOISE}, plan=TP)) == []

    def test_other_shapes_do_not_sum(self) -> None:
        parts = {0: NOISE, 1: EXPECTED[:2]}
        assert fitting(symptoms(parts, plan=TP)) == []


class TestNothing:
    def test_fits_zero(self) -> None:
        assert cause(0 * EXPECTED) == "it is zero: it was never computed, or never added or sent."

    def test_a_near_miss(self) -> None:
        actual = 0 * EXPECTED
        actual[0, 0] = 1e-3
        assert "nothing" not in fitting(symptoms(actual))

    def test_a_reference_of_zero_is_not_missed(self) -> None:
        assert "nothing" not in fitting(symptoms(NOISE, expected=0 * EXPECTED))


class TestFactor:
    @pytest.mark.parametrize(
        ("factor", "shown"),
        [(2.0, "2"), (0.5, "1/2"), (0.25, "1/4"), (1.5, "3/2"), (3.7, "3.7"), (-1.0, "-1")],
    )
    def test_all_of_it(self, factor: float, shown: str) -> None:
        told = f"all of it is {shown} times what it should be: it is scaled once too often, or not at all."
        assert cause(factor * EXPECTED) == told

    @pytest.mark.parametrize(
        ("factor", "phase", "told"),
        [
            (2.0, Phase.FORWARD, "2 times what it should be, the size of tp: a sum is taken twice"),
            (0.5, Phase.FORWARD, "1/2 times what it should be, one over tp: averaged instead of summed"),
            (4.0, Phase.FORWARD, "4 times what it should be: it is scaled once too often"),
            (
                4.0,
                Phase.WEIGHT_GRADIENT,
                "4 times what it should be, the size of the number of micro-batches",
            ),
            (0.25, Phase.REDUCTION, "1/4 times what it should be, one over the number of micro-batches"),
            (2.0, Phase.WEIGHT_GRADIENT, "2 times what it should be, the size of tp and of dp: a sum"),
            (0.5, Phase.REDUCTION, "1/2 times what it should be, one over tp and dp and pp: averaged"),
        ],
    )
    def test_is_explained_by_a_degree(self, factor: float, phase: Phase, told: str) -> None:
        place = Place(0, phase, 1, 0, "weight")
        assert told in cause(factor * EXPECTED, place=place, plan=CUBE)

    def test_of_what_the_layer_adds(self) -> None:
        """A residual connection: what flows through is right."""
        assert cause(NOISE + 2 * (EXPECTED - NOISE), base=NOISE, plan=TP).startswith(
            "what the layer adds to it is 2 times what it should be, the size of tp: "
        )

    def test_a_near_miss(self) -> None:
        actual = 2 * EXPECTED
        actual[0, 0] *= 1.01
        assert fitting(symptoms(actual)) == []

    def test_one_number_shows_no_factor(self) -> None:
        assert fitting(symptoms(torch.tensor([2.0]), expected=torch.tensor([1.0]))) == []


class TestSameRow:
    def test_fits_a_bias(self) -> None:
        told = "the same row is added to all rows: a bias that counts more than once, or is left out."
        assert cause(EXPECTED + NOISE[:1]) == told

    def test_a_near_miss(self) -> None:
        actual = EXPECTED + NOISE[:1]
        actual[1, 1] += 0.1
        assert fitting(symptoms(actual)) == []

    def test_only_of_a_forward(self) -> None:
        assert fitting(symptoms(EXPECTED + NOISE[:1], place=REDUCTION)) == []

    def test_of_tokens_in_several_dims(self) -> None:
        expected = EXPECTED.view(2, 2, 6)
        assert fitting(symptoms(expected + NOISE[:1], expected=expected)) == ["same_row_added"]

    def test_one_row_shows_nothing(self) -> None:
        assert fitting(symptoms((EXPECTED + NOISE)[:1], expected=EXPECTED[:1])) == []


class TestSameNumbers:
    def test_fits_exchanged_rows(self) -> None:
        told = "the same numbers stand in another order: rows, heads or pieces are exchanged."
        assert cause(EXPECTED.flip(0)) == told
        assert cause(EXPECTED.roll(1, 1)) == told

    def test_a_near_miss(self) -> None:
        actual = EXPECTED.flip(0)
        actual[0, 0] += 0.1
        assert fitting(symptoms(actual)) == []


class TestPieceOfAnother:
    def test_fits_pieces_that_went_to_the_neighbour(self) -> None:
        made = symptoms({0: NOISE, 1: EXPECTED}, plan=TP)
        second = replace(made.evidence[1], expected=NOISE.flatten())
        made = replace(made, evidence={**made.evidence, 1: second})
        assert likely_cause(made) == "all of it is what rank 1 should have: pieces go to another rank."

    def test_a_near_miss(self) -> None:
        made = symptoms({0: NOISE, 1: EXPECTED}, plan=TP)
        second = replace(made.evidence[1], expected=NOISE.flatten() * 1.01)
        assert fitting(replace(made, evidence={**made.evidence, 1: second})) == []

    def test_only_of_a_neighbour_along_tp(self) -> None:
        made = symptoms({0: NOISE, 1: EXPECTED}, plan=Plan(dp=2))
        second = replace(made.evidence[1], expected=NOISE.flatten())
        assert "piece_of_another" not in fitting(replace(made, evidence={**made.evidence, 1: second}))


class TestLaterPieces:
    PIECES = Plan(tp=2, sequence_parallel="keep")

    def test_fits_where_the_first_is_right(self) -> None:
        said = cause({1: NOISE}, plan=self.PIECES, judges=(0, 1))
        assert said.startswith("only later pieces of the sequence differ: something counts positions")
        assert said.endswith("; equal on tp 0.")

    @pytest.mark.parametrize(
        ("wrong", "plan", "phase"),
        [
            (0, PIECES, Phase.FORWARD),
            (1, TP, Phase.FORWARD),
            (1, PIECES, Phase.INPUT_GRADIENT),
        ],
        ids=["the first is wrong", "no pieces", "backward"],
    )
    def test_a_near_miss(self, wrong: int, plan: Plan, phase: Phase) -> None:
        made = symptoms({wrong: NOISE}, plan=plan, judges=(0, 1), place=Place(0, phase, 1, 0))
        assert fitting(made) == []


class TestOnlyABox:
    def test_fits_some_rows(self) -> None:
        actual = EXPECTED.clone()
        actual[2:3] += NOISE[2:3]
        told = "only 2:3 of dim 0 differs: a cut or a mask is off there, or these rows are left out or "
        told += "counted twice."
        assert cause(actual, box=((2, 3), (0, 6)), whole_box=False) == told

    def test_some_columns(self) -> None:
        assert "only 9:12 of dim 1 differs" in cause(NOISE, box=((0, 4), (9, 12)), whole_box=False)

    def test_does_not_fit_a_corner(self) -> None:
        assert fitting(symptoms(NOISE, box=((1, 3), (2, 4)), whole_box=False)) == []

    def test_does_not_fit_all_of_it(self) -> None:
        assert fitting(symptoms(NOISE)) == []


class TestRounded:
    @pytest.mark.parametrize(
        ("dtype", "name"),
        [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")],
    )
    def test_fits_a_narrower_dtype(self, dtype: torch.dtype, name: str) -> None:
        told = f"each element is off by as much as {name} rounds: something on the way was {name}."
        assert cause(EXPECTED.to(dtype).double()) == told

    def test_an_element_that_is_off_by_more_is_a_near_miss(self) -> None:
        actual = EXPECTED.float().double()
        actual[0, 0] *= 1.1
        assert fitting(symptoms(actual)) == []

    def test_one_element_is_a_near_miss(self) -> None:
        actual = EXPECTED.clone()
        actual[0, 0] *= 1 + 2.0**-25
        assert rounded(symptoms(actual)) is None

    def test_only_where_more_digits_are_expected(self) -> None:
        assert rounded(symptoms(EXPECTED.bfloat16().double(), allowed=1e-6)) is None

    def test_few_elements_show_nothing(self) -> None:
        assert rounded(symptoms(EXPECTED[:1].float().double(), expected=EXPECTED[:1])) is None


class TestNorm:
    def test_too_large(self) -> None:
        told = cause(torch.tensor(1.5), expected=torch.tensor(1.0), place=Place(0, Phase.NORM))
        assert told.startswith("it is too large: what several ranks hold alike is counted by more than one")

    def test_too_small(self) -> None:
        told = cause(torch.tensor(0.5), expected=torch.tensor(1.0), place=Place(0, Phase.NORM))
        assert told.startswith("it is too small: it leaves out what other ranks hold")

    def test_only_of_a_norm(self) -> None:
        place = Place(0, Phase.MEAN_LOSS)
        assert fitting(symptoms(torch.tensor(0.5), expected=torch.tensor(1.0), place=place)) == []


class TestCircumstances:
    def test_ranks_that_are_equal_by_the_axis_that_sets_them_apart(self) -> None:
        told = cause({1: NOISE}, plan=TP, judges=(0, 1))
        assert told == f"{USUAL[Phase.FORWARD]}; equal on tp 0."

    def test_dp_counts_over_both_of_its_axes(self) -> None:
        told = cause({2: NOISE}, plan=Plan(dp=4, replicate=2), place=REDUCTION, judges=(0, 1, 2, 3))
        assert told.endswith("; equal on dp 0, 1, 3.")

    def test_ranks_that_no_axis_sets_apart(self) -> None:
        told = cause({1: NOISE, 2: NOISE}, plan=Plan(dp=2, tp=2), place=REDUCTION, judges=(0, 1, 2, 3))
        assert told.endswith("; equal on rank 0, 3.")

    def test_earlier_micro_batches_of_the_rank(self) -> None:
        plan = Plan(dp=2, microbatches=2)
        ends = [cause(NOISE, plan=plan, place=Place(0, Phase.FORWARD, 1, m)) for m in range(4)]
        assert [told.endswith("; micro-batches before it are equal.") for told in ends] == [0, 1, 0, 1]

    def test_earlier_steps(self) -> None:
        assert cause(NOISE, place=Place(1, Phase.FORWARD, 1, 0)).endswith("; the steps before it are equal.")

    def test_all_of_them(self) -> None:
        plan = Plan(tp=2, microbatches=2)
        told = cause({0: NOISE}, plan=plan, place=Place(2, Phase.FORWARD, 1, 1), judges=(0, 1))
        circumstances = "equal on tp 1; micro-batches before it are equal; the steps before it are equal."
        assert told == f"{USUAL[Phase.FORWARD]}; {circumstances}"
