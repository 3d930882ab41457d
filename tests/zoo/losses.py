"""Mistakes of the loss, of what it is divided by, and of the gradient that starts from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.defects import loss_divided_by_own_weight, targets_of_another_microbatch
from parity.tensor_defects import maximum_of_own_logits, targets_off_by_the_remainder
from plait.engine import Runtime, runner
from plait.engine import parallelize as composer
from plait.engine.pipeline.loss_stage import LossStage, OverwritingLossStage
from plait.ranks.collectives import all_reduce
from plait.ranks.handle import Handle
from plait.tensor import losses as softmax_terms
from plait.tensor.losses import CrossEntropy
from plait.verification.step_location import StepPhase
from zoo import cases, models
from zoo.patching import replaced_all_reduce
from zoo.row import Named, Row


@contextmanager
def _beginning(change: Any) -> Iterator[None]:
    """Each step's loss begins with what `change` makes of its targets and its scale."""
    original = LossStage.begin

    def begin(self: LossStage, targets: Any, scale: Tensor | None) -> None:
        original(self, *change(targets, scale))

    with patch.object(LossStage, "begin", begin):
        yield


def targets_shifted() -> Any:
    """Each position is compared with the target of the one before."""
    return _beginning(lambda targets, scale: ([part.roll(1, 1) for part in targets], scale))


def ignored_targets_counted() -> Any:
    """What is to be ignored is taken for class 0, as padding may be."""
    return _beginning(lambda targets, scale: ([part.clamp(min=0) for part in targets], scale))


def divided_by_microbatches() -> Any:
    """The loss is divided by the number of micro-batches, although its weight is the global one."""
    return _beginning(lambda targets, scale: (targets, scale and scale / len(targets)))


@contextmanager
def multiplied_by_data_ranks() -> Iterator[None]:
    """The loss is made ready for a mean over dp that is not taken."""
    original = runner.all_reduce

    def own(tensor: Tensor, group: Any, **options: Any) -> Handle[Tensor]:
        total = original(tensor, group, **options).wait()
        return Handle.done(total / group.size if group.name == "dp" else total, group)

    with patch.object(runner, "all_reduce", own):
        yield


class _AllTargets(CrossEntropy):
    """Its weight is the number of all targets."""

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())


def ignored_targets_in_the_weight() -> Any:
    """The engine divides by the number of all targets, counted or not."""
    return patch.object(composer, "Runtime", lambda **given: Runtime(**given | {"loss": _AllTargets()}))


@contextmanager
def smoothing_over_own_classes() -> Iterator[None]:
    """The share of label smoothing is spread over what the rank holds."""

    def partly(tensor: Tensor, group: Any, *arguments: Any, **options: Any) -> Handle[Tensor]:
        if len(tensor) != 3:
            return all_reduce(tensor, group, *arguments, **options)
        own = tensor[2].clone()
        all_reduce(tensor, group, **options).wait()
        tensor[2] = own
        return Handle.done(tensor, group)

    with patch.object(softmax_terms, "all_reduce", partly):
        yield


def target_subtracted_on_every_rank() -> Any:
    """A rank that does not hold the target takes it off its first class."""

    def subtract(self: Any, part: Tensor, amounts: Tensor) -> None:
        part.scatter_(1, self.columns, part.gather(1, self.columns) - amounts[:, None])

    return patch.object(softmax_terms.LocalTargets, "subtract", subtract)


@contextmanager
def seed_of_another_microbatch() -> Iterator[None]:
    """Each backward starts from the gradient of the first."""
    original = OverwritingLossStage.seed
    first: list[Any] = []

    def seed(self: OverwritingLossStage, microbatch: int) -> Any:
        gradients = original(self, microbatch)
        first.append([gradient.clone() for gradient in gradients])
        return [gradient.clone() for gradient in first[0]]

    with patch.object(OverwritingLossStage, "seed", seed):
        yield


def mean_counted_by_every_rank() -> Any:
    """Each rank of tp adds the loss to the mean that is returned."""
    original = runner.all_reduce

    def change(tensor: Tensor, group: Any) -> Tensor:
        return 2 * original(tensor, group, checked=False).wait()

    return replaced_all_reduce(runner, "world", change)


@contextmanager
def statistics_over_the_batch() -> Iterator[None]:
    """No patch: a layer subtracts the mean over rows."""
    yield


@contextmanager
def rows_by_number() -> Iterator[None]:
    """No patch: a layer looks at a row's number in what it is shown."""
    yield


@contextmanager
def calls_counted() -> Iterator[None]:
    """No patch: a layer gives another value at each call."""
    yield


@contextmanager
def total_is_a_mean() -> Iterator[None]:
    """No patch: the loss gives a mean as its total."""
    yield


BOTH = (0, 1)
BATCH = Named(phase=StepPhase.BATCH, cause="cut")
LOSSES = (
    Row(
        defect=targets_shifted,
        model=cases.GPT2,
        plan=cases.TWO_STAGES,
        named=Named(phase=StepPhase.LOSS, microbatch=0, ranks=(1,), cause="targets"),
    ),
    Row(
        defect=targets_of_another_microbatch,
        model=cases.GPT2,
        plan=cases.TWO_STAGES,
        named=Named(phase=StepPhase.LOSS, microbatch=1, ranks=(1,), cause="targets"),
        full=True,
    ),
    Row(
        defect=ignored_targets_counted,
        model=cases.UNEVEN,
        plan=cases.TWO_COPIES,
        named=Named(phase=StepPhase.LOSS, microbatch=0, ranks=(0,), cause="targets"),
        full=True,
    ),
    Row(
        defect=smoothing_over_own_classes,
        model=cases.SMOOTH,
        plan=cases.TWO_PARTS,
        named=Named(phase=StepPhase.LOSS, microbatch=0, ranks=BOTH),
    ),
    Row(
        defect=targets_off_by_the_remainder,
        model=cases.GPT2,
        plan=cases.TWO_PARTS,
        named=Named(phase=StepPhase.LOSS, microbatch=0),
    ),
    Row(
        defect=maximum_of_own_logits,
        model=cases.GPT2,
        plan=cases.TWO_PARTS,
        named=Named(phase=StepPhase.LOSS, microbatch=0, ranks=BOTH),
    ),
    Row(
        defect=ignored_targets_in_the_weight,
        model=cases.UNEVEN,
        plan=cases.TWO_STAGES,
        named=Named(phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=0, ranks=(1,), cause="times"),
    ),
    Row(
        defect=loss_divided_by_own_weight,
        model=cases.UNEVEN,
        plan=cases.TWO_COPIES,
        named=Named(phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=0, ranks=(0,), cause="times"),
    ),
    Row(
        defect=divided_by_microbatches,
        model=cases.GPT2,
        plan=cases.TWO_STAGES_OF_THREE,
        named=Named(
            phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=0, cause="1/3 .* number of micro-batches"
        ),
    ),
    Row(
        defect=multiplied_by_data_ranks,
        model=cases.GPT2,
        plan=cases.TWO_COPIES_OF_THREE,
        named=Named(phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=0, cause="2 times .* size of dp"),
    ),
    Row(
        defect=target_subtracted_on_every_rank,
        model=cases.GPT2,
        plan=cases.TWO_PARTS,
        named=Named(phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=0),
    ),
    Row(
        defect=seed_of_another_microbatch,
        model=cases.GPT2,
        plan=cases.TWO_STAGES,
        named=Named(phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=1, cause="micro-batch 0"),
        full=True,
    ),
    Row(
        defect=mean_counted_by_every_rank,
        model=cases.GPT2,
        plan=cases.TWO_PARTS,
        named=Named(phase=StepPhase.MEAN_LOSS, ranks=BOTH),
    ),
    Row(defect=statistics_over_the_batch, model=models.CENTRED, plan=cases.ANY_TWO_STAGES, named=BATCH),
    Row(defect=rows_by_number, model=models.NUMBERED, plan=cases.TWO_COPIES, named=BATCH, full=True),
    Row(defect=calls_counted, model=models.COUNTING, plan=cases.TWO_COPIES, named=BATCH, full=True),
    Row(defect=total_is_a_mean, model=models.MEAN_OF_ROWS, plan=cases.ANY_TWO_STAGES, named=BATCH),
)
