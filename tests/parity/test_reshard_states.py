"""What else moves to another layout: every optimizer, gradients, buffers, counters, adapters, experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import balanced, lora_cases
from parity.checkpoints import Run, plan_of, tensors_of
from parity.pairs import in_quick
from parity.resharding import begun, mesh_of, moved
from parity.test_checkpoint_states import OPTIMIZERS, EveryKindOfState, Shifted
from parity.test_checkpoints import check_same_bits
from parity.test_experts import CASE
from plait.checkpoint.manifest import read_manifest
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.experts.balance import Balance

Step = Callable[[plait.engine.Engine], object]


def check_saved_alike(folder: Path, names: list[str]) -> None:
    """Checkpoints hold the same tensors, and describe the same optimizer and counters."""
    first, *others = (folder / name for name in names)
    for other in others:
        check_same_bits(tensors_of(first), tensors_of(other))
        one, another = read_manifest(first), read_manifest(other)
        assert one.optimizer == another.optimizer
        assert {**one.run, "order": None} == {**another.run, "order": None}


def through(plans: list[Plan], folder: Path, make: Any, build: Callable[[], nn.Module], step: Step) -> None:
    """One step under the first plan, then on under each of the others, saved under all."""
    run: Run | None = None
    for number, plan in enumerate(plans):
        run = begun(plan, make, build) if number == 0 else moved(run, plan, make, build)[0]
        if run is not None and number == 0:
            step(run.engine)
            run.engine.step(run.optimizer, 1.0)
            run.optimizer.zero_grad()
        if run is not None:
            plait.save(run.engine, run.optimizer, folder / str(number))


def check_through(
    pool: RankPool, folder: Path, plans: list[Plan], make: Any, build: Callable[[], nn.Module], step: Step
) -> None:
    pool.run(through, plans, folder, make, build, step, ranks=max(plan.world for plan in plans))
    check_saved_alike(folder, [str(number) for number in range(len(plans))])


def tokens_of(engine: plait.engine.Engine) -> Tensor:
    tokens = torch.arange(8 * 7).view(8, 7) % 29
    share = 8 // engine.mesh.size("dp")
    return tokens[share * engine.mesh.index("dp") :][:share]


def train_tokens(engine: plait.engine.Engine) -> None:
    tokens = tokens_of(engine)
    engine.forward_backward(tokens[:, :-1], tokens[:, 1:])


def language_model() -> nn.Module:
    return plait.models.gpt2(layers=1, hidden=24, heads=6, vocab=29, context=6)


@pytest.mark.parametrize("name", in_quick([*OPTIMIZERS], "nadam"))
def test_the_state_of_each_optimizer_moves(thread_ranks: RankPool, tmp_path: Path, name: str) -> None:
    plans = [plan_of("full"), plan_of("tp"), plan_of("pp")]
    make = partial(OPTIMIZERS[name], lr=1e-2)
    check_through(thread_ranks, tmp_path, plans, make, language_model, train_tokens)


def shifted_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), Shifted(0.5), nn.Linear(4, 4, bias=False))


def test_state_of_every_kind_buffers_and_values_that_are_no_tensors_move(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    plans = [
        Plan(precision="bf16", master_precision="bf16", **options)  # type: ignore[arg-type]
        for options in ({}, {"pp": 2, "microbatches": 2}, {"dp": 2, "strategy": "full"}, {"dp": 2})
    ]

    def step(engine: plait.engine.Engine) -> None:
        engine.forward_backward(torch.ones(8, 3), torch.arange(8) % 4)

    make = partial(EveryKindOfState, lr=0.5, rows=False)
    check_through(thread_ranks, tmp_path, plans, make, shifted_model, step)
    assert {"model.1.shift", "model.1.table", "optim.state.2.weight.sum"} <= tensors_of(tmp_path / "0").keys()


def test_adapters_move_with_what_is_frozen(thread_ranks: RankPool, tmp_path: Path) -> None:
    case = lora_cases.LLAMA
    plans = [
        Plan(precision="fp64", **options)  # type: ignore[arg-type]
        for options in (
            {"dp": 2, "strategy": "full"},
            {"tp": 2, "pp": 2},
            {"dp": 2, "offload": "full", "strategy": "full"},
        )
    ]

    def step(engine: plait.engine.Engine) -> None:
        inputs, targets = case.batches(8 // engine.plan.dp, 1, torch.float64)[0]
        engine.forward_backward(inputs, targets)

    check_through(thread_ranks, tmp_path, plans, torch.optim.AdamW, case.build, step)


def test_experts_move_between_all_their_divisions(thread_ranks: RankPool, tmp_path: Path) -> None:
    plans = [
        Plan(precision="fp64", **options)  # type: ignore[arg-type]
        for options in (
            {"dp": 4, "ep": 4, "strategy": "full"},
            {},
            {"dp": 4, "ep": 2, "etp": 2, "strategy": "optimizer"},
            {"pp": 2, "dp": 2, "ep": 2},
            {"tp": 2, "dp": 2, "ep": 2, "strategy": "gradients"},
        )
    ]

    def step(engine: plait.engine.Engine) -> None:
        inputs, targets = CASE.draw(
            8 // engine.plan.dp, torch.Generator().manual_seed(engine.mesh.index("dp"))
        )
        engine.forward_backward(inputs, targets)

    check_through(thread_ranks, tmp_path, plans, torch.optim.AdamW, CASE.build, step)


def accumulated(plans: list[Plan], balance: Balance) -> dict[str, Tensor]:
    """Gradients of a call under each plan, and the parameters and biases after a step under the last."""
    engine: Any = None
    optimizer: Any = None
    for number, plan in enumerate(plans):
        if engine is None:
            engine = plait.parallelize(balanced.build(balance), plan, mesh_of(plan), loss=plait.cross_entropy)
            optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        elif plan != plans[number - 1]:
            engine, optimizer = plait.reshard(engine, optimizer, plan, mesh_of(plan))
        tokens, targets = balanced.batch(number // 2, None)
        share = balanced.ROWS // plan.dp
        rows = slice(share * engine.mesh.index("dp"), share * (engine.mesh.index("dp") + 1))
        if number % 2 == 0:
            engine.forward_backward(tokens[rows], targets[rows])
    gradients = {f"gradient of {name}": one.clone() for name, one in engine.named_gradients()}
    engine.step(optimizer, 1.0)
    return gradients | engine.state_dict(everywhere=True)


def test_gradients_and_choices_of_experts_move_between_backward_and_step(thread_ranks: RankPool) -> None:
    """There after one call, back and there again after the second: as under the first plan alone."""
    first = Plan(pp=2, dp=2, microbatches=2, precision="fp64", strategy="full")
    other, balance = Plan(dp=4, precision="fp64"), Balance(0.2, bias_rate=0.05)
    still = thread_ranks.run(accumulated, [first] * 4, balance, ranks=4)[0]
    found = thread_ranks.run(accumulated, [first, other, other, first], balance, ranks=4)[0]
    assert found.keys() == still.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, still[name], rtol=1e-11, atol=1e-13, msg=name)


def scheduled(moves: bool) -> tuple[list[float], list[float], int]:
    """Losses of four steps with dropout, the rates of a scheduler, and the number of steps."""
    plans = [Plan(pp=2, microbatches=4, precision="fp64"), Plan(dp=2, microbatches=2, precision="fp64")]
    layers = list(language_model().children())
    model = nn.Sequential(layers[0], plait.Dropout(0.25), *layers[1:])
    engine: Any = plait.parallelize(model, plans[0], mesh_of(plans[0]), loss=plait.cross_entropy)
    optimizer: Any = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses, rates = [], []
    for step in range(4):
        if step == 2 and moves:
            engine, same = plait.reshard(engine, optimizer, plans[1], mesh_of(plans[1]))
            assert same is optimizer
        tokens = tokens_of(engine)
        losses.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item())
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
        schedule.step()
        rates += [group["lr"] for group in optimizer.param_groups]
    return losses, rates, engine.passes


def test_schedulers_and_dropout_go_on_after_a_move(thread_ranks: RankPool) -> None:
    losses, rates, passes = thread_ranks.run(scheduled, True, ranks=2)[0]
    still = thread_ranks.run(scheduled, False, ranks=2)[0]
    assert losses == pytest.approx(still[0], rel=1e-12)
    assert (rates, passes) == still[1:]


def scale_of(plans: list[Plan]) -> tuple[float, int]:
    engine: Any = plait.parallelize(language_model(), plans[0], mesh_of(plans[0]), loss=plait.cross_entropy)
    state = engine.run_state
    engine.run_state = {**state, "loss_scale": {"value": 1024.0, "good_steps": 7}, "passes": 5}
    engine, _ = plait.reshard(engine, None, plans[1], mesh_of(plans[1]))
    return engine.loss_scale, engine.run_state["loss_scale"]["good_steps"] + engine.passes


def test_a_dynamic_loss_scale_moves(thread_ranks: RankPool) -> None:
    plans = [Plan(dp=2, precision="fp16"), Plan(tp=2, precision="fp16")]
    assert thread_ranks.run(scale_of, plans, ranks=2) == [(1024.0, 12)] * 2


def groups_of_stages() -> tuple[dict[str, float], list[str]]:
    """Rates of each parameter after a move, where each stage had groups of its own, of two optimizers."""
    plan, other = Plan(pp=2, microbatches=2), Plan(dp=2, microbatches=1)
    engine: Any = plait.parallelize(language_model(), plan, mesh_of(plan), loss=plait.cross_entropy)
    rates = {name: 1.0 + number for number, name in enumerate(engine.layouts)}
    matrices, vectors = [], []
    for name, one in engine.named_parameters():
        (matrices if one.dim() > 1 else vectors).append({"params": [one], "lr": rates[name]})
    optimizers = [torch.optim.SGD(matrices, momentum=0.5), torch.optim.AdamW(vectors)]
    train_tokens(engine)
    for one in optimizers:
        one.step()
        one.zero_grad()
    engine, optimizers = plait.reshard(engine, optimizers, other, mesh_of(other))
    names = {id(one): name for name, one in engine.named_parameters()}
    found = {
        names[id(one)]: group["lr"]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    }
    assert found == rates
    assert all(state.keys() == {"momentum_buffer"} for state in optimizers[0].state.values())
    train_tokens(engine)
    for one in optimizers:
        one.step()
    return found, [type(one).__name__ for one in optimizers]


def test_groups_of_single_stages_and_several_optimizers_move(thread_ranks: RankPool) -> None:
    for found, kinds in thread_ranks.run(groups_of_stages, ranks=2):
        assert len(found) == len(set(found.values())) > 10
        assert kinds == ["SGD", "AdamW"]


def with_muon(plans: list[Plan]) -> dict[str, Tensor] | None:
    """The parameters after two steps of Muon, in two groups, under each plan."""
    steps = ((3.4445, -4.775, 2.0315),) * 5
    make = partial(plait.Muon, lr=0.02, dtype=torch.float64, others={"lr": 1e-2}, ns_coefficients=steps)
    engine: Any = None
    optimizer: Any = None
    for number, plan in enumerate(plans):
        mesh = mesh_of(plan)
        if number == 0 and mesh.has_this_rank:
            engine = plait.parallelize(language_model(), plan, mesh, loss=plait.cross_entropy)
            first, *rest = engine.named_parameters()
            optimizer = make(
                engine, [{"params": [first[1]]}, {"params": [one for _, one in rest], "lr": 0.01}]
            )
        elif engine is not None:
            engine, optimizer = plait.reshard(engine, optimizer, plan, mesh)
        elif number:
            engine, optimizer = plait.reshard(language_model(), make, plan, mesh, loss=plait.cross_entropy)
        for _ in range(2 if engine is not None else 0):
            train_tokens(engine)
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()
    return None if engine is None else engine.state_dict(everywhere=True)


def test_muon_goes_on_in_another_layout_and_on_a_rank_that_joins(thread_ranks: RankPool) -> None:
    plans = [
        Plan(precision="fp64", **options)  # type: ignore[arg-type]
        for options in ({"dp": 2, "strategy": "full"}, {"tp": 3}, {"pp": 2, "microbatches": 2})
    ]
    found = thread_ranks.run(with_muon, plans, ranks=3)
    alone = thread_ranks.run(with_muon, [Plan(precision="fp64")] * 3, ranks=1)[0]
    assert found[2] is None
    for name, one in found[0].items():
        torch.testing.assert_close(one, alone[name], rtol=1e-10, atol=1e-10, msg=name)


def refusals() -> list[str]:
    plan, other = Plan(dp=2), Plan(tp=2)
    mesh, elsewhere = mesh_of(plan), mesh_of(other)
    engine: Any = plait.parallelize(language_model(), plan, mesh, loss=plait.cross_entropy)
    optimizer: Any = torch.optim.AdamW(engine.parameters())
    joins = mesh.rank == 1

    def told(*arguments: Any, **options: Any) -> str:
        with pytest.raises(PlanError) as caught:
            plait.reshard(*arguments, **options)
        return str(caught.value)

    make = torch.optim.SGD if joins else optimizer
    given = language_model() if joins else engine
    said = [
        told(given, optimizer, other, elsewhere, loss=plait.cross_entropy),
        told(given, make, other, elsewhere, loss=plait.cross_entropy),
        told(given, make, other, elsewhere),
        told(None if joins else engine, optimizer, other, elsewhere),
        told(language_model(), torch.optim.AdamW, other, elsewhere, loss=plait.cross_entropy),
        told(engine, optimizer, Plan(tp=2, pp=1, layers_per_stage=(3, 4)), elsewhere),
    ]
    whole: Any = torch.optim.Adafactor(engine.parameters())
    said.append(told(engine, whole, other, elsewhere))
    owned = plait.Owned(torch.optim.Adafactor, engine)
    said.append(told(engine, owned, other, elsewhere))
    engine.forward_backward(*[tokens_of(engine)[:, :-1]] * 2)  # nothing has changed
    assert plait.reshard(engine, optimizer, other, elsewhere)[1] is optimizer
    with pytest.raises(PlanError, match=r"this engine was resharded, and its parameters are elsewhere: use"):
        engine.forward_backward(*[tokens_of(engine)[:, :-1]] * 2)
    return said


def test_what_cannot_move_is_refused_on_every_rank_before_anything_moves(thread_ranks: RankPool) -> None:
    first, second = thread_ranks.run(refusals, ranks=2)
    assert first == second
    wanted = [
        "was given a AdamW on a rank that joins: give a function that makes the optimizer of",
        "has AdamW on rank 0 and SGD on rank 1: give the same optimizers on each",
        "was given a model without its loss: give loss=",
        "was given a NoneType in place of an engine: give the engine, or on a rank that joins the model",
        "was given no engine on any rank: give it on those that have one",
        "plan.layers_per_stage",
        "Adafactor",
        "plait.reshard does not move Owned, whose parameters have owners under the old plan: save a",
    ]
    for said, part in zip(first, wanted, strict=True):
        assert part in said, said


def stage_lost() -> str:
    """The first rank is as a new process is that takes the place of a lost one."""
    plan = Plan(pp=2)
    mesh = mesh_of(plan)
    engine: Any = plait.parallelize(language_model(), plan, mesh, loss=plait.cross_entropy)
    optimizer: Any = torch.optim.SGD(engine.parameters())
    joins = mesh.rank == 0
    given = (language_model(), partial(torch.optim.SGD, lr=1.0)) if joins else (engine, optimizer)
    with pytest.raises(PlanError) as caught:
        plait.reshard(*given, plan, mesh_of(plan), loss=plait.cross_entropy)
    engine.forward_backward(*[tokens_of(engine)[:, :-1]] * 2)  # nothing has changed
    return str(caught.value)


def test_a_stage_that_no_rank_holds_is_refused_on_every_rank_before_anything_moves(
    thread_ranks: RankPool,
) -> None:
    first, second = thread_ranks.run(stage_lost, ranks=2)
    assert first == second
    assert "no rank holds any of " in first
