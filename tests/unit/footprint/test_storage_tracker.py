"""What is relied on: a storage's Python object lives as long as its memory, and so a weak reference to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.footprint.storage_tracker import StorageTracker


def alive(watch: StorageTracker) -> list[int]:
    """Bytes."""
    return sorted(watch.sizes[number] for number in watch.alive())


@pytest.fixture
def watch() -> StorageTracker:
    return StorageTracker()


def test_memory_counts_until_the_last_view_of_it_is_gone(watch: StorageTracker) -> None:
    with watch.watching():
        tensor = torch.empty(6)
        view = tensor.view(2, 3)[1:]
        assert watch.number(tensor) == watch.number(view)
        del tensor
        assert alive(watch) == [24]
        del view
        assert alive(watch) == []


def test_what_autograd_saves_is_seen_inside_functions_too(watch: StorageTracker) -> None:
    with watch.watching():
        given = torch.empty(4, 8, requires_grad=True)
        output = torch.nn.functional.layer_norm(given, (8,))  # keeps a mean and a deviation of each row
        assert alive(watch) == [16, 16, 128, 128]
        del given
        assert alive(watch) == [16, 16, 128, 128]
        del output
        assert alive(watch) == []


class Keeping(torch.autograd.Function):
    """Keeps its gradient, and something that is made in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.kept += [gradient, gradient.new_empty(3)]
        return gradient + 1, None


def test_what_a_backward_leaves_behind_is_seen(watch: StorageTracker) -> None:
    kept: list[Tensor] = []
    with watch.watching():
        given = torch.empty(5, requires_grad=True)
        output = Keeping.apply(given, kept)
        watch.follow([output])
        torch.autograd.backward(output, torch.empty_like(output))
        del output, given
        assert alive(watch) == [12, 20]
        kept.clear()
        assert alive(watch) == []


def test_samples_hold_what_passed_as_well(watch: StorageTracker) -> None:
    with watch.watching():
        given = torch.empty(10)
        given = given + 1
    assert max(len(sample) for sample in watch.samples) == 2
    assert alive(watch) == [40]


def test_afterwards_all_is_as_before() -> None:
    watch = StorageTracker()
    with watch.watching():
        torch.empty(3)
    seen = len(watch.samples)
    tensor = torch.ones(3, requires_grad=True)
    (tensor * 2).sum().backward()
    assert len(watch.samples) == seen
    assert tensor.grad is not None
    assert tensor.grad.device.type == "cpu"
