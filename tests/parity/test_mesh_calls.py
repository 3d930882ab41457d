"""Whole meshes under NCCL's rules, as data: equal to what real engines queue, and without a deadlock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from itertools import cycle, islice, pairwise, product
from random import Random
from typing import Any

import pytest

import plait
from parity import woven
from parity.cases import gpt2, sparse_llama
from parity.mesh_calls import (
    AGAIN,
    MODES,
    SHARDINGS,
    SHARDS,
    WORDS,
    Buffer,
    MeshCalls,
    Workload,
    deadlock_in,
    group_of_kind,
    is_message,
    mesh_of_schedule,
)
from parity.pairs import covering_rows, in_quick
from parity.rows import name_of
from parity.stream_rules import StreamRules
from plait.engine import Engine
from plait.engine.blueprint import Blueprint
from plait.plan import axes
from plait.plan.plan import Plan
from plait.schedules.action import Kind
from plait.schedules.lowering.program import LayerIndex
from plait.schedules.lowering.stream_replay import Call, Operation, Queued, deadlock_of
from plait.schedules.named_schedules import POLICIES
from plait.schedules.schedule import Schedule
from plait.schedules.search.schedule_by_policy import AUTO

# ── against real engines ──

LAYERS = {
    "none": {
        "embedding": {Kind.F: "all_reduce"},
        "blocks": {Kind.F: "all_reduce", Kind.I: "all_reduce"},
        "head": {Kind.I: "all_reduce"},
    },
    "keep": {
        "embedding": {Kind.F: "all_reduce", Kind.I: "all_gather"},
        "blocks": {Kind.F: SHARDS, Kind.I: SHARDS},
        "head": {Kind.F: "all_gather", Kind.I: "reduce_scatter"},
    },
    "regather": {
        "embedding": {Kind.F: "all_reduce", Kind.I: "all_gather"},
        "blocks": {
            Kind.F: SHARDS,
            Kind.I: SHARDS,
            Kind.W: "all_gather all_gather",
            Kind.B: f"all_gather {AGAIN}",
        },
        "head": {Kind.F: "all_gather", Kind.I: "reduce_scatter", Kind.W: "all_gather", Kind.B: AGAIN},
    },
}
"""By `plan.sequence_parallel`: the collectives over `tp` of each layer of GPT-2."""
EXCHANGES = {
    Kind.F: "!all_gather all_to_all all_to_all",
    Kind.I: "all_to_all all_to_all",
    Kind.B: "all_to_all all_to_all",
}
"""Over `ep`, of each layer with experts."""


def workload_of(blueprint: Blueprint) -> Workload:
    """What a step of GPT-2 queues."""
    plan, layers = blueprint.plan, blueprint.sequence.layers
    words = LAYERS[plan.sequence_parallel]

    def collectives(at: LayerIndex, kind: Kind) -> str:
        of_layer = words[layers[blueprint.stage_layers[at.stage][at.layer]].path.split(".")[0]]
        if kind is Kind.B and kind not in of_layer:
            return f"{of_layer.get(Kind.I, '')} {of_layer.get(Kind.W, '')}"
        return of_layer.get(kind, "")

    def exchanges(at: LayerIndex, kind: Kind) -> str:
        return EXCHANGES.get(kind, "") if at in blueprint.lowering_spec.exchanges.layers else ""

    def buffers(unit: str) -> list[Buffer]:
        kinds = (spec.kind for spec in blueprint.buffer_specs[unit])
        return [
            Buffer(
                kind.sharded, kind.summands, kind.trains, "edp" in (*kind.sharded_over, *kind.reduced_over)
            )
            for kind in kinds
        ]

    norm = "world" if plan.shards else "model"
    return Workload(collectives, exchanges, "all_reduce all_reduce", buffers, "all_gather", norm)


PLANS: dict[str, dict[str, Any]] = {
    "zb-v": {"pp": 2, "dp": 2, "tp": 2, "strategy": "full", "schedule": "zb-v", "reduce": "each"},
    "1f1b": {"pp": 4, "dp": 2, "strategy": "gradients"},
    "regather": {"pp": 2, "tp": 2, "sequence_parallel": "regather"},
    "optimizer": {"pp": 2, "tp": 2, "sequence_parallel": "regather", "dp": 2, "strategy": "optimizer"},
    "interleaved": {"pp": 4, "tp": 2, "schedule": "interleaved", "sequence_parallel": "keep"},
    "hybrid": {"dp": 4, "replicate": 2, "tp": 2, "strategy": "full"},
    "plain": {"pp": 2, "dp": 2, "tp": 2, "schedule": "v-min"},
    "auto": {"pp": 2, "tp": 2, "dp": 2, "replicate": 2, "schedule": "auto", "strategy": "full"},
    "layerwise": {"pp": 2, "tp": 2, "sequence_parallel": "regather", "overlap": True},
    "zb-h1": {"pp": 2, "tp": 2, "sequence_parallel": "regather", "schedule": "zb-h1"},
    "pp alone": {"pp": 4, "schedule": "v-half"},
    "experts": {"pp": 2, "dp": 2, "ep": 2, "strategy": "full", "schedule": "zb-h1", "reduce": "each"},
    "float8": {"pp": 2, "dp": 2, "strategy": "full", "schedule": "zb-v", "linears": "float8"},
}
QUICK = ("zb-v", "regather", "experts", "float8")
IN_FLOAT8 = {"hidden": 64, "heads": 4}
"""Sizes of linears that multiply in float8: multiples of 16."""
DEVICE_BOUND = ("zb-v", "interleaved", "plain", "auto", "float8")
"""Where `init_process_group` was given a `device_id`."""


def everything(engine: Engine, batch: Any) -> None:
    """A step with clipping, an evaluation, and two tokens."""
    engine.forward_backward(*batch)
    engine.clip_grad_norm_(0.05)
    engine.evaluate(*batch)
    engine.generate(batch[0][:2, :3], 2, temperature=0)


@pytest.mark.parametrize("name", in_quick(PLANS, *QUICK))
def test_engines_queue_the_communication_that_mesh_calls_lists(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In the third step: before it, and in the fourth, the eighth …, the ranks agree on their calls."""
    monkeypatch.setattr(plait.Mesh, "uses_nccl", True)
    plan = Plan(**PLANS[name], microbatches=3, precision="fp64")
    rules = StreamRules("late", device_bound=name in DEVICE_BOUND)
    case = gpt2(layers=6 if name == "interleaved" else 4, **(IN_FLOAT8 if plan.linears else {}))
    if plan.divides_experts:
        case = sparse_llama(layers=2)

    def body() -> Engine:
        engine = woven.weave(case, plan)
        (batch,) = woven.shares(case, engine, 1)
        everything(engine, batch)
        everything(engine, batch)
        rules._calls[engine.mesh.rank].clear()
        everything(engine, batch)
        return engine

    engine, *_ = thread_ranks.under_rules("late", lambda: rules).run(body, ranks=plan.world)
    sizes = axes.sizes_of_plan(plan)
    blueprint = engine.runtime.blueprint
    told = MeshCalls(sizes, engine._runner.steps, workload_of(blueprint), device_bound=rules.device_bound)
    for mode in MODES:
        told.add(mode)
    seen: dict[Hashable, Hashable] = {}
    for rank, ours in enumerate(told.calls):
        theirs = rules._calls[rank]
        assert [as_word(call) for call in ours] == [as_word(call) for call in theirs], rank
        for one, other in zip(ours, theirs, strict=True):
            real = other.operation.communicator
            assert seen.setdefault(one.operation.communicator, real) == real, (rank, one)
    assert len(set(seen.values())) == len(seen)


def as_word(call: Call) -> str:
    """For example `+all_reduce 0 1`; the names of messages differ."""
    word, *_ = call.operation.name.split()
    kind = "message" if word[:1].isdigit() else word
    return f"{'+' if isinstance(call, Queued) else '-'}{kind} {call.operation.ranks}"


# ── every mesh ──

FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": (*POLICIES, ("interleaved", 3), ("interleaved", 4), AUTO),
    "pp": tuple(range(2, 9)),
    "tp": (1, 2),
    "shard": (1, 2),
    "replicate": (1, 2),
    "sharding": tuple(SHARDINGS),
    "words": tuple(WORDS),
    "more": (0, 1),
}
"""`more`: micro-batches in addition to those that fill the pipeline."""
QUICK_FACTORS = FACTORS | {"policy": tuple(POLICIES), "pp": (2, 3)}
ROWS = [
    *covering_rows(QUICK_FACTORS),
    {
        "policy": AUTO,
        "pp": 3,
        "tp": 2,
        "shard": 2,
        "replicate": 1,
        "sharding": "full",
        "words": "none",
        "more": 2,
    },
]


def mesh_of(row: Mapping[str, Any], **options: Any) -> MeshCalls:
    """A step, an evaluation and two tokens."""
    policy, chunks = row["policy"] if isinstance(row["policy"], tuple) else (row["policy"], None)
    made = schedule_of(policy, row["pp"], row["pp"] + row["more"], chunks)
    others = {name: row[name] for name in ("tp", "shard", "replicate", "sharding", "words")}
    return mesh_of_schedule(made, **others, **options)


@cache
def schedule_of(policy: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    return plait.schedule(policy, ranks=ranks, microbatches=microbatches, chunks=chunks)


def test_no_mesh_of_the_covering_rows_deadlocks() -> None:
    """With late receives, tied parameters, and a communicator for all axes of the same ranks."""
    assert {name_of(row): told for row in ROWS if (told := deadlock_in(mesh_of(row)))} == {}


@pytest.mark.full
@pytest.mark.parametrize("pp", FACTORS["pp"])
@pytest.mark.parametrize("policy", FACTORS["policy"], ids=str)
def test_no_mesh_of_any_layout_and_schedule_deadlocks(policy: Any, pp: int) -> None:
    """Every layout of every schedule; the other factors in turns."""
    number = len(FACTORS["pp"]) * FACTORS["policy"].index(policy) + pp
    turns = islice(cycle(product(SHARDINGS, WORDS, FACTORS["more"])), 8 * number % 12, None)
    for tp, shard, replicate in product((1, 2), repeat=3):
        sharding, words, more = next(turns)
        row = {"tp": tp, "shard": shard, "replicate": replicate, "sharding": sharding, "words": words}
        assert deadlock_in(mesh_of({"policy": policy, "pp": pp, **row, "more": more})) is None, row


def test_a_device_id_changes_no_communicator() -> None:
    """Each message has the communicator of its channel's group, of which there is one in either case."""
    row = {name: values[-1] for name, values in QUICK_FACTORS.items()}
    names: dict[Hashable, Hashable] = {}
    for ours, theirs in zip(mesh_of(row).calls, mesh_of(row, device_bound=True).calls, strict=True):
        for call, bound in zip(ours, theirs, strict=True):
            assert call.operation[1:] == bound.operation[1:]
            names.setdefault(call.operation.communicator, bound.operation.communicator)
            assert names[call.operation.communicator] == bound.operation.communicator
    assert len(set(names.values())) == len(names)


# ── it can fail ──

MESH = {"policy": "1f1b", "pp": 2, "tp": 2, "shard": 2, "replicate": 1}
MESH |= {"sharding": "full", "words": "none", "more": 2}


def test_a_communicator_for_both_directions_hangs() -> None:
    told = deadlock_in(mesh_of({**MESH, "policy": "zb-v"}, group_of_channel=group_of_kind))
    assert told == (
        "rank 0 has 3F1 of run 1 behind 1F2 of run 1 on one communicator; "
        "rank 4 has 1F2 of run 1 behind 3F1 of run 1 on one communicator"
    )


def test_axes_that_have_other_ranks_and_share_a_communicator_hang() -> None:
    """Gradients over `pp` on the communicator of `tp`: the posted receive holds up the next forward."""
    mesh = mesh_of({**MESH, "policy": "gpipe"})

    def on_one(operation: Operation) -> Hashable:
        (name, *_), *_ = operation.communicator  # type: ignore[misc]
        is_gradient = is_message(operation) and operation.name[1] == "I"
        return "one" if name == "tp" or is_gradient else operation.communicator

    calls = [
        [type(call)(call.operation._replace(communicator=on_one(call.operation))) for call in row]
        for row in mesh.calls
    ]
    assert str(deadlock_of(calls)).startswith(
        "rank 0 has all_reduce of 0F3.0 (1) behind 0I0 of run 1 on one communicator; "
        "rank 4 has 0I0 of run 1 behind all_reduce of 1F3.0 (1) on one communicator"
    )


def test_two_collectives_in_another_order_on_one_rank_hang() -> None:
    mesh, random = mesh_of(MESH), Random(0)
    for _ in range(20):
        calls = [list(row) for row in mesh.calls]
        rank = random.randrange(len(calls))
        queues: dict[Hashable, list[int]] = {}
        for place, call in enumerate(calls[rank]):
            if isinstance(call, Queued):
                queues.setdefault(call.operation.communicator, []).append(place)
        pairs = [pair for places in queues.values() for pair in pairwise(places)]
        first, second = random.choice(pairs)
        one, other = calls[rank][first], calls[rank][second]
        calls[rank][first], calls[rank][second] = other, one
        told = str(deadlock_of(calls))
        assert f"rank {rank} " in told
        assert one.operation.name in told
        assert other.operation.name in told


def test_a_collective_that_one_rank_leaves_out_hangs() -> None:
    mesh = mesh_of(MESH)
    missing = next(call.operation for call in mesh.calls[3] if "0F0.0" in call.operation.name)
    mesh.calls[3] = [call for call in mesh.calls[3] if call.operation != missing]
    assert deadlock_in(mesh) == (
        "rank 3 starts all_reduce of 0F0.0 (1) after its wait for all_reduce of 0F1.0 (1); "
        "rank 2 has all_reduce of 0F1.0 (1) behind all_reduce of 0F0.0 (1) on one communicator"
    )
