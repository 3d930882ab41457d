"""Each hypothesis with symptoms made by hand, and with a near miss."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from verification_cases import coordinates_of, difference_at, evidence_of

from plait.plan.plan import Plan
from plait.verification.diagnosis.cause import HYPOTHESES, UNEXPLAINED, likely_cause, unexplained
from plait.verification.diagnosis.narrower_dtype import rounded
from plait.verification.diagnosis.single_tensor import _degrees, factor_text, permuted, range_of, shifted
from plait.verification.diagnosis.symptoms import Symptoms
from plait.verification.reference.differences_within_layers import InnerDifference
from plait.verification.step_location import Location, StepPhase

ONE, TP, CUBE = Plan(), Plan(tp=2), Plan(pp=2, dp=2, tp=2, microbatches=4)
FORWARD = Location(0, StepPhase.FORWARD, 1, 0)
REDUCTION = Location(0, StepPhase.REDUCTION, name="weight")
EXPECTED = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def symptoms(
    actual: Tensor | dict[int, Tensor],
    *,
    location: Location = FORWARD,
    expected: Tensor = EXPECTED,
    plan: Plan = ONE,
    base: Tensor | None = None,
    compared_on: tuple[int, ...] | None = None,
    partitioned: bool = False,
    **told: Any,
) -> Symptoms:
    """One tensor, or those of several ranks, in the place of `expected`."""
    by_rank = actual if isinstance(actual, dict) else {0: actual}
    return Symptoms(
        difference_at(location, expected, by_rank[min(by_rank)], **told),
        evidence_of(location, expected, by_rank, base),
        coordinates_of(plan),
        tuple(by_rank) if compared_on is None else compared_on,
        plan,
        partitioned,
    )


def cause(*arguments: Any, **told: Any) -> str:
    return likely_cause(symptoms(*arguments, **told))


def fitting(made: Symptoms) -> list[str]:
    """The hypotheses that fit."""
    return [hypothesis.__name__ for hypothesis in HYPOTHESES if hypothesis(made)]


def test_without_a_fitting_cause_the_diagnosis_is_the_sentence_of_the_phase() -> None:
    for phase in StepPhase:
        if phase is not StepPhase.NORM:
            made = symptoms(NOISE, location=Location(0, phase, 1, 0))
            assert fitting(made) == []
            assert likely_cause(made) == f"{unexplained(made)}."


def test_every_phase_has_a_sentence_without_a_fitting_cause() -> None:
    assert UNEXPLAINED.keys() == set(StepPhase)


def test_the_diagnosis_on_one_rank_blames_no_communication() -> None:
    for phase in StepPhase:
        told = cause(NOISE, location=Location(0, phase, 1, 0)) if phase is not StepPhase.NORM else "no sum"
        assert not re.search(r"\btp\b|region|reduction|part of|other ranks'", told), told


@pytest.mark.parametrize("phase", [StepPhase.LOAD, StepPhase.INITIAL])
def test_another_ranks_part_is_suspected_only_with_several_ranks(phase: StepPhase) -> None:
    location = Location(0, phase, name="weight")
    assert "another shard of it" in cause(NOISE, location=location, plan=TP)
    assert "part" not in cause(NOISE, location=location)


def test_a_region_is_suspected_only_where_the_layer_is_divided() -> None:
    location = Location(0, StepPhase.INPUT_GRADIENT, 1, 0)
    assert "a sum over tp" in cause(NOISE, location=location, plan=TP, partitioned=True)
    assert "sum over" not in cause(NOISE, location=location, plan=TP)


def test_recomputation_is_suspected_only_where_there_is_any() -> None:
    location = Location(0, StepPhase.INPUT_GRADIENT, 1, 0)
    assert "recomputed" in cause(NOISE, location=location, plan=Plan(recompute="full"))
    assert "recomputed" not in cause(NOISE, location=location)


def test_an_update_of_parts_is_suspected_only_where_there_are_any() -> None:
    location = Location(0, StepPhase.OPTIMIZER, name="weight")
    assert "elementwise" in cause(NOISE, location=location, plan=TP)
    assert "elementwise" in cause(NOISE, location=location, plan=Plan(dp=2, strategy="optimizer"))
    assert "elementwise" not in cause(NOISE, location=location)


def test_the_place_inside_a_layer_follows_the_fitting_cause() -> None:
    inside = InnerDifference(3, "inside, what norm gives is the first to differ")
    assert cause(NOISE, inside=inside).endswith("and what it gives is not: " + inside.sentence + ".")
    assert cause(3 * EXPECTED, inside=inside).endswith(
        "times; inside, what norm gives is the first to differ."
    )


def test_a_hint_of_the_rank_itself_is_the_cause() -> None:
    assert cause(2 * EXPECTED, hint="it is that of micro-batch 3") == "it is that of micro-batch 3."


class TestNoNumber:
    @pytest.mark.parametrize("broken", [torch.nan, torch.inf])
    def test_nan_and_infinity_are_named(self, broken: float) -> None:
        actual = EXPECTED.clone()
        actual[0, 0] = broken
        assert cause(actual).startswith(
            "it is not a number where the reference is: a division by zero, an overflow"
        )

    def test_nan_in_the_reference_too_is_not_named(self) -> None:
        expected = EXPECTED.clone()
        expected[0, 0] = torch.inf
        assert "no_number" not in fitting(symptoms(expected * 1.5, expected=expected))


class TestSummands:
    def test_a_missing_sum_over_tp_is_named(self) -> None:
        parts = {0: NOISE, 1: EXPECTED - NOISE}
        told = "hold summands of all of it: their sum over tp is missing."
        assert cause(parts, plan=TP) == f"the ranks of tp {told}"

    @pytest.mark.parametrize(("plan", "axis"), [(Plan(dp=2), "dp"), (Plan(pp=2), "pp")])
    def test_a_missing_sum_over_dp_or_pp_is_named(self, plan: Plan, axis: str) -> None:
        parts = {0: NOISE, 1: EXPECTED - NOISE}
        assert f"their sum over {axis} is missing" in cause(parts, plan=plan, location=REDUCTION)

    def test_a_missing_sum_over_replicate_and_shard_is_named_as_dp(self) -> None:
        plan = Plan(dp=4, replicate=2)
        parts = {0: NOISE, 1: EXPECTED, 2: -NOISE, 3: 0 * NOISE}
        assert "their sum over dp is missing" in cause(parts, plan=plan, location=REDUCTION)

    def test_a_missing_sum_over_replicate_of_different_shards_is_named(self) -> None:
        plan = Plan(dp=4, replicate=2, strategy="gradients")
        parts = {0: NOISE, 2: EXPECTED - NOISE}
        assert "their sum over replicate is missing" in cause(parts, plan=plan, location=REDUCTION)

    def test_a_missing_sum_over_tp_and_dp_is_named(self) -> None:
        plan = Plan(dp=2, tp=2)
        parts = {0: NOISE, 1: EXPECTED, 2: -3 * NOISE, 3: 2 * NOISE}
        assert "the ranks of tp and dp hold summands" in cause(parts, plan=plan, location=REDUCTION)

    def test_parts_that_almost_sum_to_the_reference_are_no_missing_sum(self) -> None:
        parts = {0: NOISE, 1: EXPECTED - 1.01 * NOISE}
        assert fitting(symptoms(parts, plan=TP)) == []

    def test_equal_halves_are_a_factor_and_no_missing_sum(self) -> None:
        parts = {0: EXPECTED / 2, 1: EXPECTED / 2}
        assert fitting(symptoms(parts, plan=TP)) == ["factor"]

    def test_one_ranks_tensor_is_no_missing_sum(self) -> None:
        assert fitting(symptoms({0: NOISE}, plan=TP)) == []

    def test_parts_of_other_shapes_are_no_missing_sum(self) -> None:
        parts = {0: NOISE, 1: EXPECTED[:2]}
        assert fitting(symptoms(parts, plan=TP)) == []


CP = Plan(cp=2)


class TestContextParallelism:
    def test_a_sum_over_cp_is_missing(self) -> None:
        parts = {0: NOISE, 1: EXPECTED - NOISE}
        assert "their sum over cp is missing" in cause(parts, plan=CP, location=REDUCTION)

    def test_a_missing_sum_over_dp_and_cp_is_named(self) -> None:
        parts = {0: NOISE, 1: EXPECTED, 2: -3 * NOISE, 3: 2 * NOISE}
        told = cause(parts, plan=Plan(dp=2, cp=2), location=REDUCTION)
        assert "the ranks of cp and dp hold summands" in told

    @pytest.mark.parametrize(("factor", "told"), [(3.0, "the size of cp"), (1 / 3, "one over cp: either")])
    def test_a_factor_of_the_size_of_cp_is_named(self, factor: float, told: str) -> None:
        parts = dict.fromkeys(range(3), factor * EXPECTED)
        assert told in cause(parts, plan=Plan(cp=3), location=REDUCTION)
        assert "cp" not in cause(parts, plan=Plan(dp=3), location=REDUCTION)

    def test_a_layers_output_is_not_scaled_by_the_size_of_cp(self) -> None:
        parts = dict.fromkeys(range(3), 3 * EXPECTED)
        assert "the size of cp" not in cause(parts, plan=Plan(cp=3))

    def test_a_difference_at_one_ranks_positions_only_is_named(self) -> None:
        told = cause({1: NOISE}, plan=CP, compared_on=(0, 1))
        assert told.startswith("only some ranks' positions of the sequence differ")
        assert told.endswith("; equal on cp 0.")
        assert fitting(symptoms({0: NOISE, 1: NOISE}, plan=CP, compared_on=(0, 1))) == []
        assert fitting(symptoms({1: NOISE}, plan=Plan(dp=2), compared_on=(0, 1))) == []

    @pytest.mark.parametrize(
        ("phase", "told"),
        [
            (StepPhase.FORWARD, "its positions are not this rank's, or it sees other keys"),
            (StepPhase.INPUT_GRADIENT, "a gradient of keys and values that other ranks of cp return is lost"),
            (StepPhase.INPUT, "either other rows, or other positions, or changed ones"),
            (StepPhase.LOSS, "or the loss is no sum over positions"),
            (StepPhase.REDUCTION, "here over cp"),
        ],
    )
    def test_cp_is_suspected_only_where_the_plan_has_it(self, phase: StepPhase, told: str) -> None:
        location, parts = Location(0, phase, 1, 0), {0: NOISE, 1: NOISE}
        assert told in cause(parts, plan=CP, location=location)
        assert told not in cause({0: NOISE}, location=location)

    def test_a_norm_that_counts_each_rank_of_cp_is_named(self) -> None:
        location, expected = Location(0, StepPhase.NORM), torch.tensor([2.0])
        parts = dict.fromkeys(range(3), expected * 3**0.5)
        told = cause(parts, plan=Plan(cp=3), location=location, expected=expected)
        assert "as if every square counted on each rank of cp" in told


class TestZero:
    def test_a_tensor_of_zeros_is_named_as_never_computed(self) -> None:
        assert cause(0 * EXPECTED) == "it is zero: it was never computed, or never added or sent."

    def test_a_part_that_is_zero_is_named(self) -> None:
        actual = EXPECTED.clone()
        actual[2] = 0
        told = cause(actual, box=((2, 3), (0, 6)), whole_box=False)
        assert told.startswith(
            "where it differs (2:3 of dim 0) it is zero: these elements were never computed"
        )

    def test_an_almost_zero_tensor_is_not_named_zero(self) -> None:
        actual = 0 * EXPECTED
        actual[0, 0] = 1e-3
        assert "zero" not in fitting(symptoms(actual))

    def test_a_zero_where_the_reference_is_zero_is_no_cause(self) -> None:
        assert "zero" not in fitting(symptoms(NOISE, expected=0 * EXPECTED))


class TestFactor:
    @pytest.mark.parametrize(
        ("factor", "shown"),
        [(2.0, "2"), (0.5, "1/2"), (0.25, "1/4"), (1.5, "3/2"), (3.7, "3.7"), (-1.0, "-1")],
    )
    def test_a_constant_factor_is_named(self, factor: float, shown: str) -> None:
        told = f"all of it is {shown} times what it should be: it is scaled by one number too many or too few"
        assert cause(factor * EXPECTED).startswith(told)

    @pytest.mark.parametrize(
        ("factor", "phase", "told"),
        [
            (
                2.0,
                StepPhase.FORWARD,
                "2 times what it should be, the size of tp: either a sum is taken twice",
            ),
            (
                0.5,
                StepPhase.FORWARD,
                "1/2 times what it should be, one over tp: either averaged instead of summed",
            ),
            (4.0, StepPhase.FORWARD, "4 times what it should be: it is scaled by one number too many"),
            (
                4.0,
                StepPhase.WEIGHT_GRADIENT,
                "4 times what it should be, the size of the number of micro-batches",
            ),
            (0.25, StepPhase.REDUCTION, "1/4 times what it should be, one over the number of micro-batches"),
            (
                2.0,
                StepPhase.WEIGHT_GRADIENT,
                "2 times what it should be, the size of tp and of dp: either a sum",
            ),
            (
                0.5,
                StepPhase.REDUCTION,
                "1/2 times what it should be, one over tp and dp and pp: either averaged",
            ),
        ],
    )
    def test_a_factor_that_equals_a_degree_is_explained_by_it(
        self, factor: float, phase: StepPhase, told: str
    ) -> None:
        location = Location(0, phase, 1, 0, "weight")
        assert told in cause(factor * EXPECTED, location=location, plan=CUBE, partitioned=True)

    def test_a_factor_of_what_a_residual_layer_adds_is_named(self) -> None:
        """A residual connection: what flows through is right."""
        assert cause(NOISE + 2 * (EXPECTED - NOISE), base=NOISE, plan=TP, partitioned=True).startswith(
            "what the layer adds to it is 2 times what it should be, the size of tp: "
        )

    def test_a_factor_that_one_element_contradicts_is_not_named(self) -> None:
        actual = 2 * EXPECTED
        actual[0, 0] *= 1.01
        assert fitting(symptoms(actual)) == []

    def test_a_single_number_shows_no_factor(self) -> None:
        assert fitting(symptoms(torch.tensor([2.0]), expected=torch.tensor([1.0]))) == []

    def test_a_single_number_off_by_a_degree_is_named(self) -> None:
        one, location = torch.tensor([1.0]), Location(0, StepPhase.MEAN_LOSS)
        assert "2 times what it should be, the size of tp" in cause(
            2 * one, expected=one, location=location, plan=TP
        )
        assert fitting(symptoms(2.001 * one, expected=one, location=location, plan=TP)) == []

    def test_a_factor_in_an_undivided_layer_is_not_explained_by_tp(self) -> None:
        assert "tp" not in cause(2 * EXPECTED, plan=TP)

    def test_a_factor_of_an_update_is_named_with_equal_gradients(self) -> None:
        location = Location(0, StepPhase.OPTIMIZER, name="weight")
        told = cause(
            EXPECTED + 2 * NOISE, expected=EXPECTED + NOISE, base=EXPECTED, location=location, plan=CUBE
        )
        assert told.startswith(
            "the update is 2 times what it should be: the gradients are equal, so either it"
        )
        assert "micro-batches" not in told

    @pytest.mark.parametrize(
        ("phase", "told"),
        [
            (StepPhase.FORWARD, "it is the layer's input, unchanged: either the layer is skipped"),
            (StepPhase.INPUT_GRADIENT, "it is the gradient of the layer's output, unchanged"),
            (StepPhase.OPTIMIZER, "it was not updated"),
            (StepPhase.WEIGHT_GRADIENT, "nothing of this micro-batch is in it"),
        ],
    )
    def test_an_output_that_equals_the_layers_input_is_named(self, phase: StepPhase, told: str) -> None:
        assert cause(NOISE, base=NOISE, location=Location(0, phase, 1, 0, "weight")).startswith(told)


class TestMultipleOfInput:
    def test_a_missing_residual_connection_is_named(self) -> None:
        assert cause(EXPECTED - NOISE, base=NOISE).startswith("the layer's input is missing in it")

    def test_a_residual_connection_counted_repeatedly_is_named(self) -> None:
        assert cause(EXPECTED + 2 * NOISE, base=NOISE).startswith(
            "the layer's input is in it 2 times too often"
        )

    def test_in_the_backward_a_multiple_of_the_output_gradient_is_named(self) -> None:
        told = cause(EXPECTED - NOISE, base=NOISE, location=Location(0, StepPhase.INPUT_GRADIENT, 1, 0))
        assert told.startswith("the gradient of the layer's output is missing in it")

    def test_in_an_update_a_multiple_of_the_parameter_is_named_weight_decay(self) -> None:
        told = cause(
            EXPECTED - 1e-4 * NOISE, base=NOISE, location=Location(0, StepPhase.OPTIMIZER, name="weight")
        )
        assert told.startswith("it differs by -0.0001 times what the parameter was before: the weight decay")

    def test_a_multiple_of_the_input_is_suspected_only_in_outputs_and_input_gradients(self) -> None:
        location = Location(0, StepPhase.WEIGHT_GRADIENT, 1, 0, "weight")
        assert fitting(symptoms(EXPECTED - NOISE, base=NOISE, location=location)) == []

    def test_a_multiple_of_the_input_that_one_element_contradicts_is_not_named(self) -> None:
        actual = EXPECTED - NOISE
        actual[0, 0] += 1e-2
        assert fitting(symptoms(actual, base=NOISE)) == []


class TestSameForAll:
    def test_a_bias_added_more_than_once_is_named(self) -> None:
        told = "the same row is added to all rows: a constant, as a bias is, counts more than once"
        assert cause(EXPECTED + NOISE[:1]).startswith(told)

    def test_a_position_table_added_more_than_once_is_named(self) -> None:
        expected = torch.stack([EXPECTED, NOISE])
        told = cause(expected + EXPECTED.flip(0), expected=expected)
        assert told.startswith(
            "the same is added to each row of the batch, whatever its values: something that"
        )

    def test_an_error_in_one_column_is_no_repeated_bias(self) -> None:
        actual = EXPECTED.clone()
        actual[:, 2] += 1
        assert fitting(symptoms(actual, box=((0, 4), (2, 3)), whole_box=False)) == []

    def test_a_repeated_row_that_one_element_contradicts_is_not_named(self) -> None:
        actual = EXPECTED + NOISE[:1]
        actual[1, 1] += 0.1
        assert fitting(symptoms(actual)) == []

    def test_a_repeated_bias_is_suspected_only_in_a_forward(self) -> None:
        assert fitting(symptoms(EXPECTED + NOISE[:1], location=REDUCTION)) == []

    def test_a_repeated_bias_is_named_for_tokens_in_several_dims(self) -> None:
        expected = EXPECTED.view(2, 2, 6)
        assert fitting(symptoms(expected + NOISE[:1], expected=expected)) == ["same_for_all"]

    def test_a_single_row_shows_no_repeated_bias(self) -> None:
        assert fitting(symptoms((EXPECTED + NOISE)[:1], expected=EXPECTED[:1])) == []


class TestOrder:
    def test_exchanged_slices_are_listed(self) -> None:
        told = "dim 0 is in another order: it has 3 at 0, 2 at 1, 1 at 2, 0 at 3."
        assert cause(EXPECTED.flip(0)) == told
        halves = EXPECTED.roll(3, 1)
        assert cause(halves) == "dim 1 is in another order: it has 3 at 0, 4 at 1, 5 at 2, 0 at 3 and 2 more."

    def test_the_same_numbers_in_another_order_of_no_dim_are_named(self) -> None:
        actual = EXPECTED.flatten().sort().values.view(4, 6)
        assert cause(actual) == "the same numbers stand in another order."

    def test_a_shift_along_a_dim_is_named_with_its_distance(self) -> None:
        assert cause(EXPECTED.roll(1, 1)) == "it is shifted: along dim 1 it stands 1 place later."
        assert cause(EXPECTED.roll(-2, 1)) == "it is shifted: along dim 1 it stands 2 places earlier."

    def test_exchanged_halves_are_not_named_a_shift(self) -> None:
        assert fitting(symptoms(EXPECTED.roll(2, 0))) == ["permuted"]

    def test_a_shift_of_equal_slices_is_not_named(self) -> None:
        expected = torch.ones(4, 6, dtype=torch.float64)
        actual = expected.clone()
        actual[0] = NOISE[0]
        assert "shifted" not in fitting(symptoms(actual, expected=expected))

    def test_another_order_of_one_dim_is_listed(self) -> None:
        order = torch.tensor([2, 0, 3, 1])
        told = cause(EXPECTED[0, :4][order], expected=EXPECTED[0, :4])
        assert told == "dim 0 is in another order: it has 2 at 0, 0 at 1, 3 at 2, 1 at 3."

    def test_a_transposed_gradient_is_named(self) -> None:
        square = NOISE[:, :4]
        assert cause(square.T, expected=square, location=REDUCTION) == "it is transposed."

    def test_an_order_that_one_element_contradicts_is_not_named(self) -> None:
        actual = EXPECTED.flip(0)
        actual[0, 0] += 0.1
        assert fitting(symptoms(actual)) == []


class TestPartOfAnother:
    def test_parts_that_went_to_a_neighbouring_rank_are_named(self) -> None:
        made = symptoms({0: NOISE, 1: EXPECTED}, plan=TP)
        second = replace(made.evidence[1], expected=NOISE.flatten())
        made = replace(made, evidence={**made.evidence, 1: second})
        assert likely_cause(made) == "all of it is what rank 1 should have: parts go to another rank."

    def test_parts_that_almost_equal_a_neighbours_are_not_named(self) -> None:
        made = symptoms({0: NOISE, 1: EXPECTED}, plan=TP)
        second = replace(made.evidence[1], expected=NOISE.flatten() * 1.01)
        assert fitting(replace(made, evidence={**made.evidence, 1: second})) == []

    def test_another_ranks_part_is_suspected_only_along_tp(self) -> None:
        made = symptoms({0: NOISE, 1: EXPECTED}, plan=Plan(dp=2))
        second = replace(made.evidence[1], expected=NOISE.flatten())
        assert "part_of_another" not in fitting(replace(made, evidence={**made.evidence, 1: second}))


class TestLaterParts:
    PARTS = Plan(tp=2, sequence_parallel="keep")

    def test_a_difference_on_later_tp_ranks_only_is_named_a_wrong_position_count(self) -> None:
        said = cause({1: NOISE}, plan=self.PARTS, compared_on=(0, 1))
        assert said.startswith("only later parts of the sequence differ: either something counts positions")
        assert said.endswith("; equal on tp 0.")

    @pytest.mark.parametrize(
        ("wrong", "plan", "phase"),
        [
            (0, PARTS, StepPhase.FORWARD),
            (1, TP, StepPhase.FORWARD),
            (1, PARTS, StepPhase.INPUT_GRADIENT),
        ],
        ids=["the first is wrong", "no parts", "backward"],
    )
    def test_wrong_later_ranks_are_not_suspected_in_other_plans_and_phases(
        self, wrong: int, plan: Plan, phase: StepPhase
    ) -> None:
        made = symptoms({wrong: NOISE}, plan=plan, compared_on=(0, 1), location=Location(0, phase, 1, 0))
        assert fitting(made) == []


class TestRange:
    def test_a_difference_in_a_range_of_rows_is_named(self) -> None:
        actual = EXPECTED.clone()
        actual[2:3] += NOISE[2:3]
        told = "only 2:3 of dim 0 differs; the layer's input is equal, and what it gives is not"
        assert cause(actual, box=((2, 3), (0, 6)), whole_box=False).startswith(told)

    def test_a_difference_in_a_range_of_columns_is_named(self) -> None:
        assert "only 9:12 of dim 1 differs" in cause(NOISE, box=((0, 4), (9, 12)), whole_box=False)

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ((1, 6), "its first position is right, as where attention has wrong scores"),
            ((3, 6), "its first 3 positions are right"),
            ((0, 5), "its last position is right, as where a mask lets positions see"),
            ((5, 6), None),
            ((0, 1), None),
            ((2, 4), None),
        ],
    )
    def test_a_difference_in_a_range_of_positions_is_named(
        self, wrong: tuple[int, int], told: str | None
    ) -> None:
        expected, perturbation = EXPECTED.view(2, 6, 2), NOISE.view(2, 6, 2)
        actual = expected.clone()
        actual[:, slice(*wrong)] += perturbation[:, slice(*wrong)]
        share = (wrong[1] - wrong[0]) / 6
        box = ((0, 2), wrong, (0, 2))
        made = symptoms(actual, expected=expected, box=box, whole_box=False, share=share)
        assert fitting(made) == ([] if told is None else ["positions"])
        assert (told or f"only {wrong[0]}:{wrong[1]} of dim 1 differs; the layer's input") in likely_cause(
            made
        )

    def test_a_difference_in_a_corner_is_no_range(self) -> None:
        assert fitting(symptoms(NOISE, box=((1, 3), (2, 4)), whole_box=False)) == []

    def test_a_difference_everywhere_is_no_range(self) -> None:
        assert fitting(symptoms(NOISE)) == []


class TestRounded:
    @pytest.mark.parametrize(
        ("dtype", "name"),
        [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")],
    )
    def test_a_tensor_rounded_to_a_narrower_dtype_is_named(self, dtype: torch.dtype, name: str) -> None:
        told = f"all of it has no more digits than {name} holds: something on the way was {name}."
        assert cause(EXPECTED.to(dtype).double()) == told

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_residual_layers_addition_rounded_to_a_narrower_dtype_is_named(
        self, dtype: torch.dtype
    ) -> None:
        added = EXPECTED - NOISE
        told = cause(NOISE + added.to(dtype).double(), base=NOISE)
        name = str(dtype).removeprefix("torch.")
        assert told.startswith(f"what the layer adds to it has no more digits than {name} holds: ")

    def test_a_sum_of_16_bit_numbers_is_named(self) -> None:
        parts = NOISE, EXPECTED - NOISE
        told = cause(sum(part.bfloat16().double() for part in parts))
        assert "no more digits than float32 holds, and is off by as much as bfloat16 rounds" in told

    @pytest.mark.parametrize("digits", [2.0**-9, 2.0**-12])
    def test_an_error_as_small_as_16_bit_rounding_is_not_named_rounding(self, digits: float) -> None:
        """As of another epsilon, scale or angle: up and down, everywhere, and as small."""
        assert fitting(symptoms(EXPECTED * (1 + digits * NOISE.sign()))) == []

    def test_a_reference_in_float32_shows_no_sum_in_16_bits(self) -> None:
        expected = EXPECTED.float().double()
        actual = (expected * (1 + 2.0**-9 * NOISE)).float().double()
        assert fitting(symptoms(actual, expected=expected)) == []

    def test_an_error_of_float32_size_is_named_rounding(self) -> None:
        expected = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        signs = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).sign()
        told = cause(expected * (1 + 2.0**-25 * signs), expected=expected)
        assert "off by as little as float32 rounds" in told
        assert fitting(symptoms(expected + 1e-8 * expected.abs(), expected=expected)) == []  # up only
        positions = symptoms(expected * (1 + 2.0**-25 * signs), expected=expected, share=0.9)
        assert fitting(positions) == []  # not everywhere

    def test_rounding_is_not_named_where_one_element_is_off_by_more(self) -> None:
        actual = EXPECTED.float().double()
        actual[0, 0] *= 1.1
        assert fitting(symptoms(actual)) == []

    def test_rounding_is_not_named_where_one_element_has_more_digits(self) -> None:
        actual = EXPECTED.clone()
        actual[0, 0] *= 1 + 2.0**-25
        assert rounded(symptoms(actual)) is None

    def test_rounding_is_suspected_only_where_more_digits_are_expected(self) -> None:
        assert rounded(symptoms(EXPECTED.bfloat16().double(), allowed=1e-6)) is None

    def test_a_reference_of_narrow_numbers_shows_no_rounding(self) -> None:
        expected = EXPECTED.bfloat16().double()
        assert fitting(symptoms(expected * (1 + 2.0**-7 * NOISE.sign()), expected=expected)) == []

    def test_a_single_number_may_show_rounding(self) -> None:
        one = torch.tensor([0.1], dtype=torch.float64)
        told = cause(one.float().double(), expected=one, location=Location(0, StepPhase.LOSS, None, 0))
        assert told.startswith("all of it has no more digits than float32 holds")


class TestNorm:
    PLACE = Location(0, StepPhase.NORM)

    @pytest.mark.parametrize(("plan", "blames"), [(ONE, False), (TP, True)])
    def test_a_norm_too_large_or_too_small_has_its_possible_causes_named(
        self, plan: Plan, blames: bool
    ) -> None:
        large, small = (
            cause(torch.tensor(actual), expected=torch.tensor(1.0), location=self.PLACE, plan=plan)
            for actual in (1.3, 0.5)
        )
        assert large.startswith("it is too large: either ")
        assert ("what several ranks hold alike" in large) == blames
        left = "other ranks', or of some parameters" if blames else "of some parameters"
        assert small.startswith(f"it is too small: either it leaves out gradients ({left})")

    def test_a_norm_of_the_right_size_has_no_cause(self) -> None:
        right = torch.tensor([1.0], dtype=torch.float64)
        assert fitting(symptoms(right * (1 + 1e-13), expected=right, location=self.PLACE, plan=TP)) == []

    def test_a_norm_that_counts_every_square_on_each_rank_is_named(self) -> None:
        root = torch.tensor([2.0**0.5], dtype=torch.float64)
        one = torch.tensor([1.0], dtype=torch.float64)
        told = cause(root, expected=one, location=self.PLACE, plan=Plan(dp=2))
        assert told == "it is too large: as if every square counted on each rank of dp."

    def test_squares_of_ranks_that_were_not_summed_are_named(self) -> None:
        parts = {rank: torch.tensor([own], dtype=torch.float64) for rank, own in enumerate((0.6, 0.8))}
        expected = torch.tensor([1.0], dtype=torch.float64)
        told = cause(parts, expected=expected, location=self.PLACE, plan=Plan(pp=2))
        assert "the squares of the ranks of pp add up to what it should be" in told

    def test_wrong_counting_of_squares_is_suspected_only_of_a_norm(self) -> None:
        location = Location(0, StepPhase.MEAN_LOSS)
        assert fitting(symptoms(torch.tensor(0.5), expected=torch.tensor(1.0), location=location)) == []


class TestCircumstances:
    def test_equal_ranks_are_named_by_the_axis_that_distinguishes_them(self) -> None:
        made = symptoms({1: NOISE}, plan=TP, compared_on=(0, 1))
        assert likely_cause(made) == f"{unexplained(made)}; equal on tp 0."

    def test_equal_ranks_along_dp_are_counted_over_replicate_and_shard(self) -> None:
        told = cause({2: NOISE}, plan=Plan(dp=4, replicate=2), location=REDUCTION, compared_on=(0, 1, 2, 3))
        assert told.endswith("; equal on dp 0, 1, 3.")

    def test_equal_ranks_that_no_axis_distinguishes_are_listed(self) -> None:
        told = cause(
            {1: NOISE, 2: NOISE}, plan=Plan(dp=2, tp=2), location=REDUCTION, compared_on=(0, 1, 2, 3)
        )
        assert told.endswith("; equal on rank 0, 3.")

    def test_equal_earlier_micro_batches_are_mentioned(self) -> None:
        plan = Plan(dp=2, microbatches=2)
        ends = [cause(NOISE, plan=plan, location=Location(0, StepPhase.FORWARD, 1, m)) for m in range(4)]
        assert [told.endswith("; micro-batches before it are equal.") for told in ends] == [0, 1, 0, 1]

    def test_equal_earlier_steps_are_mentioned(self) -> None:
        assert cause(NOISE, location=Location(1, StepPhase.FORWARD, 1, 0)).endswith(
            "; the steps before it are equal."
        )

    def test_all_circumstances_are_joined_in_one_sentence(self) -> None:
        plan = Plan(tp=2, microbatches=2)
        made = symptoms(
            {0: NOISE}, plan=plan, location=Location(2, StepPhase.FORWARD, 1, 1), compared_on=(0, 1)
        )
        circumstances = "equal on tp 1; micro-batches before it are equal; the steps before it are equal."
        assert likely_cause(made) == f"{unexplained(made)}; {circumstances}"


P, ALL = StepPhase, {"tp": 3, "cp": 5, "dp": 2, "the number of micro-batches": 4, "pp": 7}


def test_the_degrees_over_which_each_phases_tensors_are_summed_are_the_listed_ones() -> None:
    plan = Plan(pp=7, dp=2, cp=5, tp=3, microbatches=4)
    none = (P.LOAD, P.INITIAL, P.INPUT, P.PARAMETERS, P.MESSAGE, P.GRADIENT_MESSAGE)
    for phase in StepPhase:
        for partitioned in (True, False):
            made = Symptoms(difference_at(Location(0, phase), EXPECTED, NOISE), {}, [], [], plan, partitioned)
            expected = [] if phase in none else list(ALL)
            if phase in (P.FORWARD, P.INPUT_GRADIENT):
                expected = ["tp"] if partitioned else []
            elif phase in (P.LOSS, P.WEIGHT_GRADIENT):
                expected = ["tp"] if phase is P.LOSS else list(ALL)[:-1]
            assert _degrees(made) == {name: ALL[name] for name in expected}, phase
            alone = replace(made, plan=ONE)
            assert _degrees(alone) == {}


def test_factors_are_written_as_fractions_or_small_deviations() -> None:
    words = {
        **{2.0: "2", -2.0: "-2", 1.0: "1", 0.5: "1/2", 1.5: "3/2", 2 / 3: "2/3", 0.25: "1/4", 5 / 6: "5/6"},
        **{0.375: "3/8", 1.004: "1 + 4.0e-03", 0.996: "1 - 4.0e-03", 7.31: "7.31", 1.02: "1.02", 0.2: "0.2"},
    }
    assert {ratio: factor_text(ratio) for ratio in words} == words


def test_tensors_of_another_shape_have_no_elementwise_cause() -> None:
    for actual, base in ((EXPECTED, None), (2 * EXPECTED, EXPECTED), (0 * EXPECTED, EXPECTED)):
        made = symptoms(actual, base=base)
        whole = made.first
        flat = None if base is None else base[:2].flatten()
        short = replace(whole, actual=actual[:2].flatten(), base=flat)
        assert fitting(replace(made, evidence={0: short})) == []


def test_shifts_by_one_or_two_places_either_way() -> None:
    rows = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for places, words in (
        (1, "1 place later"),
        (2, "2 places later"),
        (-1, "1 place earlier"),
        (-2, "2 places"),
    ):
        for dim in (0, 1):
            expected = rows if dim == 0 else rows.T.contiguous()
            actual = expected.roll(places, dim)
            kept = [slice(None)] * 2
            kept[dim] = slice(0, places) if places > 0 else slice(places, None)
            actual[tuple(kept)] = 9.0
            told = shifted(symptoms(actual, expected=expected))
            assert told is not None
            assert told.startswith(f"it is shifted: along dim {dim} it stands {words}")
    assert shifted(symptoms(rows.roll(3, 0), expected=rows)) is None


def test_only_the_first_of_many_permuted_slices_are_listed() -> None:
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    told = permuted(symptoms(rows.roll(1, 0), expected=rows))
    assert told == "dim 0 is in another order: it has 7 at 0, 0 at 1, 1 at 2, 2 at 3 and 4 more"
    columns = permuted(symptoms(rows[:, [1, 0, 2]], expected=rows, location=Location(0, P.PARAMETERS, 1)))
    assert columns == "dim 1 is in another order: it has 1 at 0, 0 at 1; parts were gathered to other places"
    assert permuted(symptoms(rows[:1, :1], expected=rows[:1, :1] + 1)) is None


def test_scattered_elements_in_a_box_are_no_part_of_a_dim() -> None:
    box = {"box": ((0, 2), (0, 6)), "whole_box": False}
    for share, part in ((12 / 24, (0, 0, 2, 4)), (6 / 24, (0, 0, 2, 4)), (5 / 24, None)):
        assert range_of(symptoms(NOISE, share=share, **box)) == part
    corner = {"box": ((0, 2), (1, 6)), "whole_box": False}
    assert range_of(symptoms(NOISE, share=10 / 24, **corner)) is None
    assert range_of(symptoms(NOISE, share=1.0, box=((0, 2), (0, 6)), whole_box=True)) is None
    assert range_of(symptoms(NOISE, share=1.0, box=(), whole_box=False)) is None
