"""Recomputed activations on real ranks: users' models, the same bits as without, and per layer."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import woven
from parity.case import Recipe
from parity.cases import USER_CASES, gpt2, llama
from parity.parity import check_parity
from plait.plan.plan import Plan, Recompute
from plait.ranks.transport.shared_memory.transport import SharedMemoryTransport


@pytest.mark.parametrize("case", USER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_models_of_users_train_as_one_rank(
    thread_ranks: Any, case: Any, recompute: Recompute
) -> None:
    plan = Plan(pp=2, schedule="zb-h1", microbatches=2, recompute=recompute, precision="fp64")
    check_parity(thread_ranks, case, plan)


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2, "schedule": "zb-v", "dp": 2, "strategy": "full"},
        {"pp": 2, "tp": 2},
        {"dp": 2, "strategy": "gradients", "reduce": "each"},
    ],
    ids=str,
)
def test_recomputed_layers_give_the_bits_of_kept_ones(thread_ranks: Any, settings: dict[str, Any]) -> None:
    case = (llama if "tp" in settings else gpt2)(layers=2)
    runs = []
    for recompute in ("none", "selective", "full"):
        plan = Plan(**settings, microbatches=2, precision="fp64", recompute=recompute)
        runs.append(thread_ranks.run(woven.train, case, plan, Recipe(steps=2), ranks=plan.world))
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert first.losses == other.losses
            assert all(torch.equal(first.gradients[name], other.gradients[name]) for name in first.gradients)


def test_recomputation_chosen_for_each_layer_trains_as_one_rank(thread_ranks: Any) -> None:
    case = gpt2(layers=2)
    modes: tuple[Recompute, ...] = ("none", "full", "selective", "full", "selective", "none")
    plan = Plan(pp=2, microbatches=3, recompute=modes, precision="fp64")
    assert len(modes) == woven.layer_count(case)
    check_parity(thread_ranks, case, plan)


def test_recomputed_llama_on_eight_ranks_trains_as_one_rank(thread_ranks: Any) -> None:
    plan = Plan(
        pp=2,
        tp=2,
        dp=2,
        schedule="zb-v",
        microbatches=3,
        strategy="full",
        reduce="each",
        recompute="full",
        precision="fp64",
    )
    check_parity(thread_ranks, llama(layers=1), plan)


class WholeBlock(nn.Module):
    """Attention and MLP of a block as one layer: what tp sums behind the first is made again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = block.attention, block.mlp

    def forward(self, value: Tensor) -> Tensor:
        return self.mlp(self.attention(value))


def by_the_backend(*_: Any) -> str:
    return "backend"


def gradients_of_whole_blocks(recompute: Recompute, by_backend: bool) -> list[dict[str, Tensor]]:
    """Of two steps. `by_backend`: sums are made as they are on a GPU, or between hosts."""
    plan = Plan(tp=2, microbatches=2, recompute=recompute, precision="fp64")
    model = plait.models.llama(layers=1, hidden=32, heads=4, vocab=64, context=16, tied=False)
    layers = {name: child for name, child in model.named_children() if name != "blocks"}
    blocks = {f"block{number}": WholeBlock(block) for number, block in enumerate(model.blocks)}
    first, *rest = layers.items()
    whole = nn.Sequential(OrderedDict([first, *blocks.items(), *rest]))
    rules = {path.replace("blocks.*.", "block*."): rule for path, rule in model.rules.items()}
    tokens = torch.arange(4 * 17).view(4, 17) % 64
    found = []
    with ExitStack() as patches:
        if by_backend:
            patches.enter_context(patch.object(SharedMemoryTransport, "algorithm", by_the_backend))
        engine = plait.parallelize(whole, plan, plait.Mesh(plan), plait.cross_entropy, rules=rules)
        for _ in range(2):
            for parameter in engine.parameters():
                parameter.grad = None
            engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
            found.append({name: part.grad.clone() for name, part in engine.named_parameters()})
    return found


@pytest.mark.parametrize("by_backend", [pytest.param(False, marks=pytest.mark.full), True])
def test_sums_over_tp_inside_a_layer_are_not_taken_twice(rank_pool: Any, by_backend: bool) -> None:
    runs = [
        rank_pool.run(gradients_of_whole_blocks, recompute, by_backend, ranks=2)
        for recompute in ("none", "selective", "full")
    ]
    for first, *others in zip(*runs, strict=True):
        for other in others:
            for step, again in zip(first, other, strict=True):
                assert all(torch.equal(step[name], again[name]) for name in step)
