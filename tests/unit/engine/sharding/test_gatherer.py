from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sharding_cases import case_of, live_bytes, two_layers, unit_of
from torch import Tensor, nn

from parity.kernels import Kernels
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.unit import Unit
from plait.plan.layout import assemble
from plait.plan.plan import Plan
from plait.ranks.collectives import barrier
from plait.ranks.group import Count
from plait.ranks.mesh import Mesh
from plait.schedules.lowering.program import AwaitParameters, Finish, GatherParameters, ReleaseParameters

TRANSPORTS = pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])


def values_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in parameters.items()}


def shards_of(units: dict[str, Unit]) -> dict[str, nn.Parameter]:
    return {name: shard for unit in units.values() for name, shard in unit.shard_parameters.items()}


def parameters_of(units: dict[str, Unit]) -> dict[str, nn.Parameter]:
    return {name: one for unit in units.values() for name, one in unit.parameters.items()}


def gather_all(gatherer: Gatherer) -> None:
    """All at once, awaited in the other order."""
    handlers = gatherer.handlers()
    for name in gatherer.units:
        handlers[GatherParameters](GatherParameters(name))
    for name in reversed(gatherer.units):
        handlers[AwaitParameters](AwaitParameters(name))


def update(units: dict[str, Unit], rank: int) -> None:
    """What an optimizer does to the shards of a rank."""
    with torch.no_grad():
        for shard in shards_of(units).values():
            shard.add_(1 + rank)


def two_rounds(plan: Plan, messages: bool) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """After each of two updates: this rank's shards, and what its layers then use."""
    mesh = Mesh(plan)
    units = case_of(two_layers(), plan).make_on(mesh, messages=messages)
    gatherer, rounds = Gatherer(units), []
    for _ in range(2):
        update(units, mesh.rank)
        shards = values_of(shards_of(units))
        gatherer.begin()
        gather_all(gatherer)
        rounds.append((shards, values_of(parameters_of(units))))
        for name in units:
            gatherer.release(name)
        gatherer.finish()
    return rounds


@TRANSPORTS
@pytest.mark.parametrize(
    "plan",
    [
        {"strategy": "optimizer"},
        {"strategy": "gradients"},
        {"strategy": "full"},
        {"strategy": "full", "offload": "parameters"},
        {"strategy": "optimizer", "offload": "full"},
        {"strategy": "gradients", "precision": "fp32", "master_precision": "fp64"},
    ],
    ids=str,
)
def test_layers_use_what_the_optimizers_of_all_ranks_have_made(
    rank_pool: Any, plan: dict[str, Any], messages: bool
) -> None:
    chosen = Plan(dp=3, **plan)
    model, layouts = two_layers(), case_of(two_layers(), chosen).layouts
    of_ranks = rank_pool.run(two_rounds, chosen, messages, ranks=3)
    for rounds in zip(*of_ranks, strict=True):
        for name, start in model.named_parameters():
            wanted = assemble([shards[name] for shards, _ in rounds], layouts[name]).float()
            assert wanted.ne(start).all(), "every element was updated"
            assert all(torch.equal(used[name], wanted) for _, used in rounds)


def counts(plan: Plan) -> list[dict[str, Count]]:
    """The traffic of a gather, of another in the same step, and of one in the next."""
    mesh = Mesh(plan)
    gatherer, found = Gatherer(case_of(two_layers(), plan).make_on(mesh)), []
    for begins in (True, False, True):
        if begins:
            gatherer.begin()
        before = mesh.traffic.snapshot()
        gather_all(gatherer)
        found.append(mesh.traffic.since(before).get("shard", {}))
    return found


@pytest.mark.parametrize("strategy", ["optimizer", "full"])
def test_a_unit_is_gathered_once_until_it_is_released_or_may_have_changed(
    rank_pool: Any, strategy: Any
) -> None:
    plan = Plan(dp=2, strategy=strategy)
    offsets = [spec.offsets for specs in case_of(two_layers(), plan).buffer_specs.values() for spec in specs]
    once = {"all_gather": Count(2, sum(4 * one.shard_size for one in offsets))}
    assert rank_pool.run(counts, plan, ranks=2) == [[once, {}, once]] * 2


def copies_of_a_gather(plan: Plan) -> int:
    """Where ranks are on several hosts, for two units."""
    gatherer = Gatherer(case_of(two_layers(), plan).make_on(Mesh(plan), messages=True))
    gatherer.begin()
    with Kernels() as kernels:
        gather_all(gatherer)
    return kernels.names["copy_"]


def test_a_shard_is_copied_before_a_gather_only_to_be_cast(rank_pool: Any) -> None:
    plan = Plan(dp=2, strategy="full")
    assert rank_pool.run(copies_of_a_gather, plan, ranks=2) == [0, 0]
    masters = replace(plan, precision="bf16", master_precision="fp32")
    assert rank_pool.run(copies_of_a_gather, masters, ranks=2) == [2, 2]


def test_memory_is_there_from_gather_to_release() -> None:
    """Alone with what it has offloaded: no other ranks are needed."""
    unit = unit_of(nn.Linear(64, 64), strategy="full", offload="full")
    (buffer,), between = unit.buffers, live_bytes([unit])
    gatherer = Gatherer({"0": unit})
    handlers = gatherer.handlers()
    gatherer.begin()
    handlers[GatherParameters](GatherParameters("0"))
    assert live_bytes([unit]) == between + buffer.whole.nbytes
    handlers[AwaitParameters](AwaitParameters("0"))
    assert torch.equal(unit.parameters["0.weight"], unit.shard_parameters["0.weight"])
    handlers[ReleaseParameters](ReleaseParameters("0"))
    assert live_bytes([unit]) == between
    gather_all(gatherer)
    weight, shard = unit.parameters["0.weight"], unit.shard_parameters["0.weight"]
    assert torch.equal(weight, shard), "released, so gathered again"


@pytest.mark.parametrize("strategy", ["none", "optimizer", "gradients"])
def test_parameters_that_a_strategy_keeps_whole_are_not_released(strategy: Any) -> None:
    unit = unit_of(nn.Linear(64, 64), index=1, dp=2, strategy=strategy)
    before = live_bytes([unit])
    Gatherer({"0": unit}).release("0")
    assert live_bytes([unit]) == before


def test_layers_use_the_master_rounded() -> None:
    unit = unit_of(nn.Linear(4, 1, bias=False), precision="bf16", master_precision="fp32")
    weight, master = unit.parameters["0.weight"], unit.shard_parameters["0.weight"]
    gatherer = Gatherer({"0": unit})
    with torch.no_grad():
        master.fill_(257)
    gatherer.begin()
    gather_all(gatherer)
    assert (weight.dtype, set(weight.flatten().tolist())) == (torch.bfloat16, {256.0})


def test_without_masters_or_sharding_nothing_is_gathered() -> None:
    unit = unit_of(nn.Linear(64, 64), dp=2)
    gatherer = Gatherer({"0": unit})
    gatherer.begin()
    gather_all(gatherer)  # no other rank is there to answer
    assert unit.buffers[0].whole.any()


def test_offloaded_shards_are_off_the_device_while_a_step_runs() -> None:
    unit = unit_of(nn.Linear(64, 64), strategy="full", offload="parameters")
    (buffer,), gatherer = unit.buffers, Gatherer({"0": unit})
    assert buffer.device_copy is not None
    with torch.no_grad():
        unit.shard_parameters["0.weight"].fill_(3)
    gatherer.begin()
    assert buffer.device_copy is None
    gather_all(gatherer)
    assert set(unit.parameters["0.weight"].flatten().tolist()) == {3.0}
    gatherer.handlers()[Finish](Finish())
    assert buffer.device_copy is not None


def after_a_failure(plan: Plan, messages: bool) -> tuple[int, int, bool]:
    """Bytes before a step that fails while it gathers, and after; whether the next one gathers right.

    What others have started goes on until the last rank comes, when they have updated their shards.
    """
    mesh = Mesh(plan)
    units = case_of(two_layers(), plan).make_on(mesh, messages=messages)
    gatherer, is_last = Gatherer(units), mesh.rank + 1 == mesh.world
    between = live_bytes(units.values())
    if is_last:
        barrier(mesh.group("world")).wait()
    gatherer.begin()
    for name in units:
        gatherer.gather(name)
    gatherer.clear()
    if not messages:  # there a backend still writes
        assert live_bytes(units.values()) == between
    update(units, 1)
    if not is_last:
        barrier(mesh.group("world")).wait()
    gatherer.begin()
    after = live_bytes(units.values())
    gather_all(gatherer)
    wanted = {name: one.detach() + 2 for name, one in two_layers().named_parameters()}
    return between, after, all(torch.equal(one, wanted[name]) for name, one in parameters_of(units).items())


@TRANSPORTS
@pytest.mark.parametrize("strategy", ["optimizer", "full"])
def test_a_step_that_failed_leaves_nothing_gathered(rank_pool: Any, strategy: Any, messages: bool) -> None:
    plan = Plan(dp=3, strategy=strategy)
    for before, after, right in rank_pool.run(after_a_failure, plan, messages, ranks=3):
        assert before == after
        assert right
