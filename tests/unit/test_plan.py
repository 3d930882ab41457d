from __future__ import annotations

import dataclasses

import pytest

from plait.errors import PlanError
from plait.plan import Plan


def test_defaults_are_one_rank() -> None:
    plan = Plan()
    assert (plan.pp, plan.dp, plan.tp, plan.replicate, plan.shard, plan.world) == (1, 1, 1, 1, 1, 1)
    assert (plan.schedule, plan.microbatches, plan.strategy, plan.reduce) == ("1f1b", 1, "none", "last")


def test_degrees() -> None:
    plan = Plan(pp=2, dp=6, tp=3, replicate=2)
    assert (plan.shard, plan.world) == (3, 36)


def test_a_plan_is_a_value() -> None:
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
        ("strategy", "none, optimizer, gradients, full"),
        ("reduce", "last, each"),
        ("recompute", "none, selective, full"),
        ("precision", "fp64, fp32, bf16, fp16"),
    ],
)
@pytest.mark.parametrize("value", ["zero", "", 1])
def test_choices(name: str, choices: str, value: object) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"plan.{name} is {value!r}: choose one of {choices}."


def test_without_a_precision_the_model_keeps_its_own() -> None:
    assert Plan().precision is None


@pytest.mark.parametrize("counts", [(), 5, (0, 5), (6, -1), (2, "3")])
def test_layers_per_stage_are_counts(counts: object) -> None:
    with pytest.raises(PlanError, match=r"plan\.layers_per_stage is "):
        Plan(pp=2, layers_per_stage=counts)  # type: ignore[arg-type]


def test_a_list_of_counts_makes_the_same_plan() -> None:
    assert Plan(pp=2, layers_per_stage=[1, 2]) == Plan(pp=2, layers_per_stage=(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [0, -2, 1.5, "a"])
def test_chunks_are_positive(chunks: object) -> None:
    assert Plan(chunks=2).chunks == 2
    with pytest.raises(PlanError, match=f"plan.chunks is {chunks!r}: give a whole number of at least 1"):
        Plan(chunks=chunks)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False, None])
def test_overlap_is_chosen_or_left_open(overlap: bool | None) -> None:
    assert Plan(overlap=overlap).overlap is overlap
    assert Plan().overlap is None


@pytest.mark.parametrize("overlap", [1, 0, "yes", ()])
def test_other_overlaps_are_refused(overlap: object) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(overlap=overlap)  # type: ignore[arg-type]
    assert str(caught.value) == f"plan.overlap is {overlap!r}: give True, False or None."


@pytest.mark.parametrize(("dp", "replicate"), [(4, 3), (2, 4), (1, 2)])
def test_replicate_divides_dp(dp: int, replicate: int) -> None:
    with pytest.raises(PlanError, match=rf"plan\.replicate = {replicate} does not divide plan\.dp = {dp}: "):
        Plan(dp=dp, replicate=replicate)


def test_everything_is_said_by_name() -> None:
    with pytest.raises(TypeError):
        Plan(2, 2)  # type: ignore[misc]
