"""The cross-entropy in chunks of rows, against torch's on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.errors import DataError, PlanError
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.chunked_cross_entropy import ChunkedCrossEntropy, require_cross_entropy
from plait.tensor.losses import CrossEntropy, Loss
from plait.tensor.parallel.partition import Vocabulary

ROWS, HIDDEN, CLASSES = 10, 4, 7
SCALE = torch.tensor(0.3, dtype=torch.float64)
LOSS = CrossEntropy(label_smoothing=0.1, z_loss=0.2)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    made = nn.Linear(HIDDEN, CLASSES).double()
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    return made


def batch() -> tuple[Tensor, Tensor]:
    """Features `[2, 5, hidden]`, and targets of which one does not count."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(2, ROWS // 2, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (2, ROWS // 2), generator=generator)
    targets[1, 2] = -100
    return features.requires_grad_(), targets


def chunked(head: nn.Linear, rows: int, *, adds_late: bool = False) -> ChunkedCrossEntropy:
    queue = WeightGradientQueue(adds_late)
    return ChunkedCrossEntropy(LOSS, head, Vocabulary.of_one_rank(CLASSES), rows, queue)


def expected() -> tuple[Tensor, Tensor, nn.Linear]:
    """The loss, the features' gradient, and a linear with gradients; of whole logits, by autograd."""
    head, (features, targets) = linear(), batch()
    total = LOSS.total(head(features), targets)
    (total * SCALE).backward()
    assert features.grad is not None
    return total.detach(), features.grad, head


@pytest.mark.parametrize("rows", [1, 3, 5, 10, 11])
def test_loss_and_gradients_are_those_of_whole_logits(rows: int) -> None:
    head, (features, targets) = linear(), batch()
    loss = chunked(head, rows)
    total, gradient = loss.gradient(features, targets, SCALE)
    wanted, of_features, other = expected()
    torch.testing.assert_close((total, gradient), (wanted, of_features), rtol=1e-13, atol=1e-15)
    for own, whole in zip(head.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.grad, whole.grad, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(loss.total(features, targets), wanted, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss.logits(features), head(features), rtol=0, atol=0)


def test_weight_gradients_may_wait_for_the_weight_work() -> None:
    head, (features, targets) = linear(), batch()
    loss = chunked(head, 3, adds_late=True)
    loss.gradient(features, targets, SCALE)
    assert all((parameter.grad == 1).all() for parameter in head.parameters())  # type: ignore[union-attr]
    loss.queue.run()
    for own, whole in zip(head.parameters(), expected()[2].parameters(), strict=True):
        torch.testing.assert_close(own.grad, whole.grad, rtol=1e-13, atol=1e-15)


def test_frozen_logits_weights_and_features_get_no_gradient() -> None:
    head, (features, targets) = linear().requires_grad_(False), batch()
    total, gradient = chunked(head, 3).gradient(features.detach(), targets, SCALE)
    assert gradient is None
    assert all((parameter.grad == 1).all() for parameter in head.parameters())  # type: ignore[union-attr]
    torch.testing.assert_close(total, expected()[0], rtol=1e-13, atol=0)


def test_a_chunked_cross_entropy_of_no_rows_is_zero() -> None:
    head = linear()
    features, targets = torch.empty(0, HIDDEN, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    total, gradient = chunked(head, 3).gradient(features.requires_grad_(), targets, SCALE)
    assert (total.item(), gradient.shape) == (0, (0, HIDDEN))  # type: ignore[union-attr]


@pytest.mark.parametrize("targets", [torch.full((2, 5), CLASSES), torch.zeros(2, 4, dtype=torch.int64)])
def test_a_chunked_cross_entropy_refuses_targets_that_do_not_fit(targets: Tensor) -> None:
    features, _ = batch()
    loss = chunked(linear(), 3)
    for call in (lambda: loss.total(features, targets), lambda: loss.gradient(features, targets, SCALE)):
        with pytest.raises(DataError, match=r"the target 7 is no class|logits .2, 5, 7."):
            call()


class OnlyTotal(CrossEntropy):
    """Which may compute something else."""


def test_only_cross_entropy_can_be_computed_in_chunks() -> None:
    loss: Loss = LOSS
    assert require_cross_entropy(loss, 3) is LOSS
    with pytest.raises(PlanError, match="rows is 3, but the loss is OnlyTotal"):
        require_cross_entropy(OnlyTotal(), 3)
