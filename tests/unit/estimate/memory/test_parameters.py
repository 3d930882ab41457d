"""Bytes of parameters, gradients and state: the sums of the ZeRO paper (arXiv:1910.02054, section 5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plait.engine.blueprint import build_blueprint
from plait.estimate.memory.memory_ledger import Category, MemoryLedger, MemorySnapshot
from plait.estimate.memory.optimizer_state import OptimizerState
from plait.estimate.memory.parameters import ParameterAccount, rank_buffers
from plait.plan.plan import Plan
from plait.ranks.transport.shared_memory.transport import STAGING_LIMIT
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    GatherParameters,
    ReduceGradient,
    ReleaseParameters,
    ScatterGradient,
)

WIDTH = 64
P = (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of a layer's parameters in float32; nothing is padded."""
N = 4
"""Ranks along `dp`."""
DEVICE = torch.device("cuda")
"""Nothing is put there."""


class Account:
    """Two linears on a rank, and what instructions about the first change."""

    def __init__(
        self, *, moments: int = 2, device: torch.device = DEVICE, width: int = WIDTH, **plan: Any
    ) -> None:
        model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(2)))
        self.ledger = MemoryLedger()
        blueprint = build_blueprint(model, Plan(dp=N, **plan))
        self.account = ParameterAccount(
            self.ledger, rank_buffers(blueprint, [0], device), OptimizerState(moments, {})
        )

    def after(self, *instructions: type) -> MemorySnapshot:
        """What is held when these were carried out for the first layer."""
        handlers = self.account.handlers()
        for kind in instructions:
            instruction = kind() if kind is Finish else kind("0")
            handlers[kind](instruction)
        return self.ledger.snapshot(Finish())


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "state"),
    [
        ("none", 1, 1, 1),
        ("optimizer", 1, 1, 1 / N),
        ("gradients", 1, 1 / N, 1 / N),
        ("full", 1 / N, 1 / N, 1 / N),
    ],
)
@pytest.mark.parametrize("moments", [0, 1, 2])
def test_each_strategy_keeps_its_share_of_parameters_gradients_and_state(
    strategy: Any, parameters: float, gradients: float, state: float, moments: int
) -> None:
    held = Account(strategy=strategy, moments=moments).after().held
    assert held[Category.PARAMETERS] == parameters * 2 * P
    assert held[Category.GRADIENTS] == gradients * 2 * P
    assert held[Category.STATE] == moments * state * 2 * P


def test_a_layer_is_gathered_and_released() -> None:
    account = Account(strategy="full")
    assert account.after(GatherParameters).held[Category.GATHERED] == P
    assert account.after(ReleaseParameters).held[Category.GATHERED] == 0
    assert Account(strategy="gradients").after(GatherParameters).held[Category.GATHERED] == 0


def test_a_gradient_is_opened_scattered_and_closed() -> None:
    account = Account(strategy="gradients")
    always = 2 * P / N
    assert account.after(AllocateGradient).held[Category.GRADIENTS] == always + P
    assert account.after(ScatterGradient).held[Category.GRADIENTS] == always + P + P / N  # what lands
    assert account.after(AwaitScatter, ReduceGradient).held[Category.GRADIENTS] == always


def test_a_whole_gradient_is_scattered_in_place() -> None:
    account = Account(strategy="optimizer")
    for instruction in (ScatterGradient, AwaitScatter, ReduceGradient):
        assert account.after(instruction).held[Category.GRADIENTS] == 2 * P


HALF = {"precision": "bf16", "master_precision": "fp32"}


def test_masters_count_beside_parameters() -> None:
    held = Account(strategy="optimizer", **HALF).after().held
    assert held[Category.PARAMETERS] == 2 * (P / 2 + P / N)
    assert held[Category.GRADIENTS] == 2 * P
    assert held[Category.STATE] == 2 * 2 * P / N
    whole = Account(**HALF).after().held
    assert whole[Category.PARAMETERS] == 2 * (P / 2 + P)
    assert whole[Category.GRADIENTS] == 2 * P


def test_fp32_gradients_of_bf16_parameters_count_with_their_16_bit_copies() -> None:
    held = Account(precision="bf16", master_precision="bf16", gradient_precision="fp32").after().held
    assert held[Category.PARAMETERS] == 2 * P / 2
    assert held[Category.GRADIENTS] == 2 * (P + P / 2)


def test_gradients_reduced_in_another_precision_count_a_temporary_copy() -> None:
    account = Account(**HALF, reduce_precision="bf16")
    assert account.after(ReduceGradient).held[Category.GRADIENTS] == 2 * P + P / 2
    assert account.after(Finish).held[Category.GRADIENTS] == 2 * P
    scattered = Account(strategy="full", **HALF, reduce_precision="bf16")
    always = scattered.after(AllocateGradient).held[Category.GRADIENTS]
    travelling = scattered.after(ScatterGradient).held[Category.GRADIENTS]
    assert travelling == always + P / 2 + P / 2 / N
    alone = Account(strategy="full", replicate=N, **HALF, reduce_precision="bf16")
    always = alone.after(AllocateGradient).held[Category.GRADIENTS]
    assert alone.after(ScatterGradient).held[Category.GRADIENTS] == always + P / 2  # nobody has a shard of it
    # Nobody else holds the same shard, so it is not summed again.
    assert scattered.after(AwaitScatter, ReduceGradient).held[Category.GRADIENTS] == 2 * P / N
    hybrid = Account(strategy="full", replicate=2, **HALF, reduce_precision="bf16")
    always = hybrid.after().held[Category.GRADIENTS]
    assert hybrid.after(ReduceGradient).held[Category.GRADIENTS] == always + P / 2 / 2


def test_gradients_above_the_staging_limit_count_a_copy_while_reduced() -> None:
    large = 4096  # its gradient in bf16 is just above the limit
    for width, copies in ((WIDTH, 0), (large, 1)):
        account = Account(
            strategy="full", device=torch.device("cpu"), width=width, **HALF, reduce_precision="bf16"
        )
        always = account.after(AllocateGradient).held[Category.GRADIENTS]
        whole = always / (1 + 2 / N)  # with what is padded
        assert (whole / 2 > STAGING_LIMIT) == (copies == 1)
        travelling = account.after(ScatterGradient).held[Category.GRADIENTS] - always
        assert travelling == whole / 2 / N + copies * whole


def test_offloaded_parameters_are_on_the_device_only_between_steps() -> None:
    account = Account(strategy="full", offload="parameters")
    assert account.after().held[Category.PARAMETERS] == 0
    assert account.after().host == 2 * P / N
    assert account.after(Finish).held[Category.PARAMETERS] == 2 * P / N
    assert account.after().host == 2 * P / N
    account.account.begin()
    assert account.after().held[Category.PARAMETERS] == 0


def test_with_full_offload_only_gathered_parameters_are_on_the_device() -> None:
    for strategy, parameters, gradients in (("full", 0, 0), ("gradients", 1, 0), ("optimizer", 1, 1)):
        account = Account(strategy=strategy, offload="full")
        moment = account.after(Finish)
        assert moment.held[Category.PARAMETERS] == parameters * 2 * P
        assert moment.held[Category.GRADIENTS] == gradients * 2 * P
        assert moment.held[Category.STATE] == 0
        assert moment.host == 4 * 2 * P / N


def test_on_a_cpu_offloaded_state_counts_as_device_memory() -> None:
    moment = Account(strategy="full", offload="full", device=torch.device("cpu")).after()
    assert (moment.total, moment.host) == (4 * 2 * P / N, 0)


def test_each_stage_of_a_rank_adds_to_a_gradient_of_its_own() -> None:
    tied = nn.Linear(WIDTH, WIDTH, device="meta")
    model = nn.Sequential(tied, *(nn.Linear(1, 1, device="meta") for _ in range(2)), tied)
    blueprint = build_blueprint(
        model, Plan(pp=2, microbatches=2, schedule="zb-v", layers_per_stage=(1, 1, 1, 1))
    )
    sizes = [
        sum(one.stages * one.spec.gradient.nbytes for one in unit)
        for unit in rank_buffers(blueprint, [0, 3], DEVICE).values()
    ]
    assert sizes == [2 * WIDTH * WIDTH * 4, 2 * WIDTH * 4]


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta").requires_grad_(False))
    for strategy, parameters in (("none", 1), ("optimizer", 1), ("full", 1 / N)):
        blueprint = build_blueprint(model, Plan(dp=N, strategy=strategy))
        ledger = MemoryLedger()
        account = ParameterAccount(ledger, rank_buffers(blueprint, [0], DEVICE), OptimizerState(2, {}))
        for kind in (AllocateGradient, ScatterGradient, ReduceGradient):
            account.handlers()[kind](kind("0"))
        assert ledger.snapshot(Finish()).total == parameters * P
