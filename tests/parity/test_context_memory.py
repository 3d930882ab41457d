"""What attention layers keep of long sequences on a rank of `cp`: predicted, and counted in real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity.live_bytes import LiveBytes
from parity.pairs import in_quick, in_turns
from plait.engine.blueprint import build_blueprint
from plait.estimate.memory.model_traces import trace_model
from plait.plan.plan import Plan
from plait.schedules.action import Kind
from plait.schedules.lowering.program import RunLayer
from plait.tensor.attention.key_exchange_plan import remembered_plan

CP, ATTENTION = 4, 1
"""Ranks, and the number of the attention layer: the embedding is layer 0."""
MOST = 0.27
"""Of what one rank keeps, on each of four."""
LONG, SHORTER = 32_768, 8_192
SIZES = {"layers": 1, "vocab": 64, "tied": False}
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "gpt2": partial(plait.models.gpt2, **SIZES, hidden=768, heads=12),
    "llama": partial(plait.models.llama, **SIZES, hidden=1024, heads=16, kv_heads=4, inner=512),
}
SMALL: dict[str, Callable[..., nn.Module]] = {
    "gpt2": partial(plait.models.gpt2, **SIZES, hidden=32, heads=4),
    "llama": partial(plait.models.llama, **SIZES, hidden=32, heads=4, kv_heads=2, inner=64),
}


@dataclass(frozen=True)
class Bytes:
    """Of the attention layer."""

    kept: int
    """From its forward until its backward, with what layers share for a micro-batch's sequences."""
    forward: int
    """The most within its forward, beside what was there before."""
    backward: int
    """The most within the backward of its input."""
    cached: int = 0
    """Angles and the plan of the exchange, at all times."""


def predicted(model: nn.Module, length: int, plan: Plan) -> Bytes:
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    traces = trace_model(build_blueprint(model, plan), tokens, tokens, plait.cross_entropy)
    layer = traces.layers[ATTENTION]
    kept_storages = {*layer.forward.saved, *layer.forward.results}  # a result is the next layer's input
    kept = sum(layer.forward.allocated.get(number, 0) for number in kept_storages if number is not None)
    kept += sum(traces.shared[ATTENTION].values())
    cached = sum((*traces.caches[ATTENTION].values(), *traces.lasting[ATTENTION].values()))
    return Bytes(kept, layer.forward.peak, layer.backward.peak, cached)


def counted_in_a_rank(make: Callable[..., nn.Module], plan: Plan) -> Bytes:
    """In the second step of a rank."""
    live, after, most = LiveBytes(), dict[Any, int](), dict[Any, int]()
    model: Any = make()
    remembered_plan.cache_clear()
    tokens = torch.randint(64, (1, model.context + 1), generator=torch.Generator().manual_seed(0))
    with live:
        engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)

        def count(instruction: Any, _: Any) -> None:
            now = live.settled()
            if isinstance(instruction, RunLayer):
                run = instruction.action.kind, instruction.layer
                assert live.most is not None
                after[run], most[run] = now, live.most - before[0]
            before[0], live.most = now, 0

        engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
        before, live.most = [0], 0
        engine.observe(count)
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
    kept = after[Kind.F, ATTENTION] - after[Kind.F, ATTENTION - 1]
    return Bytes(kept, most[Kind.F, ATTENTION], most[Kind.I, ATTENTION])


@pytest.mark.parametrize(
    ("family", "layout"),
    in_turns({one: one for one in FAMILIES}, {one: one for one in ("zigzag", "striped", "contiguous")}),
)
def test_a_rank_keeps_its_share_of_a_long_sequence(family: str, layout: Any) -> None:
    """By default, where keys, or outputs, are sent again."""
    model = FAMILIES[family](context=LONG)
    whole = predicted(model, LONG, Plan(precision="fp32"))
    for method in ("ring", "ulysses", "auto"):
        plan = Plan(cp=CP, context_parallel=method, context_layout=layout, precision="fp32")
        share = predicted(model, LONG, plan)
        assert share.kept + share.cached <= MOST * (whole.kept + whole.cached), method


@pytest.mark.parametrize("family", in_quick(FAMILIES, "llama"))
def test_under_cp_4_gathered_keys_and_ulysses_outputs_exceed_a_quarter_of_the_memory(family: str) -> None:
    """Kept keys and values are those of all ranks; with Ulysses the output by heads and by positions."""
    model = FAMILIES[family](context=LONG)
    heads, kv_heads, width = (12, 12, 64) if family == "gpt2" else (16, 4, 64)
    make = partial(Plan, cp=CP, precision="fp32")
    of_ring = predicted(model, LONG, make(context_parallel="ring"))
    ring = of_ring.kept
    kept = predicted(model, LONG, make(context_parallel="ring", sequence_parallel="keep")).kept
    of_ulysses = predicted(model, LONG, make(context_parallel="ulysses"))
    heads_divided = of_ulysses.kept
    twice = predicted(model, LONG, make(context_parallel="ulysses", sequence_parallel="keep")).kept
    others = LONG - LONG // CP
    assert kept - ring == 2 * kv_heads * width * others * 4
    assert twice - heads_divided == heads * width * (LONG // CP) * 4
    assert ring == heads_divided
    assert of_ring.cached == of_ulysses.cached, "the plan of an exchange holds no positions"


@pytest.mark.parametrize(
    ("family", "length", "compile"),
    [
        ("llama", 512, False),
        pytest.param("llama", 1024, "graphs", marks=pytest.mark.full),
        *(
            pytest.param(family, SHORTER, compile, marks=pytest.mark.full)
            for family in FAMILIES
            for compile in (False, "graphs")
        ),
    ],
)
def test_predicted_activations_under_cp_are_those_that_ranks_keep(
    rank_pool: Any, family: str, length: int, compile: Any
) -> None:
    make = partial(SMALL[family], context=length)
    alone = Plan(precision="fp32", schedule="zb-h1", compile=compile)
    plan = replace(alone, cp=CP, context_parallel="ring")
    (whole,) = rank_pool.run(counted_in_a_rank, make, alone, ranks=1)
    ranks = rank_pool.run(counted_in_a_rank, make, plan, ranks=CP)
    assert max(rank.kept for rank in ranks) <= MOST * whole.kept
    for counted, one in ((whole, alone), (ranks[0], plan)):
        expected = predicted(make(), length, one)
        assert counted.kept == pytest.approx(expected.kept, rel=0.01)
        assert counted.forward == pytest.approx(expected.forward, rel=0.05)
        assert counted.backward == pytest.approx(expected.backward, rel=0.05)
