"""Bytes of state beside formulas: each strategy, with and without masters, and tied tables."""

from __future__ import annotations

from typing import Any

from plait.estimate.memory.state_memory import (
    ParameterCounts,
    rank_parameter_counts,
    state_bytes,
    whole_gradients,
)
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan
from plait.schedules.action import Kind

DECODER = Decoder(layers=2, hidden=96, heads=6, kv_heads=2, inner=160, vocab=510, context=64, tied=True)
MIXED = {"precision": "bf16", "master_precision": "fp32"}
SIZES = ParameterCounts(whole=1000, twice=100, pair=150)


def shape_of(**fields: Any) -> MicrobatchShape:
    return MicrobatchShape(DECODER, Plan(**{**MIXED, **fields}), rows=1)


def test_sizes_of_a_rank_are_those_of_its_stages_and_of_the_largest_neighbours() -> None:
    """Half of each matrix; a tied table counts once, with a gradient on both stages that use it."""
    shape, table = shape_of(pp=2, tp=2), 96 * 510 / 2
    attention, mlp = 96 * (96 + 32) + 96, 2 * 96 * 160 / 2 + 96
    found = rank_parameter_counts(shape, [("embedding", "attention"), ("mlp", "head")])
    assert found == (table + attention + mlp + 96, table, mlp + table + 96)
    assert rank_parameter_counts(shape, [("attention", "mlp"), ("attention",)]) == (
        2 * attention + mlp,
        0,
        attention + mlp,
    )
    assert rank_parameter_counts(shape, [("embedding",), ("mlp",)]) == (table + mlp, 0, table)


def test_parameters_gradients_and_state_of_a_rank() -> None:
    for fields, expected in [
        ({}, (2000, 4400, 12000, 0)),  # gradients on both stages; masters and two moments in fp32
        ({"dp": 4}, (2000, 4400, 12000, 0)),
        ({"dp": 4, "strategy": "optimizer"}, (2000, 4400, 3000, 0)),
        ({"dp": 2, "cp": 2, "strategy": "gradients"}, (2000, 1000, 3000, 0)),
        ({"dp": 4, "replicate": 2, "strategy": "gradients"}, (2000, 2000, 6000, 0)),
        ({"dp": 4, "strategy": "full"}, (1000, 1000, 2000, 300)),  # shards in fp32, two layers whole
        ({"strategy": "full"}, (2000, 4400, 12000, 0)),
        ({"master_precision": "bf16"}, (2000, 2200, 4000, 0)),
        ({"gradient_precision": "bf16"}, (2000, 2200, 12000, 0)),
        ({"precision": None, "master_precision": None}, (4000, 4400, 8000, 0)),
    ]:
        assert state_bytes(shape_of(**fields), SIZES) == expected


GRADIENTS = {"dp": 4, "microbatches": 2, "strategy": "gradients"}


def test_whole_gradients_are_allocated_from_the_first_backward_on() -> None:
    for fields, splits, always, layer, inputs_add in [
        (GRADIENTS, False, 4400, 1000, True),  # both gradients of a tied table
        ({**GRADIENTS, "gradient_precision": "bf16"}, False, 2200, 500, True),
        ({**GRADIENTS, "reduce": "each"}, False, 400, 1000, False),
        ({**GRADIENTS, "microbatches": 1}, False, 400, 1000, True),
        ({**GRADIENTS, "microbatches": 1}, True, 4400, 1000, True),
        ({**GRADIENTS, "microbatches": 1, "pp": 2}, False, 4400, 1000, True),  # inputs are sent first
        ({**GRADIENTS, "strategy": "optimizer"}, False, 0, 0, False),
        ({**GRADIENTS, "strategy": "full", "dp": 1}, False, 0, 0, False),
    ]:
        added = whole_gradients(shape_of(**fields), SIZES, splits=splits)
        assert (added.always, added.layer, added.inputs_add) == (always, layer, inputs_add)
        inputs = layer if inputs_add else 0
        assert [added.of_layers(kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [
            0,
            inputs,
            layer,
            layer,
        ]
        later = [added.after_backward(kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)]
        assert later == [always, max(always, inputs), max(always, layer), max(always, layer)]
