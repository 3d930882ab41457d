"""Losses of PyTorch, given as they are: the mean and the gradients of one rank, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import data, models, woven
from parity.case import Batch, Case, Recipe
from parity.cases import case
from parity.layers import CLASSES, HIDDEN
from parity.norm import TOLERANCE, assert_close
from parity.parity import check_parity
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.rules import vocabulary
from plait.tensor import mean_loss

ONE_STEP = Recipe(steps=1)
WEIGHTS = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)
PIPELINE = Plan(pp=2, dp=2, microbatches=2, precision="fp64")


def draw_ignored(rows: int, generator: torch.Generator) -> Batch:
    """Vectors, of which half are not counted: all of the first micro-batch."""
    inputs, targets = data.draw_vectors(rows, generator)
    targets[: rows // 2] = -100
    targets[1] = -100
    return inputs, targets


def draw_numbers(rows: int, generator: torch.Generator) -> Batch:
    return data.draw_regression(rows, generator)


def rows_mean(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum(-1).mean()


def of(given: Any, draw: Callable[..., Batch], mean: Callable[..., Tensor] | None = None) -> Case:
    return case(models.half_frozen, draw, name="given", loss=given, mean=mean or given)


GIVEN = [
    of(nn.CrossEntropyLoss(label_smoothing=0.1), draw_ignored),
    of(nn.CrossEntropyLoss(weight=WEIGHTS), draw_ignored),
    of(partial(functional.cross_entropy, weight=WEIGHTS, reduction="sum"), draw_ignored),
    of(nn.SmoothL1Loss(beta=0.5), draw_numbers),
    of(mean_loss(rows_mean), draw_numbers, rows_mean),
    of(
        mean_loss(functional.cross_entropy, lambda t: (t != -100).sum()),
        draw_ignored,
        functional.cross_entropy,
    ),
]


@pytest.mark.parametrize("one", GIVEN, ids=lambda one: str(one.loss)[:40])
def test_a_given_loss_trains_as_on_one_rank(thread_ranks: RankPool, one: Case) -> None:
    check_parity(thread_ranks, one, PIPELINE, ONE_STEP)


def with_head() -> nn.Module:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    model.rules = {"2": vocabulary}
    return model


@pytest.mark.parametrize(
    "given", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(weight=WEIGHTS)], ids=str
)
def test_a_given_loss_of_logits_sharded_by_class_equals_one_rank(
    thread_ranks: RankPool, given: nn.Module
) -> None:
    plan = Plan(tp=2, dp=2, microbatches=2, precision="fp64")
    check_parity(thread_ranks, case(with_head, draw_ignored, loss=given, mean=given), plan, ONE_STEP)


def sums_in_a_rank(plan: Plan) -> tuple[float, list[float], float]:
    engine = woven.weave(SUMMED, plan)
    batch = woven.shares(SUMMED, engine, 1)[0]
    return (
        engine.forward_backward(*batch).item(),
        engine.microbatch_losses().tolist(),
        engine.evaluate(*batch).item(),
    )


SUMMED = of(nn.MSELoss(reduction="sum"), draw_numbers)


def test_a_sum_is_the_sum_over_the_global_batch(thread_ranks: RankPool) -> None:
    ranks = thread_ranks.run(sums_in_a_rank, PIPELINE, ranks=4)
    tight = TOLERANCE[torch.float64]
    parts = {tuple(losses) for _, losses, _ in ranks}
    for whole, _, evaluated in ranks:
        assert_close(sum(map(sum, parts)), whole, tight, "the sum of the micro-batches' losses")
        assert_close(evaluated, whole, tight, "the loss of an evaluation")


def test_verify_and_memory_take_loss_modules_as_parallelize_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    targets = torch.tensor([0, 1, -100, 2])
    for given in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        plan, inputs = Plan(pp=2, microbatches=2), torch.randn(4, 4)
        assert plait.verify(model, plan, inputs, targets, given, ranks_as="threads")
    assert plait.memory(model, Plan(), torch.zeros(4, 4), targets, loss=nn.CrossEntropyLoss()).peak
