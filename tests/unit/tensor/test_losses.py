from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.tensor.losses import CrossEntropy, Loss, cross_entropy


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0, 2])
def test_total_over_weight_is_the_mean_of_torch(
    shape: tuple[int, ...], smoothing: float, ignored: int
) -> None:
    logits = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(5, shape)
    targets.view(-1)[:ignored] = -100
    loss = CrossEntropy(label_smoothing=smoothing)
    mean = loss.total(logits, targets) / loss.weight(targets)
    wanted = functional.cross_entropy(logits.view(-1, 5), targets.view(-1), label_smoothing=smoothing)
    torch.testing.assert_close(mean, wanted, rtol=1e-14, atol=0)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (mean, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-16)
    assert loss.weight(targets).item() == 6 - ignored


def test_another_ignore_index() -> None:
    loss, targets = CrossEntropy(ignore_index=3), torch.tensor([3, 1, 3])
    logits = torch.randn(3, 5)
    assert loss.weight(targets).item() == 1
    torch.testing.assert_close(
        loss.total(logits, targets), functional.cross_entropy(logits[1:2], targets[1:2])
    )


def test_totals_and_weights_of_parts_add_up() -> None:
    logits, targets = torch.randn(8, 5, dtype=torch.float64), torch.tensor([1, -100, 2, 3, -100, -100, 0, 4])
    parts = [(logits[:4], targets[:4]), (logits[4:], targets[4:])]
    total = sum(cross_entropy.total(*part) for part in parts)
    torch.testing.assert_close(total, cross_entropy.total(logits, targets))
    assert sum(cross_entropy.weight(part).item() for _, part in parts) == cross_entropy.weight(targets).item()


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_sum_is_made_in_at_least_float32(dtype: torch.dtype, summed: torch.dtype) -> None:
    total = cross_entropy.total(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]))
    assert (total.dtype, total.shape) == (summed, ())


def test_what_counts_as_a_loss() -> None:
    class Own:
        def total(self, output: Tensor, targets: Tensor) -> Tensor:
            return output.sum()

        def weight(self, targets: Tensor) -> Tensor:
            return targets.sum()

    assert isinstance(cross_entropy, Loss)
    assert isinstance(Own(), Loss)
    assert not isinstance(functional.cross_entropy, Loss)
    assert not isinstance(nn.CrossEntropyLoss(), Loss)
