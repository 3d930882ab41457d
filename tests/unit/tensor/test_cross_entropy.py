"""Cross-entropy of logits in parts, against torch's on whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import DataError, ModelError
from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor.losses import CrossEntropy
from plait.tensor.parallel.partition import Vocabulary

ROWS = 12
GRADIENT = 0.7
"""What the backward starts from."""


def batch(classes: int, *, scale: float = 3.0, ignored: int = 0) -> tuple[Tensor, Tensor]:
    """Logits `[3, 4, classes]` and targets `[3, 4]`; the first and the last class are among them."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(3, 4, classes, dtype=torch.float64, generator=generator) * scale
    targets = torch.randint(classes, (ROWS,), generator=generator)
    targets[0], targets[-1] = classes - 1, 0
    targets[1 : 1 + ignored] = -100
    return logits, targets.view(3, 4)


def whole(loss: CrossEntropy, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient from torch's functional and the plain formula of the z-loss."""
    leaf = logits.clone().requires_grad_()
    rows, numbers = leaf.view(ROWS, -1), targets.view(-1)
    total = functional.cross_entropy(
        rows,
        numbers,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        reduction="sum",
    )
    counted = rows[numbers != loss.ignore_index]
    total = total + loss.z_loss * counted.logsumexp(-1).square().sum()
    total.backward(torch.tensor(GRADIENT, dtype=total.dtype))
    return total.detach(), leaf.grad


def woven(
    loss: CrossEntropy, logits: Tensor, targets: Tensor, group: Group
) -> tuple[Tensor, Tensor, bool, bool]:
    """One rank's loss and gradient, whether the gradient lies where the logits did, and they were spent."""
    vocabulary = Vocabulary(logits.shape[-1], group)
    own = vocabulary.own
    part = logits[..., own.start : own.stop].contiguous()
    leaf = part.clone().requires_grad_()
    total = loss.total_of_pieces(leaf, targets, vocabulary)
    total.backward(torch.tensor(GRADIENT, dtype=total.dtype))
    in_place = leaf.grad.data_ptr() == leaf.data_ptr()
    return total.detach(), leaf.grad, in_place, not torch.equal(leaf.detach(), part)


def all_over_ranks(thread_ranks, ranks, *trials):
    """Of each `(loss, logits, targets)` the loss (the same bits on all ranks), the gradient of the whole
    logits, and every rank's other answers.
    """

    def body():
        group = Mesh(tp=ranks).group("tp")
        return [woven(*trial, group) for trial in trials]

    for answers in zip(*thread_ranks.run(body, ranks=ranks), strict=True):
        totals, parts, in_place, spent = zip(*answers, strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals)
        yield totals[0], torch.cat(parts, dim=-1), in_place, spent


def over_ranks(thread_ranks, ranks, loss, logits, targets):
    """The same of one."""
    (answer,) = all_over_ranks(thread_ranks, ranks, (loss, logits, targets))
    return answer


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


LOSSES = [
    CrossEntropy(),
    CrossEntropy(label_smoothing=0.1),
    CrossEntropy(z_loss=1e-2),
    CrossEntropy(label_smoothing=0.2, z_loss=1e-2, ignore_index=3),
    CrossEntropy(label_smoothing=1.0),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_and_gradient_are_those_of_torch(thread_ranks, ranks):
    trials = [
        (loss, *batch(classes, ignored=4)) for classes in (16, 13, 7) for loss in (*LOSSES[:3], LOSSES[4])
    ]
    found = all_over_ranks(thread_ranks, ranks, *trials)
    for trial, (total, gradient, in_place, _) in zip(trials, found, strict=True):
        expected, expected_gradient = whole(*trial)
        assert_close(total, expected)
        assert_close(gradient, expected_gradient)
        assert all(in_place)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_ignore_index_and_all_terms_at_once(thread_ranks, ranks):
    logits, targets = batch(5)
    assert (targets == 3).any()
    total, gradient, _, _ = over_ranks(thread_ranks, ranks, LOSSES[3], logits, targets)
    expected, expected_gradient = whole(LOSSES[3], logits, targets)
    assert_close(total, expected)
    assert_close(gradient, expected_gradient)
    assert not gradient[targets == 3].any()


@pytest.mark.parametrize("loss", LOSSES[:3])
def test_cross_entropy_over_more_ranks_than_classes_equals_torch(thread_ranks, loss):
    logits, targets = batch(2)
    total, gradient, _, _ = over_ranks(thread_ranks, 4, loss, logits, targets)
    expected, expected_gradient = whole(loss, logits, targets)
    assert_close(total, expected)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("loss", LOSSES[:3])
def test_cross_entropy_without_counted_targets_is_zero(thread_ranks, loss):
    logits, targets = batch(7, ignored=0)
    total, gradient, _, _ = over_ranks(thread_ranks, 2, loss, logits, torch.full_like(targets, -100))
    assert total.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize("classes", [7, 13])
def test_the_last_class_of_each_ranks_shard_counts(thread_ranks, classes):
    logits, _ = batch(classes)
    cuts = [Vocabulary(classes, Group("tp", (0, 1, 2), i, None, Traffic(), 1.0)).own for i in range(3)]
    targets = torch.tensor([cut[-1] for cut in cuts] * 4).view(3, 4)
    assert targets.max() == classes - 1
    total, gradient, _, _ = over_ranks(thread_ranks, 3, CrossEntropy(), logits, targets)
    expected, expected_gradient = whole(CrossEntropy(), logits, targets)
    assert_close(total, expected)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("loss", LOSSES[:2])
def test_large_logits_do_not_overflow(thread_ranks, loss):
    logits, targets = batch(13, scale=1e4)
    total, gradient, _, _ = over_ranks(thread_ranks, 3, loss, logits.float(), targets)
    expected, expected_gradient = whole(loss, logits.float(), targets)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_float32_is_as_good_as_torch_and_in_place(thread_ranks):
    logits, targets = batch(13)
    total, gradient, in_place, spent = over_ranks(thread_ranks, 3, CrossEntropy(), logits.float(), targets)
    expected, expected_gradient = whole(CrossEntropy(), logits.float(), targets)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert all(in_place)
    assert all(spent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_computed_in_float32_and_left_alone(thread_ranks, dtype):
    logits, targets = batch(13)
    half = logits.to(dtype)
    total, gradient, _, spent = over_ranks(thread_ranks, 3, LOSSES[1], half, targets)
    expected, expected_gradient = whole(LOSSES[1], half.float(), targets)
    assert (total.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient.to(dtype))
    assert not any(spent)


def test_cross_entropy_over_tp_makes_two_all_reduces(thread_ranks):
    logits, targets = batch(13)

    def body():
        mesh = Mesh(tp=3)
        counts = []
        for loss in LOSSES[:3]:
            before = mesh.traffic.snapshot()
            woven(loss, logits, targets, mesh.group("tp"))
            counts.append(mesh.traffic.since(before))
        return counts

    for counts in thread_ranks.run(body, ranks=3):
        numbers = [count["tp"].pop("all_reduce") for count in counts]
        assert numbers == [Count(2, 8 * ROWS * each) for each in (1 + 2, 1 + 3, 1 + 2)]
        assert counts == [{"tp": {}}] * 3


def alone(classes: int) -> Vocabulary:
    return Vocabulary(classes, Group("tp", (0,), 0, None, Traffic(), 1.0))


@pytest.mark.parametrize("gradients", [True, False])
def test_without_gradients_cross_entropy_does_not_overwrite_the_logits(gradients: bool) -> None:
    logits, targets = batch(7)
    leaf = logits.clone().requires_grad_(not gradients)
    with torch.set_grad_enabled(gradients):
        total = CrossEntropy().total_of_pieces(leaf, targets, alone(7))
    assert not total.requires_grad
    assert_close(total, whole(CrossEntropy(), logits, targets)[0])
    assert torch.equal(leaf.detach(), logits)


def test_cross_entropy_in_place_reports_an_error_to_operations_that_saved_the_logits() -> None:
    logits, targets = batch(7)
    leaf = logits.requires_grad_()
    square = leaf.square().sum()
    total = CrossEntropy().total_of_pieces(leaf, targets, alone(7))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (total + square).backward()


def test_modifying_logits_before_the_backward_is_an_error() -> None:
    logits, targets = batch(7)
    total = CrossEntropy().total_of_pieces(logits.requires_grad_(), targets, alone(7))
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
def test_a_second_backward_through_cross_entropy_is_refused(option: str) -> None:
    logits, targets = batch(7)
    total = CrossEntropy().total_of_pieces(logits.requires_grad_(), targets, alone(7))
    if option == "retain_graph":
        torch.autograd.grad(total, logits, retain_graph=True)
    with pytest.raises(ModelError, match="second backward"):
        torch.autograd.grad(total, logits, **{option: True})


def test_cross_entropy_accepts_logits_in_another_memory_order() -> None:
    logits, targets = batch(7)
    leaf = logits.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    total = CrossEntropy().total_of_pieces(leaf, targets, alone(7))
    total.backward(torch.tensor(GRADIENT, dtype=total.dtype))
    expected, expected_gradient = whole(CrossEntropy(), logits, targets)
    assert_close(total.detach(), expected)
    assert_close(leaf.grad, expected_gradient)


@pytest.mark.parametrize("target", [7, -1, 99])
def test_targets_that_are_no_classes_are_refused(target: int) -> None:
    logits, targets = batch(7)
    targets[1, 2] = target
    with pytest.raises(DataError, match=f"target {target} is no class: give numbers from 0 to 6, or -100"):
        CrossEntropy().total_of_pieces(logits, targets, alone(7))


def test_an_ignored_number_need_not_be_a_class() -> None:
    logits, targets = batch(7)
    targets[1, 2] = 99
    loss = CrossEntropy(ignore_index=99)
    total = loss.total_of_pieces(logits.clone(), targets, alone(7))
    assert_close(total, whole(loss, logits, targets)[0])


@pytest.mark.parametrize("targets", [torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4)])
def test_targets_that_do_not_fit_are_refused(targets: Tensor) -> None:
    logits, _ = batch(7)
    with pytest.raises(DataError, match=r"and the logits \[3, 4, 7\]: give one class number"):
        CrossEntropy().total_of_pieces(logits, targets, alone(7))
