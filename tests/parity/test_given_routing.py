"""Experts that are given to a step: in each layout tokens go there, and all is as on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity import woven
from parity.case import rows_of
from parity.cases import GPT2_CONTEXT, sparse_llama
from plait.errors import DataError
from plait.plan.layout.layout import divide
from plait.plan.plan import Plan
from plait.tensor.experts.balance_experts import balance_experts
from plait.tensor.experts.router_losses_of_step import ExpertLoad
from plait.tensor.experts.routing import balanced_indices

CASE, ROWS, EXPERTS = sparse_llama(), 8, 5
ROUTERS = [f"blocks.{number}.mlp.mixture.router" for number in range(2)]
PLANS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2, "microbatches": 2, "recompute": "full"},
    "slices": {"tp": 2, "ep": 2, "microbatches": 2},
    "keep": {"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": "keep"},
    "cp": {"cp": 2, "ep": 2, "strategy": "full"},
    "pp": {"pp": 2, "dp": 2, "etp": 2, "microbatches": 4, "schedule": "zb-h1"},
    "compiled": {"dp": 2, "ep": 2, "microbatches": 2, "recompute": "full", "compile": "graphs"},
}


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Two unlike experts for each position, other ones than those of the largest scores."""
    generator = torch.Generator().manual_seed(seed)
    shape = ROWS, GPT2_CONTEXT, EXPERTS
    return {path: torch.rand(shape, generator=generator).argsort(-1)[..., :2] for path in ROUTERS}


def in_a_rank(plan: Plan, routing: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor], ExpertLoad]:
    engine = woven.weave(CASE, plan)
    inputs, targets = CASE.batches(ROWS, 1, torch.float64)[0]
    share = ROWS // plan.dp
    own = slice(share * engine.mesh.index("dp"), share * (engine.mesh.index("dp") + 1))
    given = routing and {path: experts[own] for path, experts in routing.items()}
    both = (rows_of(value, own.start, own.stop) for value in (inputs, targets))
    loss = engine.forward_backward(*both, routing=given)
    load = engine.expert_load
    assert load is not None
    if routing is not None:
        for path, experts in routing.items():
            assert torch.equal(load.tokens[path], experts.flatten().bincount(minlength=EXPERTS))
    return loss, {name: one.clone() for name, one in engine.named_gradients()}, load


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in ("pp", "compiled"))) for name in PLANS]
)
def test_tokens_go_to_the_given_experts_in_every_layout(thread_ranks: Any, name: str) -> None:
    plan = Plan(**PLANS[name], precision="fp64")
    ((loss, gradients, _),) = thread_ranks.run(in_a_rank, Plan(precision="fp64"), drawn(), ranks=1)
    for their_loss, theirs, _ in thread_ranks.run(in_a_rank, plan, drawn(), ranks=plan.world):
        assert their_loss.item() == pytest.approx(loss.item(), rel=1e-13)
        for parameter, gradient in theirs.items():
            torch.testing.assert_close(gradient, gradients[parameter], rtol=0, atol=1e-12)
    ((chosen, _, _),) = thread_ranks.run(in_a_rank, Plan(precision="fp64"), None, ranks=1)
    assert chosen.item() != pytest.approx(loss.item(), rel=1e-6)


def forced_step(plan: Plan, *, forced: bool) -> tuple[Tensor, dict[str, Tensor], ExpertLoad]:
    """A step with forced routing, or with the same experts given."""
    model = CASE.build()
    balance_experts(model, forced_routing=forced, weight=0.1)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), CASE.loss)
    inputs, targets = CASE.batches(ROWS, 1, torch.float64)[0]
    share = ROWS // plan.dp
    first = share * engine.mesh.index("dp")
    both = (rows_of(value, first, first + share) for value in (inputs, targets))
    experts = balanced_indices(torch.arange(GPT2_CONTEXT), EXPERTS, 2).expand(ROWS, -1, -1)
    loss = engine.forward_backward(*both, routing=None if forced else dict.fromkeys(ROUTERS, experts))
    load = engine.expert_load
    assert load is not None
    return loss, {name: one.clone() for name, one in engine.named_gradients()}, load


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("ep", "cp"))) for name in PLANS]
)
def test_forced_routing_is_that_of_one_rank_with_balanced_experts_given(thread_ranks: Any, name: str) -> None:
    plan = Plan(**PLANS[name], precision="fp64")
    ((loss, gradients, load),) = thread_ranks.run(
        partial(forced_step, forced=False), Plan(precision="fp64"), ranks=1
    )
    assert not load.forced_routing
    assert load.sent.tolist() == load.received.tolist() == [0]
    assert any(one.abs().max() > 1e-6 for name, one in gradients.items() if "router" in name)
    for their_loss, theirs, their_load in thread_ranks.run(
        partial(forced_step, forced=True), plan, ranks=plan.world
    ):
        assert their_loss.item() == pytest.approx(loss.item(), rel=1e-13)
        assert their_load.forced_routing
        for path in ROUTERS:
            assert torch.equal(their_load.tokens[path], load.tokens[path])
            torch.testing.assert_close(their_load.balance[path], load.balance[path], rtol=1e-12, atol=0)
        for parameter, gradient in theirs.items():
            torch.testing.assert_close(gradient, gradients[parameter], rtol=0, atol=1e-12)


def rows_between(experts: list[Tensor], ep: int, etp: int) -> Tensor:
    """`[ranks, ranks]`: the tokens of the first rank, `[T, k]`, with experts on the second, in one group."""
    parts = [part for part in divide(EXPERTS, ep) for _ in range(etp)]
    counts = torch.zeros(len(experts), len(experts), dtype=torch.int64)
    for rank, own in enumerate(experts):
        for other, part in enumerate(parts):
            if rank != other:
                counts[rank, other] = ((own >= part.start) & (own < part.stop)).any(1).sum()
    return counts


@pytest.mark.parametrize(
    ("options", "ep", "etp"),
    [
        ({"dp": 2, "ep": 2, "microbatches": 2, "recompute": "full"}, 2, 1),
        ({"tp": 2, "ep": 2, "microbatches": 2}, 2, 1),
        pytest.param({"dp": 4, "ep": 2, "etp": 2}, 2, 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_rows_that_ranks_send_are_counted_from_the_experts(
    thread_ranks: Any, options: dict[str, Any], ep: int, etp: int
) -> None:
    """Of each token one to each other rank with experts of it, also where layers are recomputed."""
    plan, routing = Plan(**options, precision="fp64"), drawn()
    expected = torch.zeros(plan.world, plan.world, dtype=torch.int64)
    for experts in routing.values():
        for part in experts.chunk(plan.microbatches if plan.tp > 1 else 1):
            own = part.flatten(0, 1).chunk(
                plan.world
            )  # along dp whole rows, along tp slices of a micro-batch
            expected += rows_between(list(own), ep, etp)
    for _, _, load in thread_ranks.run(in_a_rank, plan, routing, ranks=plan.world):
        assert load.sent.tolist() == expected.sum(1).tolist()
        assert load.received.tolist() == expected.sum(0).tolist()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda routing: {"blocks.7": routing[ROUTERS[0]]}, "no router: choose of blocks.0.mlp.mixture"),
        (lambda routing: {ROUTERS[0]: routing[ROUTERS[0]].int()}, r"torch.int32 \[8, 8, 2\]"),
        (lambda routing: {ROUTERS[1]: routing[ROUTERS[1]] - 1}, "are -1 to 3: give numbers from 0 to 4"),
    ],
)
def test_experts_that_no_router_has_are_refused(thread_ranks: Any, change: Any, told: str) -> None:
    def body() -> None:
        with pytest.raises(DataError, match=told):
            in_a_rank(Plan(precision="fp64"), change(drawn()))

    thread_ranks.run(body, ranks=1)


def test_a_model_without_routers_takes_no_experts(thread_ranks: Any) -> None:
    def body() -> None:
        engine = plait.parallelize(torch.nn.Linear(2, 2), Plan(), plait.Mesh(Plan()), plait.cross_entropy)
        with pytest.raises(DataError, match="without routers"):
            engine.forward_backward(
                torch.ones(2, 2), torch.tensor([0, 1]), routing={"x": torch.zeros(2, 1, 1)}
            )

    thread_ranks.run(body, ranks=1)
