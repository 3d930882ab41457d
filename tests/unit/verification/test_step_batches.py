"""Each step of a verification has other rows for each micro-batch, with their targets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from verification_cases import mlp, rows_and_classes

import plait
from plait.engine.runner import Runner
from plait.plan.plan import Plan
from plait.tensor.microbatches import Microbatches
from plait.verification.step_batches import batches_of_steps


def numbered(rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows).unsqueeze(1).repeat(1, 3), torch.arange(rows)


@pytest.mark.parametrize(("rows", "microbatches"), [(2, 1), (4, 2), (2, 2), (8, 4), (6, 3), (5, 1)])
def test_each_micro_batch_has_other_inputs_and_targets_than_in_the_step_before(
    rows: int, microbatches: int
) -> None:
    steps = batches_of_steps(*numbered(rows), 4, microbatches)
    assert len(steps) == 4
    shift = rows // microbatches + 1 if microbatches > 1 and rows > 2 else 1
    assert [targets.tolist() for _, targets in steps] == [
        torch.arange(rows).roll(shift * step).tolist() for step in range(4)
    ]
    for (before, old), (inputs, targets) in pairwise(steps):
        assert torch.equal(inputs[:, 0], targets)  # rows keep their targets
        assert sorted(targets.tolist()) == list(range(rows))
        pairs = zip(old.chunk(microbatches), targets.chunk(microbatches), strict=True)
        assert not any(torch.equal(one, other) for one, other in pairs)
        assert not torch.equal(before, inputs)


def test_rows_that_are_alike_are_rolled_along_the_sequence() -> None:
    tokens = torch.arange(6).repeat(2, 1)
    (_, (inputs, targets)) = batches_of_steps(tokens, tokens + 1, 2, 2)
    assert torch.equal(inputs, tokens.roll(1, 1))
    assert torch.equal(targets, tokens.roll(1, 1) + 1)


def test_nothing_is_made_up_where_rows_and_positions_are_alike_or_cannot_be_cut() -> None:
    ones = torch.ones(4, 3)
    for inputs, targets in ((ones, ones[:, :1]), (torch.ones(3, 2), torch.ones(4))):
        steps = batches_of_steps(inputs, targets, 2, 2)
        assert steps[1][0] is inputs
        assert steps[1][1] is targets
    cut = Microbatches([ones, ones])
    assert batches_of_steps(cut, cut, 2, 2)[1][0] is cut


def test_targets_of_the_first_step_are_seen_where_one_batch_was_given() -> None:
    original, kept = Runner.loss_batch, []

    def loss_batch(self: Runner, inputs: Tensor, targets: Tensor, *rows: Any, **how: Any) -> object:
        kept.append(targets)
        return original(self, inputs, kept[0], *rows, **how)

    for plan in (Plan(microbatches=2), Plan(microbatches=2, loss_rows=2)):
        kept.clear()
        with patch.object(Runner, "loss_batch", loss_batch):
            report = plait.verify(mlp(), plan, *rows_and_classes(), ranks_as="threads")
        assert report.first is not None
        assert "it is the loss for the targets of the step before" in report.first.cause
