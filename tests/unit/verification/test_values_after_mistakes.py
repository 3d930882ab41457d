"""What a tensor may be by mistake: the sentences, and the values that they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.tensor.losses import cross_entropy
from plait.verification.definitions.float8 import E5M2, LINES
from plait.verification.reference.values_after_mistakes import (
    with_another_loss,
    with_local_positions,
    with_other_parameters,
    with_other_scales,
)

OUTPUT = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = [torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[4, 4, 1], [2, 0, 3]])]


def total(targets: Tensor) -> Tensor:
    return functional.cross_entropy(OUTPUT.flatten(0, 1), targets.flatten(), reduction="sum")


def test_outputs_without_a_parameter_or_with_it_added_twice_are_recognised() -> None:
    bias, table = torch.arange(5.0).double(), torch.ones(4, 5).double()
    given = {"bias": bias, "table": table, "weight": torch.ones(7, 2), "short": torch.ones(2, 5)}
    found = dict(with_other_parameters(OUTPUT, given, tp=4))
    assert list(found) == [
        f"{name} is {text}"
        for name in ("bias", "table")
        for text in ("not added", "added twice", "added 4 times, once on each rank of tp")
    ]
    assert torch.equal(found["bias is not added"], OUTPUT - bias)
    assert torch.equal(found["table is added twice"], OUTPUT + table[:3])
    assert torch.equal(found["bias is added 4 times, once on each rank of tp"], OUTPUT + 3 * bias)


def test_positions_counted_from_the_start_of_a_sequence_part_are_recognised() -> None:
    table, positions = torch.arange(40.0).view(8, 5).double(), torch.tensor([0, 6, 7])
    given = {"table": table, "bias": table[0], "narrow": table[:, :2], "short": table[:2]}
    found = dict(with_local_positions(OUTPUT, given, positions))
    (text,) = found
    assert text.startswith("table is read at positions 0, 1, 2, …")
    assert torch.equal(found[text] - OUTPUT + table[positions], table[:3].expand(2, 3, 5))


def test_targets_on_which_the_loss_does_not_depend_explain_nothing() -> None:
    class Sum:
        def total(self, output: Tensor, targets: Tensor) -> Tensor:
            return output.sum()

        def weight(self, targets: Tensor) -> int:
            return 1

    others = [("some targets", TARGETS[1])]
    assert list(with_another_loss(Sum(), OUTPUT, TARGETS, 0, OUTPUT.sum(), others)) == []
    named = dict(with_another_loss(cross_entropy, OUTPUT, TARGETS, 0, total(TARGETS[0]), others))
    assert torch.equal(named["it is the loss for some targets"], total(TARGETS[1]))


def test_losses_of_another_ranks_or_micro_batchs_targets_are_recognised() -> None:
    found = dict(with_another_loss(cross_entropy, OUTPUT, TARGETS, 0, total(TARGETS[0])))
    mean, later, earlier, other = found
    assert "its weight, 6," in mean
    assert torch.equal(found[mean], total(TARGETS[0]) / 6)
    assert "one later" in later
    assert "one earlier" in earlier
    torch.testing.assert_close(found[later], total(TARGETS[0].roll(1, 1)))
    torch.testing.assert_close(found[earlier], total(TARGETS[0].roll(-1, 1)))
    assert other.endswith("the rank's micro-batch 1")
    torch.testing.assert_close(found[other], total(TARGETS[1]))


class _Refusing:
    """A loss that takes nothing but what it was made for."""

    def total(self, output: Any, targets: Any) -> Tensor:
        raise KeyError("mask")

    def weight(self, targets: Any) -> Tensor:
        return torch.tensor(1)


def test_a_loss_that_raises_on_other_targets_explains_nothing() -> None:
    assert list(with_another_loss(_Refusing(), OUTPUT, TARGETS, 0, total(TARGETS[0]))) == []


def test_scales_of_another_format_rounding_or_direction_are_recognised() -> None:
    expected = torch.tensor([2.0**-9, 2.0**-7])
    of_lines = dict(with_other_scales(torch.tensor([0.3, 0.5]), expected, LINES))
    assert torch.equal(of_lines["it is that of e5m2, in which it is not cast"], expected * 448 / 57344)
    assert of_lines["it is rounded up to a power of two, not down"].tolist() == [2.0**-10, 2.0**-8]
    assert "it is not rounded to a power of two" in of_lines
    assert "it is not rounded to a power of two" not in dict(with_other_scales(expected, expected, LINES))
    of_gradients = dict(with_other_scales(expected, expected, E5M2))
    assert torch.equal(of_gradients["it is that of e4m3, in which it is not cast"], expected * 57344 / 448)
    assert of_gradients["it counts twice"].tolist() == [2.0**-18, 2.0**-14]
    assert len(of_gradients) == 3
