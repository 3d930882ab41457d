"""Another order in the middle of a run, from measured costs: the same bits, on every rank the same order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import plait
from parity import woven
from parity.case import Case
from parity.cases import gpt2
from plait.errors import CommunicationError, ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.plan.plan import Plan

PLANS = {
    "1f1b": Plan(pp=2, microbatches=5, precision="fp64"),
    "loop": Plan(pp=2, schedule="interleaved", chunks=2, microbatches=4, precision="fp64"),
    "v": Plan(pp=2, schedule="zb-v", microbatches=4, precision="fp64"),
    "eight": Plan(pp=2, dp=2, tp=2, strategy="full", schedule="gpipe", microbatches=3, precision="fp64"),
}


def three_steps(case: Case, plan: Plan, reorders: bool) -> Any:
    engine = woven.weave(case, plan)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    losses = []
    for number, batch in enumerate(woven.shares(case, engine, 3)):
        optimizer.zero_grad()
        with engine.recording() as recording:
            losses.append(engine.forward_backward(*batch).item())
        engine.step(optimizer, 1.0)
        if number == 0 and reorders:
            engine.reorder(recording.costs(), memory_limit=plan.pp * 2)
    values = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
    return losses, values, engine.schedule.order, engine.schedule.rank_of


@pytest.mark.parametrize("name", PLANS)
def test_steps_in_another_order_give_the_same_bits(thread_ranks: Any, name: str) -> None:
    plan = PLANS[name]
    case = gpt2(layers=1)
    runs = [
        thread_ranks.run(three_steps, case, plan, reorders, ranks=plan.world) for reorders in (False, True)
    ]
    for (losses, values, _, rank_of), (others, found, _, same) in zip(*runs, strict=True):
        assert losses == others
        assert rank_of == same
        assert all(torch.equal(values[name], found[name]) for name in values)
    assert len({order for _, _, order, _ in runs[1]}) == 1


def reordered(case: Case, plan: Plan, costs: plait.Costs) -> Any:
    engine = woven.weave(case, plan)
    before = engine.schedule
    mine = costs if engine.mesh.rank == 0 else plait.Costs()
    after = engine.reorder(mine)
    return before, after, engine.reorder(mine)


@pytest.mark.full
def test_a_reordered_schedule_is_shorter_and_every_rank_takes_rank_0s(thread_ranks: Any) -> None:
    plan = Plan(pp=2, microbatches=4, precision="fp64")
    costs = plait.Costs(F=(1, 1), I=(1, 1), W=(1, 1), comm=0.1)
    for before, after, again in thread_ranks.run(reordered, gpt2(), plan, costs, ranks=2):
        first, second = (simulate(order.split_backward, costs).makespan for order in (before, after))
        assert second < first
        assert again.order == after.order  # nothing shorter is found the second time, so it stays
        assert max(simulate(after, costs).peak) <= 2


def test_a_limit_that_no_order_keeps_is_refused_on_every_rank(thread_ranks: Any) -> None:
    plan = Plan(pp=2, microbatches=4, precision="fp64")

    with pytest.raises(ScheduleError, match="less than any schedule needs"):
        thread_ranks.run(limited, gpt2(), plan, ranks=2)


def limited(case: Case, plan: Plan) -> None:
    woven.weave(case, plan).reorder(plait.Costs(), memory_limit=0.5)


def follow_another(case: Case, plan: Plan, change: str) -> None:
    engine = woven.weave(case, plan)
    other = plait.schedule("zb-h1", ranks=2, microbatches=plan.microbatches + (change == "more"))
    if change == "places":
        other = replace(other, rank_of=other.rank_of[::-1])
    engine.follow(other)


@pytest.mark.parametrize(("change", "told"), [("more", "microbatches is 5, but"), ("places", "rank_of is")])
def test_engine_follow_refuses_schedules_of_other_work(thread_ranks: Any, change: str, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        thread_ranks.run(
            follow_another, gpt2(), Plan(pp=2, microbatches=4, precision="fp64"), change, ranks=2
        )


def follow_by_replica(case: Case, plan: Plan) -> str:
    engine = woven.weave(case, plan)
    policy = "zb-h1" if engine.mesh.index("dp") else "1f1b"
    with pytest.raises(CommunicationError) as caught:
        engine.follow(plait.schedule(policy, ranks=2, microbatches=plan.microbatches))
    return str(caught.value)


def test_replicas_that_follow_other_orders_are_told(thread_ranks: Any) -> None:
    """They would reduce gradients of different layers with each other."""
    plan = Plan(pp=2, dp=2, microbatches=4, schedule="zb-h1", precision="fp64")
    for told in thread_ranks.run(follow_by_replica, gpt2(), plan, ranks=4):
        assert "the ranks of world do not agree" in told
