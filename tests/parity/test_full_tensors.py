"""The whole model in memory: `state_dict`, `load_state_dict` and `named_gradients` against one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import data, woven
from parity.case import SEED, Case, Recipe
from parity.cases import USER_CASES, case, gpt2, llama
from parity.layers import CLASSES, HIDDEN
from parity.norm import TOLERANCE, assert_equal
from parity.pairs import in_quick
from parity.reference import materialise, train
from plait.errors import CommunicationError, ModelError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.rules import column, entrance, row

TIGHT = TOLERANCE[torch.float64]
BY_NAME = {one.name: one for one in USER_CASES}
ANY = [
    BY_NAME[name] for name in ("buffers", "crossing_ties", "half_frozen", "transposed", "twice_in_a_layer")
]


class Gated(nn.Module):
    """Gate and up projection in one linear, so that a rank's shard is no box."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.both = nn.Linear(HIDDEN, 12)
        self.down = nn.Linear(6, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(functional.silu(gate) * up)
        return result


def gated() -> nn.Module:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Gated(), nn.Linear(HIDDEN, CLASSES))
    model.rules = {"1.norm": entrance, "1.both": column.joined(2), "1.down": row}
    return model


CUT = [gpt2(), llama(kv_heads=1), case(gated, data.draw_vectors)]
RUNS: dict[str, tuple[Plan, list[Case]]] = {
    "pp-dp": (Plan(pp=2, dp=2, microbatches=2, strategy="full"), ANY),
    "pp": (Plan(pp=4, microbatches=2, schedule="zb-h1"), ANY),
    "tp-dp": (Plan(tp=2, dp=2, microbatches=2, strategy="full"), CUT),
    "pp-tp": (Plan(pp=2, tp=2, microbatches=2, sequence_parallel="keep", schedule="zb-v"), CUT[:2]),
    "hybrid": (Plan(dp=4, replicate=2, strategy="gradients"), [ANY[0], CUT[2]]),
    "cp": (Plan(dp=2, cp=2, strategy="full"), CUT[:2]),
    "cp-tp": (Plan(dp=2, cp=2, tp=2, replicate=2, strategy="optimizer"), CUT[:1]),
}


@dataclass
class Found:
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    names_elsewhere: list[str]


def found_in_a_rank(cases: list[Case], plan: Plan) -> list[Found]:
    """What each case's engine gives; and there and back: other values in, the same values out."""
    found = []
    for one in cases:
        engine = woven.weave(one, plan)
        batch = woven.shares(one, engine, 1)[0]
        assert list(engine.named_gradients()) == []
        engine.forward_backward(*batch)
        gradients = dict(engine.named_gradients())
        own = {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}
        state, mine = engine.state_dict(everywhere=True), engine.state_dict()
        if engine.mesh.rank == 0:
            assert all(torch.equal(mine[name], tensor) for name, tensor in state.items())
        loss = engine.evaluate(*batch)

        other = {name: t * 2 if t.is_floating_point() else t.flip(0) for name, t in state.items()}
        engine.load_state_dict(other)
        now = engine.state_dict(everywhere=True)
        assert all(torch.equal(now[name], tensor) for name, tensor in other.items())
        assert engine.evaluate(*batch) != loss
        engine.load_state_dict(state if engine.mesh.rank == 0 else None, broadcast=True)
        assert torch.equal(engine.evaluate(*batch), loss)
        still = {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}
        assert own.keys() == still.keys()
        found.append(Found(gradients, state, list(mine)))
    return found


@pytest.mark.parametrize("name", in_quick(RUNS, "pp-dp"))
def test_the_gathered_state_dict_is_that_of_one_rank(thread_ranks: RankPool, name: str) -> None:
    plan, cases = RUNS[name]
    plan = replace(plan, precision="fp64")
    ranks = thread_ranks.run(found_in_a_rank, cases, plan, ranks=plan.world)
    for number, one in enumerate(cases):
        model = materialise(one.build(), torch.float64)
        wanted = model.state_dict()
        gradients = train(one, woven.global_rows(plan), Recipe(steps=1), torch.float64).gradients
        for rank, found in enumerate(answers[number] for answers in ranks):
            assert list(found.state) == list(wanted), one.name
            assert all(torch.equal(found.state[name], tensor) for name, tensor in wanted.items()), one.name
            assert_equal(found.gradients, gradients, TIGHT, f"{one.name}: the gradient")
            assert found.names_elsewhere == (list(wanted) if rank == 0 else [])
            # A plain model takes it, and what is tied is one tensor.
            assert materialise(one.build(), torch.float64).load_state_dict(found.state)
            for tensor in wanted.values():
                alike = {n for n, t in wanted.items() if t.data_ptr() == tensor.data_ptr()}
                assert len({found.state[n].data_ptr() for n in alike}) == 1


def refusals_in_a_rank() -> list[str]:
    engine = woven.weave(BY_NAME["buffers"], Plan(pp=2, precision="fp64"))
    state = engine.state_dict(everywhere=True)
    first = engine.mesh.rank == 0
    misnamed = {("other" if name == "0.shift" else name): tensor for name, tensor in state.items()}
    told = []
    cases: list[tuple[Any, dict[str, Any], bool]] = [
        (ModelError, misnamed if first else state, False),
        (ModelError, misnamed if first else {}, True),
        (ModelError, {**state, "0.permutation": state["0.permutation"].double()}, True),
        (CommunicationError, {**state, "0.shift": state["0.shift"] + engine.mesh.rank}, False),
    ]
    for kind, given, broadcast in cases:
        with pytest.raises(kind) as caught:
            engine.load_state_dict(given, broadcast=broadcast)
        told.append(str(caught.value))
        now = engine.state_dict(everywhere=True)
        assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    return told


def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    thread_ranks: RankPool,
) -> None:
    first, second = thread_ranks.run(refusals_in_a_rank, ranks=2)
    assert first == second
    for sentence in first[:2]:
        assert "missing: 0.shift" in sentence
        assert "unexpected: other" in sentence
    assert "the given value of 0.permutation is torch.float64" in first[2]
    assert "do not agree" in first[3]


def masters_in_a_rank() -> tuple[set[torch.dtype], bool]:
    plan = Plan(dp=2, strategy="full", precision="bf16", master_precision="fp32")
    one = BY_NAME["half_frozen"]
    engine = woven.weave(one, plan)
    inputs, targets = one.draw(2, torch.Generator().manual_seed(SEED))
    optimizer = torch.optim.SGD(engine.parameters(), lr=1e-4)
    engine.forward_backward(inputs, targets)
    optimizer.step()
    state = engine.state_dict(everywhere=True)
    rounded = [t.to(torch.bfloat16).float() for t in state.values()]
    return {t.dtype for t in state.values()}, all(map(torch.equal, rounded, state.values()))


def test_a_loaded_state_dict_keeps_the_digits_of_fp32_masters(thread_ranks: RankPool) -> None:
    """What is frozen has no master."""
    for dtypes, rounded in thread_ranks.run(masters_in_a_rank, ranks=2):
        assert torch.float32 in dtypes
        assert not rounded


def traffic_in_a_rank() -> Any:
    engine = woven.weave(gpt2(), Plan(tp=2, pp=2, precision="fp64"))
    before = engine.mesh.traffic.snapshot()
    engine.state_dict()
    return engine.mesh.traffic.since(before)


def test_only_the_pipeline_of_rank_0_is_sent_tensors_of_other_stages(thread_ranks: RankPool) -> None:
    """Over `pp` go whole tensors of the second stage, to the pipeline of rank 0."""
    model = materialise(gpt2().build(), torch.float64)
    ranks = thread_ranks.run(traffic_in_a_rank, ranks=4)
    sent = [rank["pp"].get("broadcast") for rank in ranks]
    assert [one is None for one in sent] == [False, True, False, True]
    largest = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert 0 < sent[0].bytes < largest


def test_calls_with_other_options_are_refused(thread_ranks: Any) -> None:
    def body() -> list[str]:
        plan = Plan(pp=2)
        mesh = plait.Mesh(plan)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        engine, odd = plait.parallelize(model, plan, mesh, plait.cross_entropy), mesh.rank == 1
        told = []
        for call in (
            lambda: engine.state_dict(everywhere=odd),
            lambda: engine.load_state_dict(model.state_dict(), broadcast=odd),
        ):
            with pytest.raises(CommunicationError) as error:
                call()
            told.append(str(error.value))
        return told

    for told in thread_ranks.run(body, ranks=2):
        assert "(rank 0: state_dict(everywhere=False); rank 1: state_dict(everywhere=True))" in told[0]
        assert "rank 1: load_state_dict(broadcast=True)" in told[1]
