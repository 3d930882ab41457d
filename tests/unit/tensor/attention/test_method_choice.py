from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from parity import woven
from parity.contexts import WIDTH, mixing
from plait.errors import PlanError
from plait.plan.context_parallel_heads import vectors_sent
from plait.plan.plan import Plan
from plait.ranks import Count
from plait.ranks.group import Group, Traffic
from plait.tensor.attention.ulysses import choose_method
from plait.tensor.running_sequence import ContextParallelism

HEADS, LENGTH = 6, 12


def sent(plan: Plan, kv_heads: int) -> float:
    """Vectors of a head for each token of a step of two layers of attention without a mask."""
    case = mixing(LENGTH, causal=False, kv_heads=kv_heads)
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss)
    inputs, targets = woven.shares(case, engine, 1)[0]
    engine.forward_backward(inputs, targets)
    found = engine.traffic()["cp"]["all_to_all"]
    assert isinstance(found, Count)
    return found.bytes / (2 * WIDTH * 8 * inputs.numel())


@pytest.mark.parametrize("mode", ["none", "keep"])
@pytest.mark.parametrize(("cp", "kv_heads"), [(2, 6), (3, 3), (3, 2), (2, 1)])
def test_ring_and_ulysses_send_the_computed_number_of_vectors(
    thread_ranks: Any, cp: int, kv_heads: int, mode: Any
) -> None:
    expected = vectors_sent(HEADS, kv_heads, cp, keeps_keys=mode == "keep")
    for method, vectors in zip(("ring", "ulysses"), expected, strict=True):
        plan = Plan(cp=cp, context_parallel=method, sequence_parallel=mode, precision="fp64")
        assert sum(thread_ranks.run(sent, plan, kv_heads, ranks=cp)) == pytest.approx(vectors)


def parallelism(ranks: int, **fields: Any) -> ContextParallelism:
    plan = Plan(cp=ranks, **fields)
    return ContextParallelism.of(plan, Group("cp", tuple(range(ranks)), 0, None, Traffic(), 0.0))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 6), (12, 3)])
def test_ulysses_sends_less_on_more_than_heads_per_key_and_one(ranks: int, heads: int, kv_heads: int) -> None:
    if kv_heads % ranks and ranks % kv_heads:
        return  # ranks share heads of keys, so that the bound does not hold
    chosen = choose_method(parallelism(ranks, sequence_parallel="keep"), heads, kv_heads).method
    copies = max(1, ranks // kv_heads)
    assert (chosen == "ulysses") is (ranks * kv_heads > heads + copies * kv_heads)


def test_a_method_given_by_the_plan_is_taken() -> None:
    asked = choose_method(parallelism(4, context_parallel="ring"), 12, 12)
    assert (asked.method, asked.asked) == ("ring", True)
    assert "ring, as the plan asks" in str(asked)
    assert choose_method(parallelism(2, context_parallel="ulysses"), 12, 1).method == "ulysses"


def test_ulysses_is_refused_where_heads_do_not_divide_over_cp() -> None:
    assert choose_method(parallelism(5), 12, 12).ulysses is None
    assert "a multiple of the ranks" in str(choose_method(parallelism(5), 12, 12))
    with pytest.raises(PlanError, match=r"12 heads do not divide over plan\.cp = 5"):
        choose_method(parallelism(5, context_parallel="ulysses"), 12, 12)


def test_the_text_of_a_method_choice_names_method_and_reason() -> None:
    model = plait.models.llama(layers=1, hidden=24, heads=6, kv_heads=3, inner=48, vocab=31, context=12)
    report = plait.memory(model, Plan(cp=3), device="cpu")
    ring, ulysses = 6 * 3 * 2, (4 * (6 + 3) + 6) * 2 / 3
    assert [(one.method, one.ring, one.ulysses) for one in report.attention] == [("ulysses", ring, ulysses)]
    sends = f"vectors a position: ring {ring:g}, ulysses {ulysses:g}"
    assert f"ulysses, which sends less ({sends})" in str(report)
    assert plait.memory(model, Plan(), device="cpu").attention == ()
    divided = plait.memory(model, Plan(cp=3, tp=3), torch.empty(1, 12, dtype=torch.int64), device="cpu")
    assert [(one.query_heads, one.kv_heads) for one in divided.attention] == [(2, 1)]
