"""A step's first gradient of a weight is written over what is in memory (NaN: `woven.spoil_gradients`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parity.cases import case
from parity.data import draw_vectors
from parity.layers import CLASSES, HIDDEN, Idle
from parity.parity import check_parity
from plait.plan.plan import Plan


class Both(nn.Module):
    """A linear that is called, and whose weight is used by itself, too: autograd adds that part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden)) + functional.linear(hidden, self.linear.weight)


class Rows(nn.Module):
    """A linear, and rows of its weight: where it is compiled the rows' gradients come first, or last."""

    def __init__(self, rows_first: bool) -> None:
        super().__init__()
        self.linear, self.rows_first = nn.Linear(HIDDEN, HIDDEN), rows_first
        self.register_buffer("numbers", torch.arange(HIDDEN).flip(0) // 2)

    def forward(self, hidden: Tensor) -> Tensor:
        product = None if self.rows_first else self.linear(hidden)
        rows = functional.embedding(self.numbers, self.linear.weight)
        product = self.linear(hidden) if product is None else product
        return torch.tanh(product) + rows.sum(0)


def in_several_ways() -> nn.Module:
    """Weights whose gradients are products, or only in part, or that are not used."""
    return nn.Sequential(Both(), Idle(), Rows(True), Rows(False), nn.Linear(HIDDEN, CLASSES))


@pytest.mark.parametrize(
    "plan",
    [
        {"microbatches": 2},
        {"pp": 2, "schedule": "zb-h1", "microbatches": 3},
        {"dp": 2, "strategy": "full", "reduce": "each", "microbatches": 2, "compile": "graphs"},
    ],
    ids=str,
)
def test_a_weight_used_by_several_operations_gets_all_its_gradients(
    thread_ranks: Any, plan: dict[str, Any]
) -> None:
    check_parity(thread_ranks, case(in_several_ways, draw_vectors), Plan(precision="fp64", **plan))
