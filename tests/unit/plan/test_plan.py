from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, get_args

import pytest

from plait.errors import PlanError
from plait.plan.plan import Plan, Policy
from plait.schedules.search.schedule_by_policy import POLICY_NAMES


def test_the_default_plan_is_one_rank() -> None:
    plan = Plan()
    assert (plan.pp, plan.dp, plan.tp, plan.replicate, plan.shard, plan.world) == (1, 1, 1, 1, 1, 1)
    assert (plan.schedule, plan.microbatches, plan.strategy, plan.reduce) == ("1f1b", 1, "none", "last")


def test_shard_and_world_follow_from_the_other_degrees() -> None:
    plan = Plan(pp=2, dp=6, tp=3, replicate=2)
    assert (plan.shard, plan.world) == (3, 36)


def test_a_plan_is_comparable_hashable_and_immutable() -> None:
    assert Plan(pp=2, layers_per_stage=(1, 2)) == Plan(pp=2, layers_per_stage=(1, 2))
    assert hash(Plan(pp=2)) == hash(Plan(pp=2)) != hash(Plan(pp=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().pp = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["pp", "dp", "tp", "replicate", "microbatches"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, None])
def test_counts_are_whole_and_positive(name: str, value: object) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"plan.{name} is {value!r}: give a whole number of at least 1."


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("schedule", "gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, auto"),
        ("strategy", "none, optimizer, gradients, full"),
        ("reduce", "last, each"),
        ("recompute", "none, selective, full"),
        ("precision", "fp64, fp32, bf16, fp16"),
        ("master_precision", "fp64, fp32, bf16, fp16"),
        ("gradient_precision", "fp64, fp32, bf16, fp16"),
        ("reduce_precision", "fp64, fp32, bf16, fp16"),
        ("offload", "none, parameters, full"),
        ("sequence_parallel", "none, keep, regather"),
    ],
)
@pytest.mark.parametrize("value", ["zero", "", 1])
def test_an_unknown_choice_of_a_plan_lists_the_choices(name: str, choices: str, value: object) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"plan.{name} is {value!r}: choose one of {choices}."


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("schedule", "1fb1", "1f1b"),
        ("schedule", "ZB-V", "zb-v"),
        ("strategy", "ful", "full"),
        ("precision", "FP32", "fp32"),
        ("recompute", "selectiv", "selective"),
    ],
)
def test_a_misspelled_choice_of_a_plan_suggests_the_nearest(name: str, value: str, near: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"plan.{name} is {value!r}: did you mean {near}?"


def test_the_schedules_of_a_plan_are_the_known_policies() -> None:
    assert get_args(Policy) == POLICY_NAMES


def test_an_empty_recompute_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan\.recompute is \(\): give one"):
        Plan(recompute=())


def test_without_a_precision_the_model_keeps_its_own() -> None:
    plan = Plan()
    assert (plan.precision, plan.master_precision, plan.gradient_precision, plan.reduce_precision) == (
        None,
    ) * 4
    assert (plan.offload, plan.loss_scale) == ("none", None)


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_the_optimizer_has_shards_where_something_is_cut_or_offloaded(strategy: Any) -> None:
    assert Plan(dp=2, strategy=strategy).shards
    assert not Plan(dp=2, replicate=2, strategy=strategy).shards
    assert not Plan(strategy=strategy).shards
    assert Plan(strategy=strategy, offload="parameters").shards
    assert not Plan(dp=2).shards


@pytest.mark.parametrize("offload", ["parameters", "full"])
def test_without_a_strategy_nothing_is_offloaded(offload: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(dp=2, offload=offload)
    assert str(caught.value) == (
        f"plan.offload is {offload!r}, but with plan.strategy 'none' nothing is sharded: "
        "choose the strategy full, gradients or optimizer."
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_of_16_bit_training_are_fp32_unless_others_are_asked_for(precision: Any) -> None:
    assert Plan(precision=precision) == Plan(precision=precision, master_precision="fp32")
    assert Plan(precision=precision, master_precision="fp64").master_precision == "fp64"
    assert Plan(precision="bf16", master_precision="bf16").master_precision == "bf16"
    assert replace(Plan(), precision=precision).master_precision == "fp32"


@pytest.mark.parametrize(("precision", "master"), [("fp64", "fp32"), ("fp32", "bf16"), ("fp64", "fp16")])
def test_masters_of_fewer_digits_than_the_layers_compute_in_are_refused(precision: Any, master: Any) -> None:
    with pytest.raises(
        PlanError, match=rf"plan\.master_precision is {master!r}, narrower than .*{precision}"
    ):
        Plan(precision=precision, master_precision=master)


@pytest.mark.parametrize("master", ["bf16", "fp16"])
def test_half_precision_needs_a_master(master: Any) -> None:
    with pytest.raises(
        PlanError, match=rf"plan\.precision is 'fp16' and plan\.master_precision is {master!r}: "
    ):
        Plan(precision="fp16", master_precision=master)
    assert Plan(precision="fp16").master_precision == "fp32"


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), "8"])
def test_other_loss_scales_are_refused(scale: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(loss_scale=scale)
    assert str(caught.value) == f"plan.loss_scale is {scale!r}: give a number above 0, or None."
    assert Plan(loss_scale=0.5).loss_scale == 0.5


@pytest.mark.parametrize("counts", [(), 5, (0, 5), (6, -1), (2, "3")])
def test_layers_per_stage_are_counts(counts: object) -> None:
    with pytest.raises(PlanError, match=r"plan\.layers_per_stage is "):
        Plan(pp=2, layers_per_stage=counts)  # type: ignore[arg-type]


def test_a_list_of_counts_makes_the_same_plan() -> None:
    assert Plan(pp=2, layers_per_stage=[1, 2]) == Plan(pp=2, layers_per_stage=(1, 2))  # type: ignore[arg-type]


def test_linears_are_one_of_the_recipes_and_not_under_fp16() -> None:
    assert Plan().linears is None
    assert Plan(linears="float8-rowwise", precision="bf16").linears == "float8-rowwise"
    with pytest.raises(PlanError, match=r"plan.linears is 'float8_rowwise': did you mean float8-rowwise\?"):
        Plan(linears="float8_rowwise")  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match=r"plan.linears is 'float8' and plan.precision is 'fp16'.*'bf16' or 'fp32'"
    ):
        Plan(linears="float8", precision="fp16")
    with pytest.raises(
        PlanError, match=r"plan.linears is 'float8' and plan.cuda_graphs True, but the scales"
    ):
        Plan(linears="float8", cuda_graphs=True)


@pytest.mark.parametrize("count", [0, -2, 1.5, "a"])
@pytest.mark.parametrize("name", ["chunks", "loss_rows"])
def test_chunks_and_loss_rows_are_positive_whole_numbers(name: str, count: object) -> None:
    assert getattr(Plan(**{name: 2}), name) == 2  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"plan.{name} is {count!r}: give a whole number of at least 1"):
        Plan(**{name: count})  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False, None])
def test_overlap_is_chosen_or_left_open(overlap: bool | None) -> None:
    assert Plan(overlap=overlap).overlap is overlap
    assert Plan().overlap is None


@pytest.mark.parametrize("overlap", [1, 0, "yes", ()])
def test_other_overlaps_are_refused(overlap: object) -> None:
    """`Plan.overlap` is True, False or None."""
    with pytest.raises(PlanError) as caught:
        Plan(overlap=overlap)  # type: ignore[arg-type]
    assert str(caught.value) == f"plan.overlap is {overlap!r}: give True, False or None."


@pytest.mark.parametrize(("dp", "replicate"), [(4, 3), (2, 4), (1, 2)])
def test_a_replicate_that_does_not_divide_dp_is_refused(dp: int, replicate: int) -> None:
    with pytest.raises(PlanError, match=rf"plan\.replicate = {replicate} does not divide plan\.dp = {dp}: "):
        Plan(dp=dp, replicate=replicate)


def test_a_plan_takes_keyword_arguments_only() -> None:
    with pytest.raises(TypeError):
        Plan(2, 2)  # type: ignore[misc]
