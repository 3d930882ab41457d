"""What is relied on: a storage's Python object lives as long as its memory, and so a weak reference to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.estimate.memory.remembered_results import RememberedResults
from plait.estimate.memory.storage_tracker import StorageTracker
from plait.tensor.autograd.private_torch_functions import run_backward


def live(tracker: StorageTracker) -> list[int]:
    """Bytes."""
    return sorted(tracker.sizes[number] for number in tracker.live())


@pytest.fixture
def tracker() -> StorageTracker:
    return StorageTracker()


def test_memory_counts_until_the_last_view_of_it_is_gone(tracker: StorageTracker) -> None:
    with tracker.tracking():
        tensor = torch.empty(6)
        view = tensor.view(2, 3)[1:]
        assert tracker.number(tensor) == tracker.number(view)
        del tensor
        assert live(tracker) == [24]
        del view
        assert live(tracker) == []


def test_tensors_saved_inside_autograd_functions_are_tracked(tracker: StorageTracker) -> None:
    with tracker.tracking():
        given = torch.empty(4, 8, requires_grad=True)
        output = torch.nn.functional.layer_norm(given, (8,))  # keeps a mean and a deviation of each row
        assert live(tracker) == [16, 16, 128, 128]
        del given
        assert live(tracker) == [16, 16, 128, 128]
        del output
        assert live(tracker) == []


def test_what_others_save_inside_of_a_function_is_tracked_where_its_operations_are_seen(
    tracker: StorageTracker,
) -> None:
    kept: list[Tensor] = []
    inner = saved_tensors_hooks(kept.append, lambda saved: saved)  # as of a layer that is recomputed
    with tracker.tracking(), RememberedResults(tracker.see_results), inner:
        given = torch.empty(2, 8, requires_grad=True)
        last = torch.empty(3, 5, requires_grad=True)
        output = torch.linalg.multi_dot([given, torch.empty(8, 3), last])
        assert live(tracker) == [24, 40, 60, 64, 96]  # the first product, too
        kept.clear()
        del output, given, last
        assert live(tracker) == []


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


def test_tensors_kept_by_a_custom_backward_are_tracked(tracker: StorageTracker) -> None:
    kept: list[Tensor] = []
    with tracker.tracking():
        given = torch.empty(5, requires_grad=True)
        output = Keeping.apply(given, kept)
        run_backward([output], [torch.empty_like(output)])
        del output, given
        assert live(tracker) == [12, 20]
        kept.clear()
        assert live(tracker) == []


def test_samples_of_the_tracker_include_temporaries(tracker: StorageTracker) -> None:
    with tracker.tracking():
        given = torch.empty(10)
        given = given + 1
    assert max(len(sample) for sample in tracker.samples) == 2
    assert live(tracker) == [40]


def test_after_tracking_tensors_are_real_and_untracked() -> None:
    tracker = StorageTracker()
    with tracker.tracking():
        torch.empty(3)
    seen = len(tracker.samples)
    tensor = torch.ones(3, requires_grad=True)
    (tensor * 2).sum().backward()
    assert len(tracker.samples) == seen
    assert tensor.grad is not None
    assert tensor.grad.device.type == "cpu"
