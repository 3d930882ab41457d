from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.plan.parameter_units import (
    FLOAT8,
    PRECISIONS,
    Dtype,
    ModelParameter,
    UnitTiming,
    kind_of,
    resolve_units,
    timing_of,
)
from plait.plan.plan import Plan

OPTIMIZER = UnitTiming(gathers="once", scatters="last")
GRADIENTS = {how: UnitTiming(gathers="once", scatters=how, allocates=True) for how in ("last", "each")}
FULL = {how: UnitTiming(gathers="each use", scatters=how, allocates=True) for how in ("last", "each")}


@pytest.mark.parametrize("reduce", ["last", "each"])
def test_what_a_strategy_asks_for(reduce: Any) -> None:
    def asked(**options: Any) -> UnitTiming:
        return timing_of(Plan(reduce=reduce, **options))

    assert asked(dp=2) == UnitTiming()
    assert asked(dp=2, strategy="optimizer") == OPTIMIZER, "whole gradients are kept anyway"
    assert asked(dp=2, strategy="gradients") == GRADIENTS[reduce]
    assert asked(dp=2, strategy="full") == FULL[reduce]
    assert asked(dp=4, replicate=2, strategy="full") == FULL[reduce]


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_nothing_is_cut_between_one_rank(strategy: Any) -> None:
    assert timing_of(Plan(dp=2, replicate=2, strategy=strategy)) == UnitTiming()
    assert timing_of(Plan(strategy=strategy)) == UnitTiming()


def test_what_is_offloaded_is_gathered_though_a_rank_is_alone() -> None:
    assert timing_of(Plan(strategy="full", offload="parameters")) == FULL["last"]
    assert timing_of(Plan(strategy="optimizer", offload="full")) == OPTIMIZER


@pytest.mark.parametrize(
    ("precision", "master", "casts"),
    [
        (None, None, False),
        ("fp32", None, False),
        ("bf16", None, True),
        ("fp16", None, True),
        ("bf16", "bf16", False),
        ("bf16", "fp32", True),
        (None, "fp32", True),
    ],
)
def test_layers_get_what_a_master_has_become_once_a_step(precision: Any, master: Any, casts: bool) -> None:
    plan = Plan(dp=2, precision=precision, master_precision=master)
    assert timing_of(plan) == UnitTiming(gathers="once" if casts else "never")
    assert timing_of(replace(plan, strategy="full")) == FULL["last"]


OWN, HALF, SINGLE = Dtype("float64", 8), PRECISIONS["bf16"], PRECISIONS["fp32"]


@pytest.mark.parametrize(
    ("plan", "dtypes"),
    [
        ({}, (OWN, OWN, OWN, OWN)),
        ({"precision": "bf16", "master_precision": "bf16"}, (HALF, HALF, HALF, HALF)),
        ({"precision": "bf16"}, (HALF, SINGLE, SINGLE, SINGLE)),
        (
            {"precision": "bf16", "master_precision": "bf16", "gradient_precision": "fp32"},
            (HALF, HALF, SINGLE, SINGLE),
        ),
        ({"precision": "bf16", "reduce_precision": "bf16"}, (HALF, SINGLE, SINGLE, HALF)),
        ({"precision": "bf16", "gradient_precision": "bf16"}, (HALF, SINGLE, HALF, HALF)),
        ({"master_precision": "fp32"}, (OWN, SINGLE, SINGLE, SINGLE)),
        ({"reduce_precision": "fp32"}, (OWN, OWN, OWN, SINGLE)),
    ],
    ids=str,
)
def test_each_dtype_is_by_default_the_one_before(plan: dict[str, Any], dtypes: tuple[Dtype, ...]) -> None:
    kind = kind_of(Plan(**plan), ModelParameter(OWN))
    assert (kind.compute, kind.master, kind.gradient, kind.reduce) == dtypes


def test_precisions_are_for_floating_point_numbers() -> None:
    plan, whole = Plan(precision="bf16", reduce_precision="bf16"), Dtype("int64", 8)
    kind = kind_of(plan, ModelParameter(whole, is_floating=False, trains=False))
    assert {kind.compute, kind.master, kind.gradient, kind.reduce} == {whole}


def test_a_frozen_parameter_has_no_master() -> None:
    kind = kind_of(Plan(precision="bf16"), ModelParameter(OWN, trains=False))
    assert (kind.compute, kind.master) == (HALF, HALF)


def test_weights_that_linears_cast_once_are_gathered_in_float8_where_layers_have_copies() -> None:
    weight = ModelParameter(takes_float8=True)
    for plan, gather in (
        (Plan(dp=2, strategy="full"), FLOAT8),
        (Plan(precision="bf16"), FLOAT8),
        (Plan(dp=2), SINGLE),
        (Plan(precision="bf16", master_precision="bf16"), HALF),
    ):
        kind = kind_of(plan, weight)
        assert kind.gather == gather
        assert kind.has_master == (kind.master != gather)
    frozen = replace(weight, trains=False)
    assert kind_of(Plan(dp=2, strategy="optimizer"), frozen).gather == SINGLE, "it is not sharded"
    assert kind_of(Plan(dp=2, strategy="full"), frozen).gather == FLOAT8
    units = resolve_units(
        Plan(precision="bf16"),
        {"w": weight, "b": ModelParameter()},
        {"0": "w", "1": "b"},
        {"0": (0,), "1": (1,)},
    )
    assert [units[name].timing.scales for name in "01"] == [True, False]


def test_gradients_are_summed_once_over_each_data_axis() -> None:
    for strategy in ("none", "optimizer", "gradients", "full"):
        kind = kind_of(Plan(dp=4, replicate=2, cp=2, strategy=strategy))
        assert sorted((*kind.sharded_over, *kind.reduced_over)) == ["cp", "replicate", "shard"]
        assert kind.sharded == (strategy != "none")
