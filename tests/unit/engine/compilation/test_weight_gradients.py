"""Weight gradients of float8 linears in compiled layers: left to W, with operands of eight bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.pairs import in_quick
from plait.engine.compilation.weight_gradients import WeightTerms
from plait.plan.plan import Plan

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPERANDS = {
    "float8": {E4M3, E5M2, torch.float32},
    "float8-rowwise": {E4M3, torch.float32},
    "float8-rowwise-gw": {torch.bfloat16},
}
"""Data and scales."""


@pytest.mark.parametrize("recipe", in_quick(OPERANDS, "float8"))
def test_weight_gradients_of_compiled_float8_linears_wait_for_w_in_eight_bits(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    dtypes, add_to = Counter[frozenset[torch.dtype]](), WeightTerms.add_to

    def noted(terms: WeightTerms, queue: Any, parameters: Any, values: Sequence[Tensor]) -> None:
        dtypes[frozenset(value.dtype for value in values)] += 1
        add_to(terms, queue, parameters, values)

    monkeypatch.setattr(WeightTerms, "add_to", noted)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 48), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Linear(48, 32), layers[1], nn.Linear(48, 10))
    plan = Plan(linears=recipe, precision="bf16", compile="graphs", microbatches=2)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    inputs, targets = torch.randn(4, 8, 32), torch.randint(10, (4, 8))
    engine.forward_backward(inputs, targets)
    expected = Counter({frozenset(OPERANDS[recipe]): 6})
    expected[frozenset({torch.bfloat16})] += 2  # of the head
    assert dtypes == expected
