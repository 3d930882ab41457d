"""LocalSource that are given, or broadcast from rank 0: the same training as of one process with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import data, models, reference, woven
from parity.case import SEED, Case, Recipe
from parity.cases import gpt2, llama
from parity.outcome import Outcome
from parity.pairs import in_turns
from parity.parity import compare
from plait.engine import Engine
from plait.engine.tensor_sources import RankZeroSource
from plait.errors import CommunicationError, ModelError
from plait.plan.plan import Plan

START = 29
"""Seed of the values to start from; others have others."""
RECIPE = Recipe(steps=1)
PLANS = (
    Plan(precision="fp64"),
    Plan(dp=2, precision="fp64"),
    Plan(dp=2, strategy="optimizer", precision="fp64"),
    Plan(dp=2, strategy="full", precision="fp64"),
    Plan(dp=2, strategy="full", offload="full", precision="fp64"),
    Plan(dp=4, replicate=2, strategy="full", reduce="each", precision="fp64"),
    Plan(pp=2, microbatches=2, precision="fp64"),
    Plan(tp=2, precision="fp64"),
    Plan(pp=2, tp=2, microbatches=2, precision="fp64"),
    Plan(pp=2, dp=2, strategy="full", microbatches=2, precision="fp64"),
    Plan(dp=2, tp=2, strategy="full", precision="fp64"),
)
USER_CASES = tuple(
    Case(build.__name__, build, draw)
    for build, draw in (
        (models.buffers, data.draw_vectors),
        (models.crossing_ties, data.draw_vectors),
        (models.frozen_first, data.draw_tokens),
        (models.repeated, data.draw_vectors),
        (models.twice_in_a_layer, data.draw_vectors),
        (models.unused, data.draw_vectors),
    )
)


def name_of(plan: Plan) -> str:
    degrees = "-".join(f"{axis}{getattr(plan, axis)}" for axis in ("pp", "dp", "tp", "replicate"))
    return f"{degrees}-{plan.strategy}-{plan.offload}"


def model_from(case: Case, seed: int) -> nn.Module:
    """The case's model with real values, which single precision could not hold."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = reference.materialise(case.build(), torch.float64, seed)
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-9)
        return model


def model_on_meta(case: Case) -> nn.Module:
    with torch.device("meta"):
        return case.build().to(torch.float64)


@cache
def started(case: Case) -> Case:
    """The case whose model has the values to start from."""
    return replace(case, build=partial(model_from, case, START))


Weave = Callable[[Case, Plan, plait.Mesh], Engine]


def train(weave: Weave, case: Case, plan: Plan) -> Outcome:
    return woven.carry_out(RECIPE, weave(case, plan, plait.Mesh(plan)), case)


def check_parity(pool: Any, weave: Weave, case: Case, plan: Plan) -> None:
    expected = reference.train(started(case), woven.global_rows(plan), RECIPE, torch.float64)
    compare(pool.run(train, weave, case, plan, ranks=plan.world), expected, torch.float64)


def broadcast_model(case: Case, plan: Plan, mesh: plait.Mesh) -> Engine:
    """Ranks with odd numbers have no values at all, those with even numbers each their own."""
    model = model_on_meta(case) if mesh.rank % 2 else model_from(case, START + mesh.rank)
    return plait.parallelize(model, plan, mesh, case.loss, seed=SEED, broadcast=True)


def given_everywhere(case: Case, plan: Plan, mesh: plait.Mesh) -> Engine:
    """The model is in single precision: values must not pass through it."""
    values = model_from(case, START).state_dict()
    return plait.parallelize(case.build(), plan, mesh, case.loss, seed=SEED, values=values)


def given_on_rank_zero(case: Case, plan: Plan, mesh: plait.Mesh) -> Engine:
    values = None if mesh.rank else model_from(case, START).state_dict()
    return plait.parallelize(case.build(), plan, mesh, case.loss, seed=SEED, values=values, broadcast=True)


WAYS = {way.__name__: way for way in (broadcast_model, given_everywhere, given_on_rank_zero)}


def given_by_file(path: Path, case: Case, plan: Plan, mesh: plait.Mesh) -> Engine:
    values = torch.load(path, mmap=True)
    return plait.parallelize(case.build(), plan, mesh, case.loss, seed=SEED, values=values)


@pytest.mark.parametrize(("plan", "weave"), in_turns({name_of(plan): plan for plan in PLANS}, WAYS))
def test_given_values_train_as_one_rank_in_every_layout(thread_ranks: Any, plan: Plan, weave: Weave) -> None:
    check_parity(thread_ranks, weave, gpt2(), plan)


@pytest.mark.parametrize("case", [gpt2(tied=False), llama()], ids=["untied", "llama"])
@pytest.mark.parametrize("weave", WAYS.values(), ids=WAYS)
def test_other_models_with_given_values_train_as_one_rank(
    thread_ranks: Any, weave: Weave, case: Case
) -> None:
    check_parity(thread_ranks, weave, case, Plan(pp=2, tp=2, microbatches=2, precision="fp64"))


@pytest.mark.parametrize("case", USER_CASES, ids=lambda case: case.name)
def test_users_models_are_broadcast(thread_ranks: Any, case: Case) -> None:
    """Buffers, ties that cross, frozen and unused parameters, one layer several times."""
    plan = Plan(pp=2, dp=2, strategy="full", microbatches=2, precision="fp64")
    check_parity(thread_ranks, broadcast_model, case, plan)


def test_values_given_by_a_file_train_as_one_rank(thread_ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    torch.save(model_from(gpt2(), START).state_dict(), path)
    plan = Plan(pp=2, dp=2, strategy="full", microbatches=2, precision="fp64")
    check_parity(thread_ranks, partial(given_by_file, path), gpt2(), plan)


def watch_what_is_held(plan: Plan) -> tuple[int, int]:
    """Weave, and see that no tensor is held when the next is read: how many were read, and are kept."""
    last: list[weakref.ref[Any]] = []
    read = RankZeroSource.read

    def watched(source: RankZeroSource, name: str) -> Tensor:
        assert all(memory() is None for memory in last), f"{name} is read while another tensor is held"
        memory = read(source, name).numpy().copy()  # lives as long as any tensor that lies in it
        last.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankZeroSource, "read", watched)
        mesh = plait.Mesh(plan)
        engine = broadcast_model(gpt2(), plan, mesh)
    return len(last), len(list(engine.parameters()))


@pytest.mark.parametrize("plan", PLANS, ids=name_of)
def test_no_rank_holds_two_whole_tensors(rank_pool: Any, plan: Plan) -> None:
    counts = rank_pool.run(watch_what_is_held, plan, ranks=plan.world)
    names = [name for name, _ in gpt2().build().named_parameters()]
    assert [read for read, _ in counts] == [len(names)] * plan.world
    if plan.pp > 1:
        assert all(held < read for read, held in counts), "they take part for the layers of others as well"


def weave_other_values(shift: float) -> None:
    mesh = plait.Mesh(dp=2)
    values = {"0.weight": torch.ones(2, 3), "0.bias": torch.full((2,), shift * mesh.rank)}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2))
    plait.parallelize(model, Plan(dp=2), mesh, plait.cross_entropy, values=values)


def test_ranks_that_are_given_other_values_are_refused(rank_pool: Any) -> None:
    rank_pool.run(weave_other_values, 0.0, ranks=2)
    with pytest.raises(ModelError, match="the model starts from other values on rank 1 than on rank 0"):
        rank_pool.run(weave_other_values, 1.0, ranks=2)


def weave_other_buffers() -> None:
    mesh = plait.Mesh(dp=2)
    layer = nn.Linear(3, 2, device="meta")
    layer.register_buffer("table", torch.zeros(3 + mesh.rank))
    plait.parallelize(nn.Sequential(layer), Plan(dp=2), mesh, plait.cross_entropy, broadcast=True)


def test_ranks_with_different_buffers_are_refused(rank_pool: Any) -> None:
    with pytest.raises(CommunicationError, match="do not agree"):
        rank_pool.run(weave_other_buffers, ranks=2)


def weave_wrong_values(broadcast: bool) -> str:
    mesh = plait.Mesh(pp=2)
    values = {"0.weight": torch.ones(3, 2), "1.weigth": torch.ones(2, 2), "1.bias": torch.ones(2)}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with pytest.raises(ModelError) as caught:
        plait.parallelize(model, Plan(pp=2), mesh, plait.cross_entropy, values=values, broadcast=broadcast)
    return str(caught.value)


@pytest.mark.parametrize("broadcast", [False, True])
def test_values_that_do_not_fit_are_refused_on_every_rank(rank_pool: Any, broadcast: bool) -> None:
    first, second = rank_pool.run(weave_wrong_values, broadcast, ranks=2)
    assert first == (
        "the given values do not fit the model (missing: 0.bias, 1.weight; unexpected: 1.weigth; unfit: "
        "0.weight is [3, 2] and not [2, 3]): give a tensor of the right shape for each name in "
        "model.state_dict()."
    )
    assert second == (f"rank 0 refuses: {first}" if broadcast else first)
