"""The space of plans: every division of some ranks with its options, written out."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from plait.estimate.prediction.predicted_model import DecoderModel
from plait.estimate.search.plan_space import PlanChoices, RankDivision, divisions, divisors_of
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

ALL = PlanChoices()
MODEL = Decoder(layers=2, hidden=96, heads=6, kv_heads=2, inner=128, vocab=100, context=32)


def test_divisors_of_a_number_are_listed_in_ascending_order() -> None:
    assert [divisors_of(one) for one in (1, 2, 9, 12)] == [(1,), (1, 2), (1, 3, 9), (1, 2, 3, 4, 6, 12)]


def test_divisions_are_all_that_model_and_batch_allow() -> None:
    possible, impossible = divisions(DecoderModel(MODEL), 4, 2, Plan())
    assert impossible == {HEADS: 1, BATCH: 1}
    assert {(one.pp, one.dp, one.cp, one.tp, one.microbatches) for one in possible} == {
        *((4, 1, 1, 1, 1), (4, 1, 1, 1, 2), (2, 2, 1, 1, 1)),
        *((2, 1, 2, 1, 1), (2, 1, 2, 1, 2), (1, 2, 2, 1, 1), (1, 1, 4, 1, 1), (1, 1, 4, 1, 2)),
        *((2, 1, 1, 2, 1), (2, 1, 1, 2, 2), (1, 2, 1, 2, 1), (1, 1, 2, 2, 1), (1, 1, 2, 2, 2)),
    }


HEADS, WIDTH = "tp does not divide the heads", "tp does not divide the width inside the MLP"
CONTEXT, BATCH = "2 · cp does not divide the context", "dp does not divide the batch"


def test_each_reason_makes_a_division_impossible() -> None:
    for model, ranks, batch, expected in [
        (replace(MODEL, inner=48), 3, 1, {HEADS: 1, CONTEXT: 1, BATCH: 1}),  # two heads of keys over three
        (replace(MODEL, inner=50, kv_heads=6, context=36), 3, 3, {WIDTH: 1}),
        # Three heads of keys over two ranks, which each need one and a half; not over three or six.
        (
            replace(MODEL, kv_heads=3, inner=96, context=36, layers=1),
            *(6, 6, {HEADS: 3, "pp is more than the layers": 1}),
        ),
        (replace(MODEL, kv_heads=1, inner=96, context=12, layers=9), 6, 6, {}),
    ]:
        assert divisions(DecoderModel(model), ranks, batch, Plan())[1] == expected


def test_options_are_those_of_the_axes_that_a_division_has() -> None:
    modes = ("none", "selective", "full")
    alone, both = RankDivision(1, 1, 1, 1, 2), RankDivision(2, 4, 1, 2, 8)
    assert [*alone.layer_options(ALL)] == [(mode, "none") for mode in modes]
    assert [*both.layer_options(ALL)] == [*product(modes, ("none", "keep", "regather"))]
    assert [*alone.states(ALL)] == [("none", "last", 1)]
    sharded = (("optimizer", "last"), ("gradients", "each"), ("full", "last"), ("full", "each"))
    expected = [("none", "last", 1), *((*one, copies) for one in sharded for copies in (1, 2))]
    assert [*both.states(ALL)] == expected  # with four copies nothing is sharded
    context = RankDivision(1, 2, 2, 1, 1)  # but over the ranks of a context it is
    assert [*context.states(ALL)] == expected
    assert [*RankDivision(1, 1, 2, 1, 1).states(ALL)] == [
        ("none", "last", 1),
        *((*one, 1) for one in sharded),
    ]
    base = Plan(precision="bf16", layers_per_stage=(1,), recompute="full", replicate=1)
    plans = [*both.options(base, ALL)]
    assert len(plans) == 9 * 9
    assert plans[1] == Plan(
        pp=2, dp=4, tp=2, microbatches=8, precision="bf16", recompute="none", strategy="optimizer"
    )
    assert plans[-1] == replace(
        plans[1], recompute="full", sequence_parallel="regather", strategy="full", reduce="each", replicate=2
    )


def test_policies_are_those_that_can_cut_the_layers_and_are_soon_made() -> None:
    def named(pp: int, microbatches: int, layers: int) -> list[tuple[str, int]]:
        return [*RankDivision(pp, 1, 1, 1, microbatches).schedules(layers, ALL)]

    assert named(1, 8, 100) == [("1f1b", 1)]
    several = [*(("interleaved", chunks) for chunks in (2, 3, 4)), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)]
    assert named(4, 8, 16) == [("1f1b", 1), *several]
    assert named(4, 8, 15) == [one for one in ALL.schedules if one != ("interleaved", 4)]
    assert named(4, 8, 7) == [("1f1b", 1), ("zb-h1", 1)]
    assert named(4, 512, 16) == [*ALL.schedules]
    assert named(4, 513, 16) == [*ALL.schedules[:5]]  # without those that are fitted action by action
