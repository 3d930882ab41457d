"""Modules are set back to the buffers and numbers that they held."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.models.layers.layer_sequence import sequence_of
from plait.verification.reference.reference_run import HeldState


class Counting(nn.Module):
    """Counts its runs in each way that a module can, and begins to count in one more."""

    count = 0

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.runs = 0
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("shared", shared)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.later = 1.0
        self.written += 1
        self.shared += 1
        self.replaced = self.replaced + 1
        return x


def held(model: nn.Module) -> list[object]:
    """What can be seen of the modules."""
    numbers = [{k: v for k, v in vars(one).items() if k in ("runs", "later")} for one in model]
    return [*numbers, *(buffer.tolist() for one in model for buffer in one.buffers())]


def test_modules_run_on_copies_and_are_set_back() -> None:
    shared = torch.zeros(2)
    model = nn.Sequential(Counting(shared), Counting(shared))
    state, before = HeldState.of(sequence_of(model).layers), held(model)
    for _ in range(2):
        state.set_back(to_copies=True)
        assert held(model) == before
        assert model[0].shared is model[1].shared
        assert model[0].shared is not shared
        model(torch.ones(1))
        assert held(model) != before
        assert model[1].shared.tolist() == [2.0, 2.0]
    state.set_back()
    assert held(model) == before
    assert model[0].shared is model[1].shared is shared
