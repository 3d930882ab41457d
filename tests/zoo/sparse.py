"""Sparse models and layouts in which mistakes with experts are shown."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity import lora_cases
from parity.case import Batch, Case
from parity.cases import with_values
from plait.plan import rules
from plait.plan.plan import Plan
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing

LENGTH, WIDTH, INNER = 6, 8, 6


class Sparse(nn.Module):
    """x + experts(norm(x)), each position by itself."""

    def __init__(self, experts: int = 5, top_k: int = 2, *, bias: bool = False, **routing: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = Router(WIDTH, experts, top_k, routing=Routing(**routing))
        self.experts = Experts(WIDTH, INNER, experts, bias=bias)
        if self.router.e_score_correction_bias is not None:
            self.router.e_score_correction_bias.normal_(std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        _, weights, indices = self.router(rows)
        return x + self.experts(rows, indices, weights).view_as(x)


class Mixed(nn.Module):
    """x + mixture(norm(x)), with shared experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mixture = MixtureOfExperts(WIDTH, INNER, 4, 2, shared=4, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mixture(self.norm(x))
        return result


def around(*layers: Any) -> nn.Module:
    """A linear, the layers, a linear; each position by itself."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(layer() for layer in layers), nn.Linear(WIDTH, WIDTH))
    model.rules = dict.fromkeys(map(str, range(len(model))), rules.sequence)  # type: ignore[assignment]
    return model


def draw(rows: int, generator: torch.Generator) -> Batch:
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(WIDTH, (rows, LENGTH), generator=generator)


def draw_with_zeros(rows: int, generator: torch.Generator) -> Batch:
    """Tokens at position 2 are zero, so that all their scores are equal."""
    inputs, targets = draw(rows, generator)
    inputs[:, 2] = 0
    return inputs, targets


def of(*layers: Any, name: str, draw: Any = draw) -> Case:
    return Case(f"sparse {name}", with_values(partial(around, *layers)), draw)


def first_sparse() -> nn.Module:
    """The experts are in the first layer."""
    return nn.Sequential(Sparse(), nn.Linear(WIDTH, WIDTH))


def with_shared() -> nn.Module:
    """With shared experts, over tp."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixed(), nn.Linear(WIDTH, WIDTH))
    model.rules = {  # type: ignore[assignment]
        "1.mixture.shared.gate_up": rules.column.joined(2),
        "1.mixture.shared.down": rules.row,
    }
    return model


FIVE = of(Sparse, partial(Sparse, 3, 1), name="five")
"""Layer 1: five experts, two of each token; layer 2: three, of which one."""
BIASED = of(partial(Sparse, 4, 2, bias=True), name="biased")
CORRECTED = of(partial(Sparse, 6, 2, scores="sigmoid", corrected=True), name="corrected")
GROUPED = of(
    partial(Sparse, 12, 3, scores="sigmoid", corrected=True, groups=4, chosen_groups=2), name="grouped"
)
TIED = Case("sparse tied", with_values(first_sparse), draw_with_zeros)
SHARED = Case("sparse shared", with_values(with_shared), draw)

ADAPTED = lora_cases.case(FIVE, targets=("experts.gate_up_proj", "experts.down_proj"))
"""Its experts have adapters, and nothing else trains."""

MANY = of(partial(Sparse, 16, 1), name="many")
"""More experts than most micro-batches have tokens for."""


def with_balance(balance: Balance, **routing: Any) -> nn.Module:
    """Two layers with experts, whose routers have auxiliary losses."""
    model = around(partial(Sparse, 5, 2, **routing), partial(Sparse, 5, 2, **routing))
    for module in model.modules():
        if isinstance(module, Router):
            module.balance = balance
    return model


def draw_padded(rows: int, generator: torch.Generator) -> Batch:
    """Each row has two documents, and padding behind them in every other row."""
    inputs, targets = draw(rows, generator)
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    ids[:, 2:] = 1
    ids[1::2, 4:] = -1
    return {"x": inputs, "document_ids": ids}, targets.where(ids >= 0, -100)


def balanced(draw: Any = draw_padded, *, corrected: bool = False, **settings: Any) -> Case:
    routing = {"scores": "sigmoid", "corrected": True} if corrected else {}
    build = partial(with_balance, Balance(**settings), **routing)
    return Case("sparse balanced", with_values(build), draw)


BALANCED = balanced(weight=0.5, z_weight=0.1)
OF_THE_STEP = balanced(weight=0.5, counts="step")
COUPLED = balanced(weight=0.5, counts="step", coupled=True)
PREVIOUS = balanced(weight=0.5, counts="previous")
SIGMOIDS = balanced(corrected=True, weight=0.5)
LEARNING = balanced(corrected=True, bias_rate=0.01)

EP = Plan(dp=2, ep=2, microbatches=2)
EP_OF_THREE = Plan(dp=2, ep=2, microbatches=3)
RECOMPUTED = Plan(dp=2, ep=2, microbatches=2, recompute="full")
SLICES = Plan(tp=2, ep=2, microbatches=2)
"""Ranks of tp have the same tokens, and send a slice each."""
PARTS = Plan(tp=2, etp=2, microbatches=2)
"""Each rank has half of the inner features of all experts."""
COPIES = Plan(dp=4, ep=2, microbatches=2)
"""Ranks 0 and 2 have the first experts, 1 and 3 the others."""
COPIES_OF_THREE = Plan(dp=4, ep=2, microbatches=3)
SHARDS = Plan(dp=4, ep=2, microbatches=2, strategy="full")
SPLIT = Plan(pp=2, dp=2, ep=2, microbatches=3, schedule="zb-h1")
