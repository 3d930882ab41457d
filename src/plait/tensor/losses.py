"""Losses as a sum and the weight by which the sum is divided.

Every layout has the same mean only if the divisor belongs to the global batch. So a loss returns a sum over
the targets of a micro-batch, and their weight; plait sums both over micro-batches and ranks, and divides
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import ModelError
from plait.tensor.autograd.paired_collectives import gather
from plait.tensor.parallel.vocabulary_partition import Vocabulary
from plait.tensor.softmax_terms import (
    LocalTargets,
    local_targets,
    overwrite_with_gradient,
    softmax_terms,
    wide,
)


@runtime_checkable
class Loss(Protocol):
    """Interface of a loss for `parallelize`: any object with methods `total` and `weight`."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss of one micro-batch, 0-d, differentiable in `output`."""

    def weight(self, targets: Any) -> Tensor:
        """Return the divisor of the summed loss, 0-d, additive over micro-batches, e.g. the token count."""


@runtime_checkable
class PiecewiseLoss(Loss, Protocol):
    """A loss that also accepts logits partitioned by class, without gathering them."""

    def total_of_pieces(self, logits: Tensor, targets: Any, vocabulary: Vocabulary) -> Tensor:
        """Return `total` of the full logits, given only this rank's classes: `[..., len(vocabulary.own)]`.

        `targets` are whole on every rank. May overwrite the logits. Where a subclass overrides `total` alone,
        this is not called: the logits are gathered.
        """


@runtime_checkable
class SequenceLoss(Loss, Protocol):
    """Protocol of a loss over whole sequences that reduces the context-parallel ranks' parts itself.

    `total` is called within `running`; of the ranks of `cp` the first returns the loss and the others 0, each
    with the gradient of its part. `weight` is of a part, as of other losses.
    """

    adds_over_cp: Literal[True]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits `[..., classes]` and class numbers `[...]`, without targets of `ignore_index`.

    `label_smoothing` is the share of each target that is spread evenly over all classes. `z_loss` times the
    square of log Σ exp(logits) is added for each counted target; it keeps that logarithm near zero
    (Chowdhery et al. 2022, PaLM, section 5).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy summed over all targets not ignored, 0-d, in at least float32."""
        rows = output.reshape(-1, output.shape[-1])
        logits = rows if rows.dtype == torch.float64 else rows.float()
        numbers = targets.reshape(-1)
        total = functional.cross_entropy(
            logits,
            numbers,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        if self.z_loss:
            squares = logits.logsumexp(-1).square()
            total = total + self.z_loss * squares.where(numbers != self.ignore_index, 0).sum()
        return total

    def total_of_pieces(self, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return `total` of the full logits, 0-d, equal on all ranks, from this rank's shard by class.

        `targets`, a class number for each row of logits, is whole on every rank. Where a gradient is wanted,
        float32 and float64 logits are overwritten, by the exponentials and in the backward by the gradient,
        so nothing of their size is allocated. Without a gradient, and for 16-bit logits, which are copied to
        float32, the logits stay as they are.
        Communication: two all-reduces over the group, of 1 and then 2 (with label smoothing 3) numbers a row.
        DataError for targets that are no classes; on CUDA, which is not synchronised, loss and gradient are
        nan.
        """
        return token_losses_of_pieces(logits, targets, vocabulary, self).sum()

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of targets that are not `ignore_index`, 0-d."""
        return (targets != self.ignore_index).sum()


def token_losses_of_pieces(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, terms: CrossEntropy
) -> Tensor:
    """Return the cross-entropy of each target, `[n]`, 0 where it is ignored; see `total_of_pieces`."""
    found = local_targets(targets, logits.shape, vocabulary, terms.ignore_index)
    values = wide(logits)
    if values is logits and not (torch.is_grad_enabled() and logits.requires_grad):
        values = logits.clone()
    rows = values.reshape(targets.numel(), values.shape[-1]).contiguous()
    losses: Tensor = _TokenLosses.apply(rows, found, vocabulary, terms)  # type: ignore[no-untyped-call]
    return losses


cross_entropy = CrossEntropy()
"""Cross-entropy over the last dim, mean over all targets of the global batch but those of -100."""


def loss_of_pieces(loss: Loss, vocabulary: Vocabulary) -> Loss:
    """Return `loss` as a loss whose `total` takes this rank's shard of the logits, partitioned by class.

    Uses `total_of_pieces` where the loss has it, else gathers the logits. Communication: then one all-gather
    of the logits over the group. `total` raises ModelError if the output is not such a piece.
    """
    return _LossOfPieces(loss, vocabulary, _takes_pieces(loss))


def _takes_pieces(loss: Loss) -> bool:
    """Return whether `total_of_pieces` of `loss` can be used: not if a subclass overrides only `total`."""
    if not isinstance(loss, PiecewiseLoss):
        return False
    classes = (vars(kind) for kind in type(loss).__mro__)
    first = next((members for members in classes if {"total", "total_of_pieces"} & members.keys()), None)
    return first is None or "total_of_pieces" in first


@dataclass(frozen=True)
class _LossOfPieces:
    loss: Loss
    vocabulary: Vocabulary
    by_pieces: bool

    def total(self, output: Any, targets: Any) -> Tensor:
        piece, vocabulary = self.vocabulary.require_piece(output), self.vocabulary
        if self.by_pieces:
            assert isinstance(self.loss, PiecewiseLoss)
            return self.loss.total_of_pieces(piece, targets, vocabulary)
        return self.loss.total(gather(piece, vocabulary.group, -1, vocabulary.classes), targets)

    def weight(self, targets: Any) -> Tensor:
        return self.loss.weight(targets)


class _TokenLosses(torch.autograd.Function):
    """Autograd function of the loss of each row of class-partitioned logits `[n, len(own)]`; overwrites them.

    The formulas are those of `plait.tensor.softmax_terms`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, found: LocalTargets, vocabulary: Vocabulary, terms: CrossEntropy
    ) -> Tensor:
        # The same memory and version counter, so that autograd notices the write to saved logits.
        piece = logits.detach()
        losses, factor = softmax_terms(piece, found, vocabulary, terms.label_smoothing, terms.z_loss)
        ctx.save_for_backward(piece, factor)
        ctx.found, ctx.classes, ctx.terms, ctx.ran = found, vocabulary.classes, terms, False
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # Gradients are enabled inside a backward only under create_graph.
        if ctx.ran or torch.is_grad_enabled():
            raise ModelError(
                "the vocabulary-parallel cross-entropy met a second backward, or one with create_graph: its "
                "gradient overwrites the logits, so call backward once, without either."
            )
        ctx.ran = True
        piece, factor = ctx.saved_tensors
        overwrite_with_gradient(piece, factor, ctx.found, ctx.classes, ctx.terms.label_smoothing, gradient)
        return piece, None, None, None
