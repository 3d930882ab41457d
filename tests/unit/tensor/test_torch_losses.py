"""Losses of PyTorch as a sum and its weight: the same means, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import DataError, ModelError, PlanError
from plait.tensor import CrossEntropy, as_loss, mean_loss
from plait.tensor.torch_losses import divisor

WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])
CLASSES = torch.tensor([3, 1, -100, 4, 0, 1])
LOSSES: list[tuple[nn.Module, str]] = [
    (nn.CrossEntropyLoss(), "classes"),
    (nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.2), "classes of all"),
    (nn.CrossEntropyLoss(weight=WEIGHTS), "classes"),
    (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "classes"),
    (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), "classes"),
    (nn.CrossEntropyLoss(label_smoothing=0.1), "probabilities"),
    (nn.CrossEntropyLoss(weight=WEIGHTS), "probabilities"),
    (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2), "many classes"),
    (nn.NLLLoss(weight=WEIGHTS), "classes"),
    (nn.NLLLoss(reduction="sum"), "classes"),
    (nn.MSELoss(), "numbers"),
    (nn.MSELoss(reduction="sum"), "numbers"),
    (nn.L1Loss(), "numbers"),
    (nn.SmoothL1Loss(beta=0.3), "numbers"),
    (nn.HuberLoss(delta=0.4), "numbers"),
    (nn.SoftMarginLoss(), "signs"),
    (nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=2 * WEIGHTS), "bits"),
    (nn.KLDivLoss(reduction="batchmean"), "probabilities"),
    (nn.KLDivLoss(reduction="sum", log_target=True), "numbers"),
    (nn.PoissonNLLLoss(log_input=True, full=False), "counts"),
]


def batch(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (6, 5, 2) if kind == "many classes" else (6, 5)
    output = torch.randn(shape, dtype=torch.float64, generator=generator)
    numbers = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    targets = {
        "classes": CLASSES,
        "classes of all": CLASSES.clamp(min=0),
        "many classes": torch.randint(5, (6, 2), generator=generator),
        "probabilities": numbers.softmax(-1),
        "numbers": numbers,
        "signs": numbers.sign(),
        "bits": (numbers > 0).double(),
        "counts": numbers.square().round(),
    }
    return output, targets[kind]


@pytest.mark.parametrize(("given", "kind"), LOSSES, ids=lambda value: str(value))
def test_total_over_weight_is_the_loss_of_torch(given: nn.Module, kind: str) -> None:
    """Over parts of a batch, too: totals and weights add up."""
    output, targets = batch(kind)
    output.requires_grad_()
    loss = as_loss(given.float())
    parts = [(output[:1], targets[:1]), (output[1:], targets[1:])]
    total = torch.stack([loss.total(*part) for part in parts]).sum()
    weight = torch.stack([loss.weight(part).double() for _, part in parts]).sum()
    mean = total / divisor(loss, weight)
    wanted = given.double()(output, targets)
    torch.testing.assert_close(mean, wanted, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(value, output)[0] for value in (mean, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-16)
    assert "total is" in str(loss)
    given.float()


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (functional.cross_entropy, nn.CrossEntropyLoss()),
        (partial(functional.cross_entropy, weight=WEIGHTS.double()), nn.CrossEntropyLoss(weight=WEIGHTS)),
        (partial(functional.cross_entropy, reduction="sum"), nn.CrossEntropyLoss(reduction="sum")),
    ],
)
def test_functional_losses_are_taken_as_their_modules(
    function: Callable[..., Tensor], module: nn.Module
) -> None:
    output, targets = batch("classes")
    one, other = as_loss(function), as_loss(module)
    assert torch.equal(one.total(output, targets), other.total(output, targets))
    assert torch.equal(
        divisor(one, one.weight(targets).double()), divisor(other, other.weight(targets).double())
    )


def test_16_bit_outputs_are_summed_in_float32() -> None:
    output, targets = batch("classes")
    assert (
        as_loss(nn.CrossEntropyLoss(weight=WEIGHTS)).total(output.bfloat16(), targets).dtype == torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_16_bits_is_multiplied_in_float32(dtype: torch.dtype) -> None:
    """In bfloat16 257 targets would be 256, in float16 70,000 infinitely many."""
    loss = mean_loss(lambda output, targets: output.mean(), over="targets")
    for count in (257, 70_000):
        output = torch.ones(4, dtype=dtype, requires_grad=True)
        total = loss.total(output, torch.zeros(count, dtype=torch.int64))
        assert total.item() == count
        (total / count).backward()
        assert output.grad is not None
        assert torch.equal(output.grad, torch.full_like(output, 0.25))


def test_an_object_with_total_and_weight_is_itself() -> None:
    loss = CrossEntropy(ignore_index=0)
    assert as_loss(loss) is loss


def test_a_torch_loss_describes_its_total_and_weight() -> None:
    assert str(as_loss(nn.CrossEntropyLoss(label_smoothing=0.1))) == (
        "total is cross_entropy(output, targets, ignore_index=-100, label_smoothing=0.1, reduction='sum'), "
        "divided by the number of targets but those of -100"
    )
    assert str(as_loss(nn.MSELoss(reduction="sum"))) == (
        "total is mse_loss(output, targets, reduction='sum'), divided by 1, for it is a sum"
    )


# ── functions whose mean is over what the user says ──


def mean_of_rows(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum(-1).mean()


def mean_of_counted(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output, targets)


@pytest.mark.parametrize(
    ("loss", "kind", "wanted"),
    [
        (mean_loss(mean_of_rows), "numbers", mean_of_rows),
        (mean_loss(functional.mse_loss, "targets"), "numbers", functional.mse_loss),
        (mean_loss(mean_of_counted, lambda t: (t != -100).sum()), "classes", mean_of_counted),
    ],
)
def test_a_wrapped_mean_loss_of_parts_adds_up_to_the_mean_of_the_whole(
    loss: Any, kind: str, wanted: Callable[..., Tensor]
) -> None:
    """The third part of the classes has no counted target, whose own mean is nan."""
    output, targets = batch(kind)
    parts = [slice(0, 2), slice(2, 3), slice(3, 6)]
    total = sum(loss.total(output[part], targets[part]) for part in parts)
    weight = sum(loss.weight(targets[part]) for part in parts)
    torch.testing.assert_close(total / weight, wanted(output, targets), rtol=1e-14, atol=0)


class OwnLoss(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


REFUSED: list[tuple[Any, list[str]]] = [
    (None, ["the loss is None", "total(output, targets)"]),
    (mean_of_rows, ["the function mean_of_rows", "is not known", "plait.tensor.mean_loss"]),
    (lambda output, targets: output.mean(), ["is not known"]),
    (OwnLoss(), ["OwnLoss()", "is not known"]),
    (SimpleNamespace(total=mean_of_rows, weight=3.0), ["the loss is namespace", "weight(targets)"]),
    (nn.TripletMarginLoss(), ["TripletMarginLoss", "is not known"]),
    (nn.CrossEntropyLoss, ["the class CrossEntropyLoss", "CrossEntropyLoss()"]),
    (CrossEntropy, ["the class CrossEntropy", "CrossEntropy()"]),
    (nn.MSELoss(reduction="none"), ["reduction 'none'", "'mean' or 'sum'"]),
    (partial(functional.mse_loss, weight=WEIGHTS), ["has weight", "choose among reduction"]),
    (partial(functional.cross_entropy, size_average=False), ["has size_average", "choose among weight"]),
    (partial(functional.cross_entropy, torch.zeros(2)), ["is not known"]),
]


@pytest.mark.parametrize(("given", "parts"), REFUSED)
def test_an_unknown_loss_is_refused_naming_mean_loss(given: Any, parts: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        as_loss(given)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_mean_loss_with_a_wrong_divisor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"output \[2, 1\] and targets \[2, 3\].*broadcast"):
        as_loss(nn.MSELoss()).total(torch.ones(2, 1), torch.ones(2, 3))
    with pytest.raises(ModelError, match=r"weight \[2, 1\] with a value for each row"):
        as_loss(nn.BCEWithLogitsLoss(weight=torch.ones(2, 1))).total(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ModelError, match=r"classes as dim 1, so give plait.cross_entropy"):
        as_loss(nn.CrossEntropyLoss()).total(torch.ones(2, 3, 5), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ModelError, match=r"returned \[2\]: a function in mean_loss returns its mean"):
        mean_loss(lambda output, targets: output).total(torch.ones(2), torch.ones(2))
    with pytest.raises(ModelError, match=r"given a dict without rows"):
        mean_loss(mean_of_rows).weight({"a": torch.ones(2)})
    with pytest.raises(PlanError, match="over = 'columns'"):
        mean_loss(mean_of_rows, "columns")  # type: ignore[arg-type]


def test_a_target_that_is_no_class_of_a_loss_of_torch_is_named() -> None:
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        with pytest.raises(DataError, match="the target 5 is no class: give numbers from 0 to 4"):
            as_loss(loss).total(torch.randn(3, 5, 2), torch.tensor([[0, 5], [-100, 4], [1, 1]]))
