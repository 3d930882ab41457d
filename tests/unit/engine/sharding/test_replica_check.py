"""What several ranks hold alike, damaged on one of them, over pp=2, dp=2, tp=2 (rank = 4·pp + 2·dp + tp)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.engine import Engine
from plait.errors import ReplicaError
from plait.plan.plan import Plan
from plait.ranks import Count

CUBE = Plan(pp=2, dp=2, tp=2, precision="fp64", layers_per_stage=(3, 3))
FLAT = Plan(pp=2, tp=2, precision="fp64", layers_per_stage=(3, 3))
Optimizer = torch.optim.Optimizer
FIRST, NORM = "embedding.token.weight", "blocks.0.mlp.norm.weight"
KEY, QUERY = "blocks.1.attention.key.weight", "blocks.1.attention.query.weight"


def stepped(plan: Plan, *, guarded: bool = False, **options: Any) -> tuple[Engine, Optimizer]:
    """After one step: a llama whose ends share a weight, and whose ranks of tp share a key and value head."""
    sizes = {"vocab": 37, "context": 8, "layers": 2, "hidden": 24, "heads": 4, "kv_heads": 1, "inner": 32}
    model = plait.models.llama(**{"tied": True} | sizes | options)
    mesh = plait.Mesh(plan, guarded=guarded)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(0.1), lr=0.01, fused=True)
    tokens = torch.arange(9 * 4 * plan.dp).view(plan.dp, 4, 9)[mesh.index("dp")] % 37
    engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    return engine, optimizer


def found(engine: Engine, optimizer: Optimizer | None) -> str:
    try:
        engine.check_replicas(optimizer)
    except ReplicaError as error:
        return str(error)
    return "nothing"


@dataclass(frozen=True)
class Damage:
    """Who changes what, and what is to be said of it."""

    ranks: tuple[int, ...]
    parameter: str
    told: str
    state: str | None = None
    do: Callable[[Tensor], object] = lambda tensor: tensor[-1:].mul_(1.5)


@contextmanager
def damaged(damage: Damage, engine: Engine, optimizer: Optimizer) -> Iterator[None]:
    if engine.mesh.rank not in damage.ranks:
        yield
        return
    parameter = dict(engine.named_parameters())[damage.parameter]
    tensor = parameter.detach() if damage.state is None else optimizer.state[parameter][damage.state]
    before = tensor.clone()
    damage.do(tensor)
    yield
    tensor.copy_(before)


def the(what: str, name: str, kind: str, usual: str, odd: str) -> str:
    """The sentence: who holds the one, who the other."""
    bits = r"of bits \w{16} on"
    return rf"the {what} of {name} is {kind} {bits} {usual} but {kind} {bits} {odd};"


R0, R1, R2, R3 = (f"{rank} \\(pp 0, dp {rank // 2}, tp {rank % 2}\\)" for rank in range(4))
R4, R5, R6, R7 = (f"{rank} \\(pp 1, dp {rank // 2 - 2}, tp {rank % 2}\\)" for rank in range(4, 8))
DAMAGES = {
    "a shard over dp": Damage(
        (6,), QUERY, the("value", QUERY, r"float64\[12, 24\]", f"rank {R4}", f"rank {R6}")
    ),
    "whole over tp": Damage(
        (1, 3), NORM, the("value", NORM, r"float64\[24\]", f"ranks {R0}, {R2}", f"ranks {R1}, {R3}")
    ),
    "a shared head": Damage(
        (4, 6), KEY, the("value", KEY, r"float64\[6, 24\]", f"ranks {R4}, {R6}", f"ranks {R5}, {R7}")
    ),
    "tied across stages": Damage(
        (1, 3), FIRST, the("value", FIRST, r"float64\[18, 24\]", f"ranks {R1}, {R3}", f"ranks {R5}, {R7}")
    ),
    "state over dp": Damage(
        (0,),
        NORM,
        the("optimizer state exp_avg", NORM, r"float64\[24\]", f"rank {R0}", f"ranks {R1}, {R2}, {R3}"),
        state="exp_avg",
    ),
    "state of what is tied": Damage(
        (4, 6),
        FIRST,
        the(
            "optimizer state exp_avg_sq",
            FIRST,
            r"float64\[19, 24\]",
            f"ranks {R0}, {R2}",
            f"ranks {R4}, {R6}",
        ),
        state="exp_avg_sq",
    ),
    "a step too many": Damage(
        (7,),
        KEY,
        the("optimizer state step", KEY, r"float32\[\]", f"ranks {R4}, {R5}, {R6}", f"rank {R7}"),
        state="step",
        do=lambda step: step.add_(1),
    ),
    "no number": Damage(
        (5,),
        KEY,
        the("value", KEY, r"float64\[6, 24\]", f"ranks {R4}, {R6}, {R7}", f"rank {R5}"),
        do=lambda tensor: tensor[0, :1].fill_(math.nan),
    ),
    "two signs": Damage(
        (2,),
        NORM,
        the("value", NORM, r"float64\[24\]", f"ranks {R0}, {R1}, {R3}", f"rank {R2}"),
        do=lambda tensor: tensor[2:4].neg_(),
    ),
}


def test_a_damaged_replica_is_named_on_every_rank(thread_ranks: Any) -> None:
    def body() -> list[str]:
        engine, optimizer = stepped(CUBE)
        answers = [found(engine, optimizer)]
        for damage in DAMAGES.values():
            with damaged(damage, engine, optimizer):
                answers.append(found(engine, optimizer))
        with damaged(DAMAGES["state over dp"], engine, optimizer):
            answers.append(found(engine, None))
        return [*answers, found(engine, optimizer)]

    results = thread_ranks.run(body, ranks=8)
    assert all(answers == results[0] for answers in results)
    before, *told, without_state, after = results[0]
    assert before == without_state == after == "nothing"
    for (name, damage), sentence in zip(DAMAGES.items(), told, strict=True):
        assert re.match(damage.told, sentence), f"{name}: {sentence}"
        assert "; 1 of the 20 parameters that ranks must hold alike differ: go back" in sentence


def test_the_first_differing_parameter_is_named_and_all_are_counted(thread_ranks: Any) -> None:
    def body() -> str:
        engine, optimizer = stepped(CUBE)
        with (
            damaged(DAMAGES["a shard over dp"], engine, optimizer),
            damaged(DAMAGES["state over dp"], engine, optimizer),
            damaged(DAMAGES["no number"], engine, optimizer),
        ):
            return found(engine, optimizer)

    sentences = set(thread_ranks.run(body, ranks=8))
    (sentence,) = sentences
    assert re.match(DAMAGES["state over dp"].told, sentence)
    assert "; 3 of the 20 parameters" in sentence


def test_parameters_without_a_replica_are_not_checked(thread_ranks: Any) -> None:
    """Without dp: five norms, the keys and values of two blocks, and the tied weight are held by several."""

    def body() -> list[str]:
        engine, optimizer = stepped(FLAT)
        mine = dict(engine.named_parameters())
        alone = [name for name in mine if re.search("query|output|gate|up|down", name)]
        with torch.no_grad():
            for name in alone:
                mine[name].mul_(1 + engine.mesh.rank)
        answers = [str(len(alone)), found(engine, optimizer)]
        with torch.no_grad():
            for parameter in mine.values():
                parameter.mul_(1 + engine.mesh.rank)
        return [*answers, found(engine, optimizer)]

    results = thread_ranks.run(body, ranks=4)
    assert [alone for alone, _, _ in results] == ["5"] * 4
    assert {nothing for _, nothing, _ in results} == {"nothing"}
    (told,) = {told for _, _, told in results}
    assert told.startswith(f"the value of {FIRST} is ")
    assert "; 10 of the 10 parameters" in told


def test_frozen_parameters_and_other_optimizers_count_too(thread_ranks: Any) -> None:
    def body() -> list[str]:
        plan = Plan(dp=2)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)).requires_grad_(True)
        model[0].requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
        optimizer = torch.optim.SGD([p for p in engine.parameters() if p.requires_grad], 0.1, momentum=0.9)
        engine.forward_backward(torch.ones(2, 3), torch.tensor([0, 1]))
        optimizer.step()
        answers = [found(engine, optimizer)]
        mine = dict(engine.named_parameters())
        if engine.mesh.rank == 1:
            del optimizer.state[mine["1.bias"]]["momentum_buffer"]
        answers.append(found(engine, optimizer))
        if engine.mesh.rank == 1:
            mine["0.bias"].data[0] = -0.5
        return [*answers, found(engine, optimizer)]

    results = thread_ranks.run(body, ranks=2)
    assert results[0] == results[1]
    before, missing, frozen = results[0]
    assert before == "nothing"
    assert re.match(
        r"the optimizer state momentum_buffer of 1.bias is float32\[2\] of bits \w+ on rank 0 \(dp 0\) but "
        r"missing on rank 1 \(dp 1\); 1 of the 4 ",
        missing,
    )
    assert frozen.startswith("the value of 0.bias is float32[3] of bits ")
    assert "; 2 of the 4 parameters" in frozen


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_replicas_of_each_shard_are_checked(thread_ranks: Any, strategy: Any) -> None:
    """Over dp=4 in two replicas (rank = 2·replicate + shard): neighbours hold different shards."""
    plan = Plan(dp=4, replicate=2, strategy=strategy, precision="fp64")
    value, state = (Damage((3,), FIRST, "", state=name) for name in (None, "exp_avg"))

    def body() -> list[str]:
        engine, optimizer = stepped(plan)
        answers = [found(engine, optimizer)]
        for damage in (value, state):
            with damaged(damage, engine, optimizer):
                answers.append(found(engine, optimizer))
        return [*answers, found(engine, optimizer)]

    results = thread_ranks.run(body, ranks=4)
    assert all(answers == results[0] for answers in results)
    before, *told, after = results[0]
    assert before == after == "nothing"
    for what, sentence in zip(("value", "optimizer state exp_avg"), told, strict=True):
        kind = r"float64\[1, 440\]"
        assert re.match(the(what, FIRST, kind, r"rank 1 \(dp 1\)", r"rank 3 \(dp 3\)"), sentence), sentence
        assert "; 1 of the 20 parameters that ranks must hold alike differ: go back" in sentence


def test_ranks_of_cp_are_checked_as_replicas(thread_ranks: Any) -> None:
    """Over cp; where a strategy cuts them, those over shard and cp are others, those over replicate alike."""

    def body(plan: Plan, name: str) -> list[str]:
        damage = Damage((3,), name, "")
        engine, optimizer = stepped(plan)
        with damaged(damage, engine, optimizer):
            answer = found(engine, optimizer)
        return [answer, found(engine, optimizer)]

    ranks = [f"{rank} \\(dp {rank // 2}, cp {rank % 2}\\)" for rank in range(4)]
    plan = Plan(dp=2, cp=2, precision="fp64")
    (told, after), *_ = thread_ranks.run(body, plan, NORM, ranks=4)
    others = f"ranks {', '.join(ranks[:3])}"
    assert re.match(the("value", NORM, r"float64\[24\]", others, f"rank {ranks[3]}"), told), told
    assert after == "nothing"
    hybrid = replace(plan, replicate=2, strategy="optimizer")
    (told, after), *_ = thread_ranks.run(body, hybrid, FIRST, ranks=4)
    sentence = the("value", FIRST, r"float64\[1, 440\]", f"rank {ranks[1]}", f"rank {ranks[3]}")
    assert re.match(sentence, told), told
    assert after == "nothing"
    for answers in thread_ranks.run(body, replace(plan, strategy="full"), FIRST, ranks=4):
        assert answers == ["nothing", "nothing"]


def test_replicas_with_the_same_nan_bits_are_equal(thread_ranks: Any) -> None:
    def body() -> str:
        engine, optimizer = stepped(Plan(dp=2))
        next(engine.parameters()).data.fill_(math.nan)
        return found(engine, optimizer)

    assert thread_ranks.run(body, ranks=2) == ["nothing"] * 2


def test_check_replicas_sends_eight_bytes_a_parameter_along_each_axis(thread_ranks: Any) -> None:
    """8 bytes for each parameter of the model along an axis, 2 over the world; pp only for what is tied."""

    def body(plan: Plan, guarded: bool, tied: bool) -> Any:
        engine, optimizer = stepped(plan, guarded=guarded, tied=tied)
        before = engine.mesh.traffic.snapshot()
        engine.check_replicas(optimizer)
        return engine.mesh.traffic.since(before)

    along, over = {"all_gather": Count(1, 20 * 8)}, {"all_reduce": Count(1, 20 * 2)}
    wanted = {"dp": along, "tp": along, "pp": along, "world": over}
    assert thread_ranks.run(body, CUBE, False, True, ranks=8) == [wanted] * 8
    guard = {"guard": Count(1, 256)}
    along, over = {"all_gather": Count(1, 21 * 8)}, {"all_reduce": Count(1, 21 * 2)}
    wanted = {"tp": along | guard, "world": over | guard}
    assert thread_ranks.run(body, FLAT, True, False, ranks=4) == [wanted] * 4


def test_check_replicas_on_one_rank_sends_nothing() -> None:
    engine, optimizer = stepped(Plan())
    engine.check_replicas(optimizer)
    assert "world" not in engine.traffic()
