"""Parity under NCCL's rules: whenever operations complete, all numbers are those of one rank.

`pytest tests/parity --completion late` runs all parity tests on threads under these rules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity import woven
from parity.case import Case, Recipe
from parity.cases import gpt2, sparse_llama
from parity.pairs import covering_rows
from parity.parity import check_parity
from parity.rows import name_of
from parity.stream_defects import QUICK as QUICK_DEFECTS
from parity.stream_defects import STREAM_DEFECTS
from plait.errors import PlaitError
from plait.plan.plan import Plan

DATA: dict[str, dict[str, Any]] = {
    "one": {},
    "full": {"dp": 2, "strategy": "full", "reduce": "each"},
    "gradients": {"dp": 2, "strategy": "gradients", "offload": "full"},
    "hybrid": {"dp": 4, "replicate": 2, "strategy": "optimizer"},
}
TENSOR: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": "regather"},
    "ring": {"cp": 2, "context_parallel": "ring"},
    "ulysses": {"cp": 2, "context_parallel": "ulysses"},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "pipeline": ((1, "1f1b"), (2, "zb-v"), (2, "interleaved"), (2, "v-min"), (4, "1f1b"), (4, "zb-h1")),
    "data": tuple(DATA),
    "tensor": tuple(TENSOR),
    "recompute": ("none", "full"),
    "completion": ("early", "late", 1),
}


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks."""
    data, tensor = DATA[row.get("data", "one")], TENSOR[row.get("tensor", "one")]
    ranks = data.get("dp", 1) * tensor.get("tp", 1) * tensor.get("cp", 1)
    return bool(row.get("pipeline", (1,))[0] * ranks <= 8)


QUICK = FACTORS | {
    "pipeline": ((1, "1f1b"), (2, "zb-v"), (4, "1f1b")),
    "data": ("one", "full"),
    "tensor": ("one", "sequence", "ring"),
    "recompute": ("none",),
    "completion": ("late", 1),
}
COVERING = covering_rows(QUICK, fits)
REST = [row for row in covering_rows(FACTORS, fits, strength=3) if row not in COVERING]
"""All other triples."""


def plan_of(row: dict[str, Any]) -> Plan:
    pp, schedule = row["pipeline"]
    fields = {**DATA[row["data"]], **TENSOR[row["tensor"]], "recompute": row["recompute"]}
    return Plan(pp=pp, schedule=schedule, **fields, microbatches=4, precision="fp64")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("row", COVERING, ids=name_of)
def test_runs_under_nccl_stream_rules_equal_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check_parity(thread_ranks.under_rules(row["completion"]), gpt2(layers=2), plan_of(row), Recipe(steps=2))


NCCL = {
    "zb-v": Plan(pp=2, dp=2, tp=2, strategy="full", schedule="zb-v", microbatches=4, precision="fp64"),
    "1f1b": Plan(pp=4, dp=2, reduce="each", strategy="gradients", microbatches=4, precision="fp64"),
    "interleaved": Plan(pp=2, tp=2, schedule="interleaved", microbatches=4, precision="fp64"),
    "ring": Plan(pp=2, cp=2, tp=2, schedule="zb-h1", strategy="full", microbatches=4, precision="fp64"),
}


@pytest.mark.parametrize("name", NCCL)
def test_a_mesh_that_uses_nccl_trains_as_one_rank(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Receives posted late, calls agreed on once, one communicator for axes of the same ranks, a watch."""
    monkeypatch.setattr(plait.Mesh, "uses_nccl", True)
    check_parity(thread_ranks.under_rules("late"), gpt2(layers=1), NCCL[name], Recipe(steps=2))


EXPERTS = {
    "split": {"pp": 2, "dp": 2, "ep": 2, "strategy": "full", "reduce": "each", "schedule": "zb-h1"},
    "slices": {"tp": 2, "dp": 2, "ep": 4, "strategy": "full"},
    "parts": {"tp": 2, "ep": 2, "pp": 2, "recompute": "full"},
    "etp": {"dp": 4, "ep": 2, "etp": 2, "schedule": "gpipe"},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("completion", ["early", "late", 1])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_under_nccl_stream_rules_equal_one_rank(
    thread_ranks: Any, name: str, completion: Any
) -> None:
    plan = Plan(**EXPERTS[name], microbatches=4, precision="fp64")
    check_parity(thread_ranks.under_rules(completion), sparse_llama(layers=1), plan, Recipe(steps=2))


def communicators(plan: Plan) -> tuple[list[str], int]:
    """The axes whose transport no axis before has, and the number of this rank's channels."""
    engine = woven.weave(gpt2(layers=1), plan)
    seen: dict[int, str] = {}
    for axis, group in engine.mesh._groups.items():
        if group.transport is not None:
            seen.setdefault(id(group.transport), axis)
    return list(seen.values()), sum(group is not None for group in engine.mesh._channels.values())


def test_axes_with_the_same_ranks_share_a_communicator(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(pp=4, tp=2, dp=2, strategy="full", microbatches=4, precision="fp64")
    own = [axes for axes, _ in thread_ranks.run(communicators, plan, ranks=16)]
    assert set(map(tuple, own)) == {("pp", "shard", "tp", "dp", "model", "world")}
    monkeypatch.setattr(plait.Mesh, "uses_nccl", True)
    shared = thread_ranks.run(communicators, plan, ranks=16)
    assert {tuple(axes) for axes, _ in shared} == {("pp", "shard", "tp", "model", "world")}
    assert {count for _, count in shared} == {2, 4}


def first_operations(plan: Plan) -> dict[str, int]:
    """By axis, how many collectives have run when the mesh is made."""
    groups = plait.Mesh(plan)._groups
    return {axis: group.transport._count for axis, group in groups.items() if group.transport is not None}


def test_axes_are_connected_when_the_mesh_is_made(thread_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one order on all ranks, not at their first use in a step; `pp` only where it is used."""
    plan = Plan(pp=2, tp=2, dp=2)
    assert not any(thread_ranks.run(first_operations, plan, ranks=8)[5].values())
    monkeypatch.setattr(plait.Mesh, "uses_nccl", True)
    for counts in thread_ranks.under_rules("late").run(first_operations, plan, ranks=8):
        assert {axis for axis, count in counts.items() if not count} == {"pp"}
    for counts in thread_ranks.under_rules("late").run(first_operations, Plan(pp=2, cp=2), ranks=4):
        assert counts["cp"] == 2, "a message to each rank, too, for attention's exchange"


@pytest.mark.full
@pytest.mark.parametrize("row", REST, ids=name_of)
def test_runs_under_nccl_stream_rules_equal_one_rank_for_every_triple_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check_parity(thread_ranks.under_rules(row["completion"]), gpt2(layers=2), plan_of(row), Recipe(steps=2))


LAYOUTS = {
    "zb-v": {"pp": 2, "tp": 2, "schedule": "zb-v"},
    "interleaved": {"pp": 4, "schedule": "interleaved"},
    "full": {"pp": 2, "dp": 2, "strategy": "full", "reduce": "each", "schedule": "zb-h1"},
    "regather": {"tp": 2, "dp": 2, "sequence_parallel": "regather", "strategy": "gradients"},
    "ring": {"pp": 2, "cp": 2, "context_parallel": "ring", "schedule": "zb-h1"},
}


def everything_in_a_rank(case: Case, plan: Plan) -> list[Tensor]:
    """A step, its norm, a loss without a backward, tokens, and the gradients of the inputs where they are."""
    engine = woven.weave(case, plan)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    (batch,) = woven.shares(case, engine, 1)
    found = [engine.forward_backward(*batch), engine.step(optimizer, 0.05), engine.evaluate(*batch)]
    optimizer.zero_grad()
    tokens = engine.generate(batch[0][:2, :3], 3, temperature=0)
    return [*found, tokens, *(parameter.detach().clone() for parameter in engine.parameters())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_whenever_operations_complete(thread_ranks: Any, layout: str) -> None:
    """Training, evaluating and generating; against threads without the rules."""
    compare(thread_ranks, layout, ("late",))


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(3, 43, 10)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_delayed_streams_give_the_same_bits_for_40_seeds(
    thread_ranks: Any, layout: str, seeds: range
) -> None:
    compare(thread_ranks, layout, seeds)


def compare(thread_ranks: Any, layout: str, completions: Any) -> None:
    case = gpt2(layers=3 if layout == "interleaved" else 1)
    plan = Plan(**LAYOUTS[layout], microbatches=4, precision="fp64")
    expected = thread_ranks.under_rules(None).run(everything_in_a_rank, case, plan, ranks=plan.world)
    for completion in completions:
        ruled = thread_ranks.under_rules(completion)
        for ours, theirs in zip(
            ruled.run(everything_in_a_rank, case, plan, ranks=plan.world), expected, strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), completion


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "defect",
    [
        each if each in QUICK_DEFECTS else pytest.param(each, marks=pytest.mark.full)
        for each in STREAM_DEFECTS
    ],
    ids=lambda defect: defect.__name__,
)
def test_each_missing_wait_or_stream_defect_is_found(thread_ranks: Any, defect: Any) -> None:
    fields, told = STREAM_DEFECTS[defect]
    plan = Plan(**fields, microbatches=4, precision="fp64")
    case = sparse_llama() if plan.divides_experts else gpt2(layers=4)
    with pytest.raises((AssertionError, PlaitError), match=told), defect():  # once, for all threads
        check_parity(thread_ranks.under_rules("late"), case, plan, Recipe(steps=1))
