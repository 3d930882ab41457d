from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.engine.pipeline.loss_stage import LossStage, OverwritingLossStage
from plait.errors import ModelError
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.losses import cross_entropy


class SquaredError:
    def total(self, output: Any, targets: Any) -> Tensor:
        return ((output[0] - targets) ** 2).sum()


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_a_backward_starts_from_the_gradient_of_the_scaled_loss() -> None:
    end = LossStage(SquaredError())
    end.begin([torch.zeros(2), torch.zeros(2)], torch.tensor(0.5, dtype=torch.float64))
    end.compute(0, (leaf(1, 2), leaf(9, 9)))
    end.compute(1, (leaf(3, 4), leaf(9, 9)))
    assert [total.item() for total in end.totals] == [5.0, 25.0]
    gradient, unused = end.seed(1)
    assert gradient is not None
    assert gradient.tolist() == [3.0, 4.0]
    assert unused is None
    assert end.seed(0)[0].tolist() == [1.0, 2.0]  # type: ignore[union-attr]


class Normed(nn.Module):
    """A loss with a buffer that it keeps once, and one that follows its values, if it `averages`."""

    def __init__(self, averages: bool) -> None:
        super().__init__()
        self.averages = averages
        self.register_buffer("mean", torch.tensor(1.0))
        self.register_buffer("weights", None)

    def total(self, output: Any, targets: Any) -> Tensor:
        self.weights = torch.ones_like(targets)
        loss = ((output[0] - targets) ** 2 * self.weights).sum()
        if self.averages:
            self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean


def test_a_buffer_of_the_loss_that_training_changes_is_refused() -> None:
    for averages in (False, True):
        end = LossStage(Normed(averages))
        end.begin([torch.zeros(2)] * 3, torch.tensor(1.0))
        end.compute(0, (leaf(1, 2),))
        with pytest.raises(ModelError, match="mean, a buffer of the loss") if averages else nullcontext():
            end.compute(1, (leaf(1, 2),))


def test_a_loss_that_reads_a_parameter_is_refused_whenever_it_does() -> None:
    class Penalty:
        weight: Tensor | None = None

        def total(self, output: Any, targets: Any) -> Tensor:
            return output[0].sum() if self.weight is None else output[0].sum() + self.weight.square().sum()

    end, weight = LossStage(Penalty()), nn.Parameter(torch.ones(2, 3))
    end.begin([None] * 5, torch.tensor(1.0))
    for microbatch in range(3):
        end.compute(microbatch, (leaf(1, 2),))
    end.loss.weight = weight.detach()  # type: ignore[attr-defined]
    end.compute(3, (leaf(1, 2),))
    end.loss.weight = weight  # type: ignore[attr-defined]
    with pytest.raises(
        ModelError, match=r"^the loss computes with a tensor \[2, 3\] that requires a gradient"
    ):
        end.compute(4, (leaf(1, 2),))


def test_without_gradients_the_loss_stage_keeps_no_graph() -> None:
    end = LossStage(SquaredError())
    end.begin([torch.zeros(1)], None)
    with torch.no_grad():
        end.compute(0, (leaf(2),))
    with pytest.raises(KeyError):
        end.seed(0)


def test_a_loss_that_no_weight_feeds_has_no_gradient() -> None:
    end = LossStage(SquaredError())
    end.begin([torch.zeros(1)], torch.tensor(1.0))
    end.compute(0, (torch.ones(1),))
    assert end.seed(0) == [None]


def test_a_cleared_loss_stage_holds_nothing_of_the_last_step() -> None:
    end = LossStage(SquaredError())
    end.begin([torch.zeros(1)], torch.tensor(1.0))
    end.compute(0, (leaf(2),))
    end.keep(0, "output")
    end.clear()
    with pytest.raises(KeyError):
        end.seed(0)
    end.begin([], None)
    assert (end.totals, end.take_outputs()) == ([], [])


@pytest.mark.parametrize(("total", "told"), [(torch.zeros(3), r"\[3\]"), (1.5, "float")])
def test_a_total_that_is_no_scalar_is_refused(total: object, told: str) -> None:
    class Wrong:
        def total(self, output: Any, targets: Any) -> Any:
            return total

    end = LossStage(Wrong())
    end.begin([None], None)
    with pytest.raises(ModelError, match=rf"loss\.total gave {told}: give the summed loss as a 0-d tensor"):
        end.compute(0, torch.zeros(3))


def test_the_gradient_of_a_cross_entropy_takes_the_place_of_the_logits() -> None:
    end = OverwritingLossStage(CrossEntropyInPlace(cross_entropy, None))
    logits = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1])
    expected = functional.cross_entropy(logits, targets, reduction="sum")
    (wanted,) = torch.autograd.grad(expected, [logits])
    end.begin([targets], torch.tensor(0.5))
    with torch.no_grad():
        end.compute(0, logits)
    assert torch.allclose(end.total(0), expected)
    assert logits.tolist() == [[1, 2], [3, 5]]
    end.compute(0, logits)
    assert torch.allclose(end.total(0), expected)
    (gradient,) = end.seed(0)
    assert gradient is not None
    assert torch.allclose(gradient, wanted / 2)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(KeyError):
        end.seed(0)


def test_a_cross_entropy_of_a_frozen_model_leaves_the_logits() -> None:
    end = OverwritingLossStage(CrossEntropyInPlace(cross_entropy, None))
    end.begin([torch.tensor([1])], torch.tensor(0.5))
    frozen = torch.tensor([[1.0, 2.0]])
    end.compute(0, frozen)
    assert end.seed(0) == [None]
    assert frozen.tolist() == [[1, 2]]
