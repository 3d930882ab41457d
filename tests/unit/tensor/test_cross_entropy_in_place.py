"""The cross-entropy that writes its gradient over the logits, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import DataError
from plait.tensor import cross_entropy_in_place
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.losses import CrossEntropy

ROWS, CLASSES = 12, 7
SCALE = torch.tensor(0.3, dtype=torch.float64)
LOSSES = [
    CrossEntropy(),
    CrossEntropy(ignore_index=3),
    CrossEntropy(label_smoothing=0.1),
    CrossEntropy(z_loss=0.01),
    CrossEntropy(ignore_index=2, label_smoothing=0.2, z_loss=0.1),
]


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits `[3, 4, classes]` and targets `[3, 4]`, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 4, CLASSES, dtype=torch.float64, generator=generator)
    targets = torch.randint(CLASSES, (3, 4), generator=generator)
    targets[0, 1] = -100
    return logits.to(dtype), targets


def of_torch(loss: CrossEntropy, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and scaled gradient of `loss.total`, which calls torch's functional."""
    leaf = logits.clone().requires_grad_()
    total = loss.total(leaf, targets)
    total.backward(SCALE.to(total.dtype))
    assert leaf.grad is not None
    return total.detach(), leaf.grad


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_loss_and_gradient_equal_those_of_torch_and_lie_where_the_logits_did(loss: CrossEntropy) -> None:
    logits, targets = batch()
    targets = targets.where(targets != -100, loss.ignore_index)
    expected, wanted = of_torch(loss, logits, targets)
    kept = logits.clone()
    evaluated = CrossEntropyInPlace(loss, None).total(logits, targets)
    assert torch.equal(logits, kept)  # not written without a gradient
    total, gradient = CrossEntropyInPlace(loss, None).gradient(logits, targets, SCALE)
    assert torch.equal(evaluated, expected)
    assert abs(total - expected) <= 1e-12 * expected
    assert (gradient - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(gradient, logits)


@pytest.mark.parametrize("loss", [LOSSES[0], LOSSES[2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_16_bits_are_converted_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, loss: CrossEntropy
) -> None:
    logits, targets = batch(dtype)
    expected, wanted = of_torch(loss, logits, targets)
    sizes: list[int] = []
    name = "_overwrite_whole" if loss == CrossEntropy() else "overwrite_logits"
    original = getattr(cross_entropy_in_place, name)

    def overwrite(part: Tensor, *arguments: object) -> Tensor:
        sizes.append(len(part))
        return original(part, *arguments)

    monkeypatch.setattr(cross_entropy_in_place, name, overwrite)
    monkeypatch.setattr(cross_entropy_in_place, "LOSS_CHUNK_BYTES", 5 * CLASSES * 4)
    total, gradient = CrossEntropyInPlace(loss, None).gradient(logits, targets, SCALE)
    assert sizes == [5, 5, 2]
    assert total.dtype == torch.float32
    assert torch.allclose(total, expected, rtol=1e-6)
    assert gradient.dtype == dtype
    assert gradient.data_ptr() == logits.data_ptr()
    assert (gradient - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()


def test_logits_that_share_memory_among_rows_are_copied() -> None:
    row, targets = batch()[0][0, 0], torch.arange(CLASSES)
    given = row.expand(CLASSES, CLASSES)
    _, wanted = of_torch(CrossEntropy(), given.contiguous(), targets)
    kept = row.clone()
    _, gradient = CrossEntropyInPlace(CrossEntropy(), None).gradient(given, targets, SCALE)
    assert (gradient - wanted).abs().max() <= 1e-12
    assert torch.equal(row, kept)


@pytest.mark.parametrize("shape", [(0, CLASSES), (CLASSES,), (2, 0, CLASSES)])
def test_no_rows_and_a_single_row_have_a_loss(shape: tuple[int, ...]) -> None:
    logits, targets = torch.ones(shape, dtype=torch.float64), torch.ones(shape[:-1], dtype=torch.int64)
    expected = functional.cross_entropy(logits.clone().view(-1, CLASSES), targets.view(-1), reduction="sum")
    total, gradient = CrossEntropyInPlace(CrossEntropy(), None).gradient(logits, targets, SCALE)
    assert abs(total - expected) <= 1e-12
    assert gradient.shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [1, 2, 31, 32, 33, 257, 1025, 5000])
def test_log_probabilities_written_over_logits_have_the_bits_of_others(
    classes: int, dtype: torch.dtype
) -> None:
    """What `_overwrite_whole` relies on: torch does not say that the result may take the argument's place."""
    logits = torch.randn(37, classes, dtype=dtype, generator=torch.Generator().manual_seed(classes)) * 8
    logits[3, 0] = -torch.inf if classes > 1 else 0
    expected = torch.log_softmax(logits, 1)
    assert torch.log_softmax(logits, 1, out=logits).equal(expected)
    assert logits.equal(expected)


def test_targets_that_are_no_classes_are_refused() -> None:
    logits, targets = batch()
    for given in (targets.flatten()[:-1], targets.double()):
        with pytest.raises(DataError, match="give one class number for each row of logits"):
            CrossEntropyInPlace(CrossEntropy(), None).gradient(logits, given, SCALE)
    targets[2, 3] = CLASSES
    for loss in (CrossEntropy(z_loss=1.0), CrossEntropy()):
        with pytest.raises(DataError, match=f"the target {CLASSES} is no class: give numbers from 0 to 6"):
            CrossEntropyInPlace(loss, None).gradient(logits.clone(), targets, SCALE)
