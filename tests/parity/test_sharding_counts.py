"""What sharding communicates and keeps: counted, against the formulas."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity.case import SEED
from parity.cases import gpt2
from plait.engine import Engine
from plait.plan.plan import Plan
from plait.ranks.group import Count
from plait.ranks.transport.shared_memory.shared_staging import CAPACITY

CASE = gpt2(layers=2, tied=False, hidden=64, heads=2, vocab=256)
ITEM = {"fp32": 4, "bf16": 2, "fp64": 8}
MICROBATCHES = 3


def engine_of(plan: Plan) -> Engine:
    return plait.parallelize(CASE.build(), plan, plait.Mesh(plan), CASE.loss, seed=SEED)


def batch(plan: Plan) -> Any:
    (pair,) = CASE.batches(2 * plan.microbatches, 1, torch.float32)
    return pair


def sizes_of(engine: Engine) -> list[int]:
    """Elements of each unit, padding included, in the order of layers."""
    return [
        sum(buffer.spec.offsets.size for buffer in unit.buffers) for unit in engine.runtime.units.values()
    ]


def traffic_of(plan: Plan) -> tuple[Any, list[int]]:
    engine = engine_of(plan)
    for _ in range(2):
        engine.forward_backward(*batch(plan))
    return engine.traffic(), sizes_of(engine)


@pytest.mark.parametrize("reduce", ["last", "each"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_gathers_and_scatters_of_each_strategy_send_the_bytes_of_the_formula(
    thread_ranks: Any, strategy: Any, ranks: int, reduce: Any
) -> None:
    plan = Plan(dp=ranks, strategy=strategy, reduce=reduce, microbatches=MICROBATCHES, precision="fp32")
    for traffic, sizes in thread_ranks.run(traffic_of, plan, ranks=ranks):
        shards = [size // ranks for size in sizes]
        if strategy == "full":
            # Twice a micro-batch; but the last layer's stay from F to B, and the first one's from B to F.
            gathers = [2 * MICROBATCHES] * len(sizes)
            gathers[-1] = MICROBATCHES
            gathers[0] = MICROBATCHES + 1
        else:
            gathers = [1] * len(sizes)
        scatters = MICROBATCHES if reduce == "each" and strategy != "optimizer" else 1
        moved = sum(count * shard for count, shard in zip(gathers, shards, strict=True))
        assert traffic["shard"] == {
            "all_gather": Count(sum(gathers), 4 * moved),
            "reduce_scatter": Count(scatters * len(sizes), scatters * 4 * sum(sizes)),
        }
        assert "replicate" not in traffic


def test_gradients_of_replicated_shards_are_summed_once(thread_ranks: Any) -> None:
    plan = Plan(dp=4, replicate=2, strategy="full", reduce="each", microbatches=MICROBATCHES)
    for traffic, sizes in thread_ranks.run(traffic_of, plan, ranks=4):
        assert traffic["replicate"] == {"all_reduce": Count(len(sizes), 4 * sum(sizes) // 2)}


def storages() -> dict[int, int]:
    """The bytes of every tensor with memory in this process, by its address; what is shared counts once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if 0 < storage.nbytes() < CAPACITY:  # not the staging buffers of ranks of one host
                found[storage.data_ptr()] = storage.nbytes()
    return found


def state_of(plan: Plan) -> tuple[int, int]:
    """Bytes that stay between steps (parameters, gradients, optimizer state), and parameters of the model."""
    before = storages()
    engine = engine_of(plan)
    elements = sum(whole.numel() for whole in CASE.build().parameters())
    optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
    for _ in range(2):
        engine.forward_backward(*batch(plan))
        optimizer.step()
    after = storages()
    return sum(size for at, size in after.items() if at not in before), elements


STATE = {
    "none": lambda p, g, k, n: p + g + k,
    "optimizer": lambda p, g, k, n: p + g + k / n,
    "gradients": lambda p, g, k, n: p + (g + k) / n,
    "full": lambda p, g, k, n: (p + g + k) / n,
}
"""Of the ZeRO paper, section 3 (bytes per parameter): `p` parameters, `g` gradients, `k` optimizer."""


def states() -> list[Any]:
    """Every strategy in fp32 on two ranks, and whole sharding in bf16 on four; the full run has all."""
    rows = product(STATE, ("fp32", "bf16"), (2, 4))
    quick = {("full", "bf16", 4), *((strategy, "fp32", 2) for strategy in STATE)}
    return [pytest.param(*row, marks=[] if row in quick else pytest.mark.full) for row in rows]


@pytest.mark.parametrize(("strategy", "precision", "ranks"), states())
def test_bytes_of_state_of_each_strategy_are_those_of_the_formula(
    rank_pool: Any, strategy: Any, ranks: int, precision: Any
) -> None:
    formats = {"precision": precision, "master_precision": precision}
    plan = Plan(dp=ranks, strategy=strategy, reduce="each", microbatches=MICROBATCHES, **formats)
    item = ITEM[precision]
    for counted, elements in rank_pool.run(state_of, plan, ranks=ranks):
        expected = STATE[strategy](item, item, 2 * item, ranks) * elements
        assert abs(counted - expected) < 0.005 * expected, counted / expected


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_bytes_of_state_with_fp32_masters_are_those_of_the_formula(rank_pool: Any, strategy: Any) -> None:
    """bf16 for layers, fp32 for gradients, masters and both moments."""
    plan = Plan(dp=2, strategy=strategy, reduce="each", precision="bf16")
    for counted, elements in rank_pool.run(state_of, plan, ranks=2):
        shards = {"optimizer": (2 + 4, 12), "gradients": (2, 4 + 12), "full": (0, 4 + 12)}[strategy]
        expected = (shards[0] + shards[1] / 2) * elements
        assert abs(counted - expected) < 0.005 * expected, counted / expected


def alive_in(plan: Plan) -> tuple[int, int, list[int]]:
    """The most bytes of gathered parameters and of whole gradients at any time; the bytes of each unit."""
    engine = engine_of(plan)
    most: Counter[str] = Counter()

    def observe(_: Any, runtime: Any) -> None:
        buffers = [buffer for unit in runtime.units.values() for buffer in unit.buffers]
        wholes = sum(buffer.whole.untyped_storage().nbytes() for buffer in buffers)
        gradients = sum(buffer.gradient.untyped_storage().nbytes() for buffer in buffers)
        most["whole"], most["gradient"] = max(most["whole"], wholes), max(most["gradient"], gradients)

    engine.observe(observe)
    engine.forward_backward(*batch(plan))
    return most["whole"], most["gradient"], [4 * size for size in sizes_of(engine)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_with_full_at_most_two_layers_are_gathered_at_once(rank_pool: Any, schedule: Any) -> None:
    plan = Plan(dp=2, strategy="full", reduce="each", microbatches=MICROBATCHES, schedule=schedule)
    for parameters, gradients, units in rank_pool.run(alive_in, plan, ranks=2):
        neighbours = max(a + b for a, b in pairwise(units))
        assert parameters == neighbours
        assert gradients <= neighbours
