"""Bits that flip between steps are found before the next update, with the rank; nothing else is reported."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flipped_bits import SIZES, Optimizer, adamw, batch, counted_sums, engine_of, flip
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.engine import Engine
from plait.engine.corruption.corruption_checks import CorruptionChecks
from plait.engine.corruption.replica_checksums import unlike
from plait.engine.corruption.word_checksums import SMALL_BYTES
from plait.errors import CorruptionError
from plait.plan.plan import Plan
from plait.ranks.consistency_check import all_numbers
from plait.schedules.lowering.program import AwaitScatter, ComputeLoss


def muon(engine: Engine) -> Optimizer:
    return plait.Muon(engine, lr=1e-3, others={"lr": 1e-3})


def owned(engine: Engine) -> Optimizer:
    return plait.Owned(torch.optim.Adafactor, engine, lr=1e-3)


MAKERS: dict[str, Callable[[Engine], Optimizer]] = {"adamw": adamw, "muon": muon, "owned": owned}


def targets(engine: Engine, optimizer: Optimizer, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one kind on this rank."""
    for name, parameter in engine.named_parameters():
        if kind == "value" and parameter.numel():
            yield f"the value of {name}", parameter.detach()
        if kind == "gradient" and parameter.grad is not None and parameter.numel():
            yield f"the gradient of {name}", parameter.grad
        if kind == "state":
            for key, tensor in optimizer.state.get(parameter, {}).items():
                if isinstance(tensor, Tensor) and tensor.numel():
                    yield f"the optimizer state {key} of {name}", tensor
        if kind == "copy" and parameter in getattr(optimizer, "whole_parameters", {}):
            yield f"the owner's copy of {name}", optimizer.whole_parameters[parameter].detach()  # type: ignore[attr-defined]


def flip_in_each_step(plan: Plan, maker: str, seeds: range) -> int:
    """Flip a bit on one rank in each step; undo it once it is found. Return how many this rank has found."""
    engine, optimizer = engine_of(plan, MAKERS[maker])
    kinds = ["value", "gradient", "state", *(["copy"] if maker == "owned" else [])]
    found = 0
    with CorruptionChecks(engine, optimizer):
        for seed in seeds:
            drawn = random.Random(seed)
            rank, kind = drawn.randrange(plan.world), drawn.choice(kinds)
            early = drawn.random() < 0.5 and plan.tp == 1  # else what is whole over tp gets other gradients
            chosen: list[tuple[str, Tensor]] = []
            if rank == engine.mesh.rank and kind != "gradient" and early and seed > seeds[0]:
                chosen = [*targets(engine, optimizer, kind)]
            told = ""
            if chosen:  # at any time before the step, of little weight: its gradients are used
                told, tensor = drawn.choice(chosen)
                place = drawn.randrange(tensor.nbytes // 4) * 4, drawn.randrange(8)
                flip(tensor, *place)
            engine.forward_backward(*batch(engine, seed))
            if rank == engine.mesh.rank and not chosen:
                chosen = [*targets(engine, optimizer, kind)]
                if chosen:
                    told, tensor = drawn.choice(chosen)
                    place = drawn.randrange(tensor.nbytes), drawn.randrange(8)
                    flip(tensor, *place)
            if not told:
                engine.step(optimizer, float("inf"))
            else:
                with pytest.raises(CorruptionError, match="by one bit") as raised:
                    engine.step(optimizer, float("inf"))
                assert f"rank {rank} on host" in str(raised.value)
                assert raised.value.ranks == (rank,)
                assert f"{told} changed in memory by one bit, " in str(raised.value)
                step = engine.passes
                assert raised.value.last_good_step == (step - 1 if kind == "gradient" else max(step - 2, 0))
                flip(tensor, *place)
                optimizer.step()
                found += 1
            optimizer.zero_grad()
            counts = all_numbers(bool(told), engine.mesh.group("world"), engine.mesh.device, "found")
            if any(counts) and not told and kind != "gradient":  # so that ranks have called it equally often
                optimizer.step()
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("plan", "maker", "count"),
    [
        (Plan(dp=2), "adamw", 10),
        (Plan(dp=2), "adamw", 200),
        (Plan(dp=2, strategy="gradients"), "owned", 200),
        (Plan(dp=2, strategy="full", precision="bf16"), "adamw", 200),
        (Plan(pp=2, tp=2, microbatches=2), "muon", 200),
        (Plan(dp=2, strategy="full"), "muon", 10),
    ],
)
def test_a_flipped_bit_is_found_before_the_next_update_always(
    thread_ranks: Any, plan: Plan, maker: str, count: int
) -> None:
    found = thread_ranks.run(flip_in_each_step, plan, maker, range(count), ranks=plan.world)
    assert sum(found) >= count - 3  # a state that is not there yet, an owner of nothing
    assert all(found)


def flips_that_are_found(plan: Plan, seeds: range) -> int:
    """Flip one bit at a time, on every rank another one; return how many are found."""
    engine, optimizer = engine_of(plan)
    found = 0
    with CorruptionChecks(engine, optimizer) as checks:
        for step in range(2):
            engine.forward_backward(*batch(engine, step))
            if step == 0:
                engine.step(optimizer, 1.0)
                optimizer.zero_grad()
        every = [one for kind in ("value", "gradient", "state") for one in targets(engine, optimizer, kind)]
        for seed in seeds:
            drawn = random.Random(f"{seed} {engine.mesh.rank}")
            told, tensor = drawn.choice(every)
            place = drawn.randrange(tensor.nbytes), drawn.randrange(8)
            flip(tensor, *place)
            with pytest.raises(CorruptionError) as raised:
                checks.compare()
            found += f"rank {engine.mesh.rank} on host" in str(raised.value) and told in str(raised.value)
            flip(tensor, *place)
    return found


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2),
        pytest.param(Plan(dp=2, tp=2, strategy="full", precision="bf16"), marks=pytest.mark.full),
    ],
)
def test_of_two_hundred_flipped_bits_each_is_found(thread_ranks: Any, plan: Plan) -> None:
    assert thread_ranks.run(flips_that_are_found, plan, range(200), ranks=plan.world) == [200] * plan.world


class Passing(TorchDispatchMode):
    """Hands every operation on, as modes that count or print do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def train_within_modes(plan: Plan, whole_step: bool) -> tuple[int, int]:
    """Train with a dispatch mode on, in the backward alone or also while gradients are clipped.

    Return the number of steps, and of warnings that memory is not compared.
    """
    engine, optimizer = engine_of(plan)
    with CorruptionChecks(engine, optimizer), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            with Passing():
                engine.forward_backward(*batch(engine, step))
                if whole_step:
                    nn.utils.clip_grad_norm_(engine.parameters(), 1e-3, foreach=True)
                    optimizer.step()
            if not whole_step:
                engine.step(optimizer, 1e-3)
            optimizer.zero_grad()
    return engine.passes, sum("while a TorchDispatchMode is on" in str(one.message) for one in warned)


def test_a_dispatch_mode_within_which_torch_does_not_count_all_writes_shows_no_wrong_bits(
    thread_ranks: Any,
) -> None:
    """Neither where the engine divides gradients by the scale of the loss, nor where torch clips them."""
    scaled = Plan(dp=2, strategy="full", loss_scale=4.0)
    assert thread_ranks.run(train_within_modes, scaled, False, ranks=2)[0][0] == 3
    assert thread_ranks.run(train_within_modes, Plan(), True, ranks=1) == [(3, 1)]


@torch.no_grad()
def written_between(engine: Engine, optimizer: Optimizer, checks: CorruptionChecks) -> None:
    """What a program may do between two steps."""
    first = next(engine.parameters())
    first.mul_(1.0)
    for state in optimizer.state.values():
        for one in state.values():
            if isinstance(one, Tensor):
                one.mul_(1)
    engine.evaluate(*batch(engine, 0))
    engine.load_state_dict(engine.state_dict(everywhere=True))
    for one in engine.parameters():  # as a running mean that takes the parameters' place
        one.data.mul_(1.5)
    checks.accept_changes()


def train_with_writes(plan: Plan, maker: str, folder: Path, options: dict[str, Any]) -> tuple[bool, Any]:
    """Train with all that a program does, with checks and without; return whether the bits are equal."""
    ends = []
    for checked in (False, True):
        if options:
            model = plait.models.llama(**SIZES, **options.get("model", {}))
            if options.get("lora"):
                plait.lora(model, rank=2)
            engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
            optimizer = MAKERS[maker](engine)
        else:
            engine, optimizer = engine_of(plan, MAKERS[maker])
        checks = CorruptionChecks(engine, optimizer, memory=checked)
        with checks:
            for step in range(4):
                for part in range(options.get("calls", 1)):
                    engine.forward_backward(*batch(engine, 2 * step + part))
                engine.step(optimizer, 1.0)
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                if step == 1 and maker != "owned":
                    written_between(engine, optimizer, checks)
                if step == 2:
                    plait.save(engine, optimizer, folder / f"{checked}")
                    plait.load(engine, optimizer, folder / f"{checked}")
        ends.append(engine.state_dict(everywhere=True))
    return all(torch.equal(ends[0][name], one) for name, one in ends[1].items()), len(ends[1])


PLANS: dict[str, tuple[Plan, str, dict[str, Any]]] = {
    "muon": (Plan(dp=2, strategy="full"), "muon", {}),
    "cube": (Plan(pp=2, tp=2, dp=2, microbatches=2), "adamw", {"calls": 2}),
    "offload": (Plan(dp=2, strategy="full", offload="parameters", precision="bf16"), "adamw", {"calls": 2}),
    "offload all": (Plan(dp=2, strategy="optimizer", offload="full"), "adamw", {}),
    "gradients": (Plan(dp=4, replicate=2, strategy="gradients", reduce="each"), "muon", {"calls": 2}),
    "lora": (Plan(dp=2, tp=2, strategy="optimizer"), "adamw", {"lora": True}),
    "experts": (
        Plan(dp=2, ep=2, strategy="full", microbatches=2),
        "adamw",
        {"model": {"experts": 4, "top_k": 2}},
    ),
    "fp16": (Plan(dp=2, precision="fp16", loss_scale=8.0), "adamw", {}),
    "zero bubble": (Plan(pp=2, dp=2, microbatches=4, schedule="zb-v", strategy="full"), "adamw", {}),
    "context": (Plan(cp=2, dp=2, strategy="full", recompute="full"), "adamw", {}),
    "owned": (Plan(dp=2, strategy="optimizer"), "owned", {"calls": 2}),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_the_program_writes_is_no_corruption_and_checks_change_no_bit(
    thread_ranks: Any, tmp_path: Path, name: str
) -> None:
    plan, maker, options = PLANS[name]
    ranks = thread_ranks.run(train_with_writes, plan, maker, tmp_path, options, ranks=plan.world)
    assert {equal for equal, _ in ranks} == {True}


class WrongOnOneRank(torch.optim.SGD):
    """Updates one parameter by too much, where it is told to: a device that computes wrongly."""

    elementwise = True
    wrong = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.wrong:
            self.param_groups[0]["params"][3].view(-1)[-1:].mul_(1.001)


def told_of_replicas(plan: Plan) -> str:
    engine, optimizer = engine_of(plan, lambda one: WrongOnOneRank(one.parameters(), lr=0.1))
    with CorruptionChecks(engine, optimizer):
        for step in range(3):
            optimizer.wrong = step == 1 and engine.mesh.rank == 1  # type: ignore[attr-defined]
            try:
                engine.forward_backward(*batch(engine, step))
            except CorruptionError as error:
                return f"{engine.passes} {error.last_good_step} {error}"
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()
    return "nothing"


def test_an_update_that_one_rank_computes_wrongly_is_found_in_the_next_step(thread_ranks: Any) -> None:
    (told,) = set(thread_ranks.run(told_of_replicas, Plan(dp=2), ranks=2))
    assert told.startswith("2 1 after step 2 the value of blocks.0.attention.")
    assert "rank 0 (dp 0) but " in told
    assert "on rank 1 (dp 1); 1 of the " in told
    assert "go on from a checkpoint or snapshot of step 1 or before" in told


def test_the_ranks_that_differ_from_more_than_half_are_named() -> None:
    assert unlike([0, 2, 4], [7, 8, 7]) == ((0, 2, 4), (2,))
    assert unlike([0, 1], [7, 8]) == ((0, 1), ())
    assert unlike([0, 1, 2, 3], [7, 8, 8, 7]) == ((0, 1, 2, 3), ())


class Counted(nn.Module):
    """A layer with a table that never changes, and a count of its runs that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("runs", torch.zeros(()))
        self.table: Tensor
        self.runs: Tensor

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.runs.add_(1)
        return torch.as_tensor(self.linear(value) + self.table)


def test_buffers_and_frozen_parameters_are_compared_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), Counted())
    plan = Plan()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=nn.MSELoss())
    optimizer = torch.optim.SGD([one for one in engine.parameters() if one.requires_grad], lr=0.1)
    frozen = dict(engine.named_parameters())["0.weight"]
    table = engine.runtime.pipeline.stages[0].layers[1].module.get_buffer("table")
    checks = CorruptionChecks(engine, optimizer)
    for step in range(4):
        engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        told = {2: (frozen, "the value of 0.weight"), 3: (table, "the buffer in stage 0 of 1.table")}.get(
            step
        )
        if told is None:
            engine.step(optimizer, 1.0)
        else:
            flip(told[0], 5, 4)
            with pytest.raises(CorruptionError, match=told[1]):
                engine.step(optimizer, 1.0)
            flip(told[0], 5, 4)
        optimizer.zero_grad()
    checks.close()


def test_a_flip_between_two_calls_whose_gradients_add_up_is_found() -> None:
    engine, optimizer = engine_of(Plan())
    with CorruptionChecks(engine, optimizer):
        engine.forward_backward(*batch(engine, 0))
        gradient = next(engine.parameters()).grad
        assert gradient is not None
        flip(gradient, 9, 1)
        with pytest.raises(CorruptionError, match=r"the gradient of .* before they were clipped or added to"):
            engine.forward_backward(*batch(engine, 1))
        flip(gradient, 9, 1)


def test_comparing_now_finds_what_a_checkpoint_would_save() -> None:
    engine, optimizer = engine_of(Plan())
    engine.compare_memory()  # without checks
    with CorruptionChecks(engine, optimizer) as checks:
        flip(next(engine.parameters()), 9, 1)
        for compare in (checks.compare, engine.compare_memory):
            with pytest.raises(CorruptionError, match="since the checks began, before that of step 1"):
                compare()
        flip(next(engine.parameters()), 9, 1)
    assert engine.watches == []
    flip(next(engine.parameters()), 9, 1)
    engine.compare_memory()


def flip_what_is_gathered(plan: Plan) -> None:
    """A bit of what layers read flips on rank 1, after its forward has begun."""
    engine, optimizer = engine_of(plan)
    unit = engine.runtime.units["blocks.0.mlp"]
    (weight,) = [one for name, one in unit.parameters.items() if name.endswith("up.weight")]

    def spoil(instruction: Any, runtime: Any) -> None:
        if isinstance(instruction, ComputeLoss) and engine.mesh.rank == 1 and engine.passes == 1:
            flip(weight, weight.nbytes - 2, 1)

    engine.observe(spoil)
    with CorruptionChecks(engine, optimizer):
        for step in range(2):
            engine.forward_backward(*batch(engine, step))
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, strategy="optimizer"),  # of which each rank's optimizer has a half
        Plan(dp=2, precision="bf16"),  # beside masters in fp32
        Plan(dp=2, strategy="gradients", precision="bf16"),
    ],
)
def test_what_layers_read_is_compared_where_it_is_kept(thread_ranks: Any, plan: Plan) -> None:
    expected = (
        "rank 1 on host .*: the gathered value of blocks.0.mlp.up.weight changed in memory by one bit, "
    )
    with pytest.raises(CorruptionError, match=f"{expected}after it was gathered in step 2, "):
        thread_ranks.run(flip_what_is_gathered, plan, ranks=2)


def flip_what_is_scattered(plan: Plan) -> None:
    """A bit of a shard's gradient flips on rank 1, while other layers still run backward."""
    engine, optimizer = engine_of(plan)
    gradients = [
        one for one in engine.runtime.units["head"].buffers[0].shard_gradients.values() if one.numel()
    ]

    def spoil(instruction: Any, runtime: Any) -> None:
        last = isinstance(instruction, AwaitScatter) and instruction.unit == "blocks.0.mlp"
        if last and engine.mesh.rank == 1 and engine.passes == 1:
            flip(gradients[-1], 6, 3)

    engine.observe(spoil)
    with CorruptionChecks(engine, optimizer):
        for step in range(2):
            engine.forward_backward(*batch(engine, step))
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()


@pytest.mark.parametrize("plan", [Plan(dp=2, strategy="full"), Plan(dp=2, strategy="gradients")])
def test_a_reduced_gradient_is_compared_from_its_own_reduction_on(thread_ranks: Any, plan: Plan) -> None:
    told = "rank 1 on host .*: the gradient of (head|embedding)[.].* changed in memory by one bit, "
    with pytest.raises(CorruptionError, match=f"{told}after the reductions of step 2, before they were clip"):
        thread_ranks.run(flip_what_is_scattered, plan, ranks=2)


def checked_steps(plan: Plan, steps: int) -> tuple[int, int]:
    """Take steps with checks; return how many elements and tensors this rank's parameters have."""
    engine, optimizer = engine_of(plan)
    with CorruptionChecks(engine, optimizer):
        for step in range(steps):
            engine.forward_backward(*batch(engine, step))
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()
    every = [one.numel() for one in engine.parameters()]
    return sum(every), len(every)


@pytest.mark.parametrize(
    ("strategy", "gathered"),
    [pytest.param("none", 0, marks=pytest.mark.full), ("gradients", 4), ("full", 0)],
)
def test_each_byte_of_optimizer_state_and_gradients_is_read_twice_in_a_step(
    thread_ranks: Any, strategy: Any, gathered: int
) -> None:
    """Of fp32 and AdamW: 16 bytes a parameter, of the shards where there are some, and 4 of each count.

    `gathered`: the bytes a parameter of what is kept whole beside the shards until the backward has ended.
    """
    read = []
    for steps in (2, 3):
        with counted_sums() as counts:
            sizes = thread_ranks.run(checked_steps, Plan(dp=2, strategy=strategy), steps, ranks=2)
        read.append(sum(one.bytes for one in counts))
    kept = 2 * len(sizes) * gathered * sum(elements for elements, _ in sizes)
    assert read[1] - read[0] == kept + sum(32 * elements + 8 * tensors for elements, tensors in sizes)


def test_a_step_takes_eight_sums_for_each_large_tensor_and_none_for_small_ones() -> None:
    """Its value, both moments and its gradient, each as written and before it is read."""
    model = plait.models.gpt2(**SIZES | {"hidden": 32})
    engine = plait.parallelize(model, Plan(), plait.Mesh(Plan()), loss=plait.cross_entropy)
    optimizer = adamw(engine)
    with CorruptionChecks(engine, optimizer):
        for step in range(3):
            with counted_sums() as counts:
                engine.forward_backward(*batch(engine, step))
                engine.step(optimizer, 1.0)
                optimizer.zero_grad()
    sizes = [one.nbytes for one in engine.parameters()]
    large = sum(size > SMALL_BYTES for size in sizes)
    assert 0 < large < len(sizes) / 2
    assert sum(one.calls for one in counts) == 8 * large


def test_checks_end_where_another_engine_takes_over(thread_ranks: Any) -> None:
    def moved(plan: Plan) -> list[bool]:
        engine, optimizer = engine_of(plan)
        checks = CorruptionChecks(engine, optimizer)
        engine.forward_backward(*batch(engine, 0))
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
        engine, optimizer = plait.reshard(engine, optimizer, other, plait.Mesh(other))
        checks.compare()
        with CorruptionChecks(engine, optimizer):
            engine.forward_backward(*batch(engine, 1))
            engine.step(optimizer, 1.0)
            return [one is checks for one in engine.watches]

    other = Plan(tp=2)
    assert thread_ranks.run(moved, Plan(dp=2, strategy="full"), ranks=2) == [[False], [False]]


def test_several_optimizers_are_checked_each_at_its_own_update() -> None:
    engine, _ = engine_of(Plan())
    every = list(engine.parameters())
    both = [torch.optim.AdamW(every[:5], lr=1e-3), torch.optim.SGD(every[5:], lr=1e-3)]
    with CorruptionChecks(engine, both):
        for step in range(3):
            engine.forward_backward(*batch(engine, step))
            both[0].step()
            if step < 2:
                both[1].step()
        flip(every[7], 3, 3)
        with pytest.raises(CorruptionError, match="after the update of step 2, before that of step 3"):
            both[1].step()
        flip(every[7], 3, 3)
