"""Mistakes of routers' auxiliary losses and of the correction of their biases."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity import balanced
from parity.case import Batch, Case
from plait.engine.runner import Runner
from plait.plan.plan import Plan
from plait.ranks.handle import Handle
from plait.tensor.experts import router_losses_of_step
from plait.tensor.experts.balance import Balance, count_choices, token_z
from plait.tensor.experts.router_losses_of_step import StepBalance
from plait.verification.options import VerifyOptions
from plait.verification.step_location import StepPhase
from zoo.row import TWO_STEPS, Named, Row


def draw(rows: int, generator: torch.Generator, packed: bool = False) -> Batch:
    """Tokens; packed ones of two documents a row, which padding of unlike lengths follows."""
    tokens, targets = torch.randint(balanced.VOCAB, (2, rows, balanced.LENGTH), generator=generator)
    if not packed:
        return tokens, targets
    ids = torch.arange(balanced.LENGTH).ge(5).long().repeat(rows, 1)
    for number, row in enumerate(ids):
        row[balanced.LENGTH - 1 - number % 4 :] = -1
    return {"tokens": tokens, "document_ids": ids}, targets.where(ids >= 0, -100)


def balanced_by(balance: Balance, *, packed: bool = False) -> Case:
    """The small model of experts with these losses."""
    return Case("balanced", partial(balanced.build, balance), partial(draw, packed=packed))


DOCUMENTS, PACKED = balanced_by(Balance(0.5)), balanced_by(Balance(0.5, 0.1), packed=True)
STEP, COUPLED = (
    balanced_by(Balance(0.5, counts="step")),
    balanced_by(Balance(0.5, counts="step", coupled=True)),
)
BEFORE = balanced_by(Balance(0.5, counts="previous"))
CORRECTED = balanced_by(Balance(bias_rate=0.2))


def losses_averaged_over_own_tokens() -> Any:
    """Each rank divides by the number of its own tokens, as a loss of each rank's model would."""
    original = Runner._over_ranks

    def over_ranks(self: Runner, weight: Tensor, documents: Any) -> tuple[Tensor, Tensor]:
        total, tokens = original(self, weight, documents)
        own = sum(one.counted for one in documents)
        return total, torch.full_like(tokens, own) if documents else tokens

    return patch.object(Runner, "_over_ranks", over_ranks)


def losses_averaged_over_each_micro_batch() -> Any:
    """Micro-batches add up their means."""
    original = StepBalance.begin

    def begin(self: StepBalance, tokens: Any, total: Tensor, scale: float, **how: Any) -> None:
        original(self, tokens, total / len(tokens), scale, **how)

    return patch.object(StepBalance, "begin", begin)


def own_choices_alone() -> Any:
    """The counts of other ranks are left out."""

    def start(self: StepBalance, table: Any) -> None:
        self._started.add(table)
        table.handle = Handle.done(table.counts, self.group)

    return patch.object(StepBalance, "_start", start)


def padding_counted() -> Any:
    """Padding counts as tokens of the first document."""

    def count(indices: Tensor, documents: Tensor, number: int, experts: int) -> Tensor:
        return count_choices(indices, documents.where(documents < number, 0), number, experts)

    return patch.object(router_losses_of_step, "count_choices", count)


def z_loss_of_padding() -> Any:
    """The logits of padding are kept small, too."""
    return patch.object(
        router_losses_of_step, "token_z", lambda logits, counted: token_z(logits, torch.ones_like(counted))
    )


def documents_of_the_first_micro_batch() -> Any:
    """All micro-batches have the documents of the first."""
    original = StepBalance.begin

    def begin(self: StepBalance, tokens: Any, *others: Any, **how: Any) -> None:
        original(self, [tokens[0]] * len(tokens), *others, **how)

    return patch.object(StepBalance, "begin", begin)


def counts_of_the_first_step_stay() -> Any:
    """The step before is always the first."""
    original = StepBalance.settle

    def settle(self: StepBalance, totals: Tensor) -> None:
        before = dict(self.previous)
        original(self, totals)
        self.previous = before or self.previous

    return patch.object(StepBalance, "settle", settle)


def biases_corrected_by_own_choices() -> Any:
    """Each data-parallel rank corrects by the choices of its own tokens."""
    totals, settle, own = StepBalance.totals, StepBalance.settle, dict[int, Tensor]()

    def kept(self: StepBalance) -> Tensor:
        own[id(self)] = totals(self)
        return own[id(self)].clone()

    return patch.multiple(
        StepBalance, totals=kept, settle=lambda self, summed: settle(self, own.pop(id(self)))
    )


def biases_corrected_the_other_way() -> Any:
    """Experts with more than the mean load are chosen more often."""
    original = router_losses_of_step.corrected_bias
    return patch.object(
        router_losses_of_step, "corrected_bias", lambda bias, counts, rate: original(bias, counts, -rate)
    )


def gradient_of_the_losses_lost() -> Any:
    """The losses are measured, and train nothing."""
    original = StepBalance.gradient
    return patch.object(StepBalance, "gradient", lambda *given: torch.zeros_like(original(*given)))


TWO_COPIES = Plan(dp=2, microbatches=2)
THREE_CONTEXTS = Plan(cp=3, microbatches=2, context_layout="contiguous")
THREE_STEPS = VerifyOptions(steps=3, perturbations=1)
LAST = "3"
"""The last layer with experts, whose backward comes first."""


def wrong_gradient(microbatch: int = 0, **options: Any) -> Named:
    """The input gradient of the last layer with experts differs, or with it that of its weights."""
    return Named(
        phase=StepPhase.INPUT_GRADIENT,
        layer=LAST,
        microbatch=microbatch,
        also=(StepPhase.WEIGHT_GRADIENT,),
        **options,
    )


BALANCING = (
    Row(defect=losses_averaged_over_own_tokens, model=DOCUMENTS, plan=TWO_COPIES, named=wrong_gradient()),
    Row(
        defect=losses_averaged_over_each_micro_batch,
        model=STEP,
        plan=Plan(microbatches=2, schedule="gpipe"),
        named=wrong_gradient(),
    ),
    Row(defect=own_choices_alone, model=DOCUMENTS, plan=THREE_CONTEXTS, named=wrong_gradient()),
    Row(defect=own_choices_alone, model=STEP, plan=Plan(dp=4), named=wrong_gradient()),
    Row(defect=own_choices_alone, model=COUPLED, plan=Plan(pp=2), named=wrong_gradient()),
    Row(defect=padding_counted, model=PACKED, plan=TWO_COPIES, named=wrong_gradient()),
    Row(defect=z_loss_of_padding, model=PACKED, plan=TWO_COPIES, named=wrong_gradient()),
    Row(
        defect=documents_of_the_first_micro_batch,
        model=PACKED,
        plan=Plan(microbatches=2),
        named=wrong_gradient(1),
    ),
    Row(
        defect=gradient_of_the_losses_lost,
        model=DOCUMENTS,
        plan=Plan(pp=2, microbatches=2),
        named=wrong_gradient(),
    ),
    Row(
        defect=counts_of_the_first_step_stay,
        model=BEFORE,
        plan=TWO_COPIES,
        options=THREE_STEPS,
        named=wrong_gradient(step=2),
    ),
    Row(
        defect=biases_corrected_by_own_choices,
        model=CORRECTED,
        plan=Plan(dp=2),
        options=TWO_STEPS,
        named=Named(phase=StepPhase.EXPERT_LOAD, cause="sum over dp is missing"),
    ),
    Row(
        defect=biases_corrected_the_other_way,
        model=CORRECTED,
        plan=Plan(pp=2, microbatches=2),
        options=TWO_STEPS,
        named=Named(phase=StepPhase.OPTIMIZER, parameter=r"\d.mixture.router", cause="the other way"),
    ),
)
