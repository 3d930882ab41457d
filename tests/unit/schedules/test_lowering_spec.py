from __future__ import annotations

from typing import Any

import pytest

from plait.plan import Plan
from plait.schedules.lowering_spec import WHOLE, LayerIndex, LoweringSpec, Sharding, sharding_of

MASTER = {"precision": "bf16", "master_precision": "fp32"}
OPTIMIZER = Sharding(gathers="once", scatters="last")
GRADIENTS = {how: Sharding(gathers="once", scatters=how, allocates=True) for how in ("last", "each")}
FULL = {how: Sharding(gathers="each use", scatters=how, allocates=True) for how in ("last", "each")}


@pytest.mark.parametrize("reduce", ["last", "each"])
def test_each_strategy_asks_for_its_gathers_and_scatters(reduce: Any) -> None:
    def asked(**options: Any) -> Sharding:
        return sharding_of(Plan(reduce=reduce, **options))

    assert asked(dp=2) == WHOLE
    assert asked(dp=2, strategy="optimizer") == OPTIMIZER, "whole gradients are kept anyway"
    assert asked(dp=2, strategy="gradients") == GRADIENTS[reduce]
    assert asked(dp=2, strategy="full") == FULL[reduce]
    assert asked(dp=4, replicate=2, strategy="full") == FULL[reduce]


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_one_rank_shards_nothing(strategy: Any) -> None:
    assert sharding_of(Plan(dp=2, replicate=2, strategy=strategy)) == WHOLE
    assert sharding_of(Plan(strategy=strategy)) == WHOLE


def test_offloaded_parameters_are_gathered_even_on_one_rank() -> None:
    assert sharding_of(Plan(strategy="full", offload="parameters")) == FULL["last"]
    assert sharding_of(Plan(strategy="optimizer", offload="full")) == OPTIMIZER


def test_parameters_with_masters_are_gathered_once_a_step() -> None:
    assert sharding_of(Plan(dp=2, **MASTER)) == Sharding(gathers="once")
    assert sharding_of(Plan(dp=2, strategy="full", **MASTER)) == FULL["last"]
    assert sharding_of(Plan(dp=2, precision="bf16", master_precision="bf16")) == WHOLE


def test_layers_have_the_units_that_they_use_and_the_last_is_that_of_the_last_stage() -> None:
    first, last = LayerIndex(0, 1), LayerIndex(1, 2)
    spec = LoweringSpec((2, 3), {"table": (LayerIndex(0, 0), last), "own": (last,), "other": (first,)})
    assert spec.last_layer == last
    assert spec.units_of_layers() == {
        LayerIndex(0, 0): ("table",),
        first: ("other",),
        last: ("table", "own"),
    }
    assert (spec.overlap, spec.posts_late, spec.replicated, spec.loss_computes_logits) == (
        None,
        False,
        True,
        False,
    )
