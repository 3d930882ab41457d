"""What is decided of Muon's work without ranks is what ranks do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.engine.blueprint import build_blueprint
from plait.estimate.memory.optimizer_state import optimizer_state
from plait.estimate.memory.whole_parameter_owners import tensor_counts
from plait.optimizers.optimizer_makers import MuonSettings
from plait.optimizers.predicted_owner_work import ExchangeSizes, OwnerWork, found_matrices, matrix_work
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "inner": 12, "vocab": 20}
PLANS = [
    Plan(dp=4, replicate=2, strategy="full"),
    Plan(pp=2, tp=2, microbatches=2),
    Plan(tp=4, strategy="optimizer"),
]


def small() -> torch.nn.Sequential:
    return plait.models.llama(**SIZES, context=8)


def exchanged(work: OwnerWork) -> ExchangeSizes:
    """The elements of the only dtype that a rank exchanges."""
    (sizes,) = work.exchanges.values()
    return sizes


def buffers_of(plan: Plan) -> tuple[int, list[int], dict[str, int]]:
    """On this rank: elements of Muon's buffers and of its matrices, and elements of state by name."""
    mesh = plait.Mesh(plan)
    engine = plait.parallelize(small(), plan, mesh, loss=plait.cross_entropy)
    optimizer = plait.Muon(engine)
    tokens = torch.zeros(2 * plan.microbatches, 8, dtype=torch.int64)
    engine.forward_backward(tokens, tokens)
    optimizer.step()
    state = {
        name: sum(one.numel() for one in optimizer.state[parameter].values() if one.dim())
        for name, parameter in engine.named_parameters()
    }
    (exchange,) = optimizer.owned.exchanges
    exchanged = exchange._there.outgoing.numel() + exchange._there.incoming.numel()
    sizes = [
        sum(exchange._there.sent.sizes),
        sum(exchange._back.sent.sizes),
        sum(exchange._there.received.sizes),
        sum(exchange._back.received.sizes),
    ]
    return exchanged + sum(one.numel() for one in optimizer.owned.wholes.values()), sizes, state


@pytest.mark.parametrize("plan", PLANS, ids=["hybrid", "stages", "tp"])
def test_elements_and_buffers_are_those_of_the_ranks(thread_ranks: RankPool, plan: Plan) -> None:
    blueprint = build_blueprint(small(), plan)
    found, state = found_matrices(blueprint, MuonSettings()), optimizer_state(blueprint, "muon")
    counts = tensor_counts(found)
    work = [exchanged(one) for one in matrix_work(blueprint, found, MuonSettings())]
    ranks = thread_ranks.run(buffers_of, plan, ranks=plan.world)
    for one, (buffered, sizes, _) in zip(work, ranks, strict=True):
        assert [*one.sent, *one.received] == sizes
        assert one.buffered == buffered
    of_stage = plan.world // plan.pp
    for stage, owner in state.of_owners.items():
        held = [buffered for buffered, *_ in ranks[stage * of_stage : (stage + 1) * of_stage]]
        assert owner.buffers in [2 * one for one in held], "of the rank with most state and buffers"
    for _, _, kept in ranks:
        for name, elements in kept.items():
            assert elements % counts[name] == 0
            assert (counts[name] == 1) == bool(found[name].parts)


def test_matrices_of_a_stage_are_shared_by_its_ranks_evenly() -> None:
    model = plait.models.gpt2(layers=24, hidden=64, heads=4, vocab=128, context=16)
    for plan in (Plan(dp=8, strategy="full"), Plan(dp=4, tp=2), Plan(pp=2, tp=4, microbatches=2)):
        blueprint = build_blueprint(model, plan)
        work = matrix_work(blueprint, found_matrices(blueprint, MuonSettings()), MuonSettings())
        ranks_of_a_stage = plan.world // plan.pp
        for first in range(0, plan.world, ranks_of_a_stage):
            costs = [one.cost for one in work[first : first + ranks_of_a_stage]]
            assert max(costs) * len(costs) <= 1.05 * sum(costs)
