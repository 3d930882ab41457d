"""Losses as a sum and the weight by which the sum is divided.

Every layout has the same mean only if the divisor belongs to the global batch. So a loss returns a sum over
the targets of a micro-batch, and their weight; plait sums both over micro-batches and ranks, and divides
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from plait.autograd.paired_collectives import gather
from plait.tensor.cross_entropy import Terms, total_of_pieces
from plait.tensor.vocabulary_partition import Vocabulary


@runtime_checkable
class Loss(Protocol):
    """The interface of a loss for `parallelize`: any object with these two methods."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss of one micro-batch, 0-d, differentiable in `output`."""

    def weight(self, targets: Any) -> Tensor:
        """Return the divisor of the sum, 0-d, additive over micro-batches, such as the number of tokens."""


@runtime_checkable
class PiecewiseLoss(Loss, Protocol):
    """A loss that also accepts logits partitioned by class, without gathering them."""

    def total_of_pieces(self, logits: Tensor, targets: Any, vocabulary: Vocabulary) -> Tensor:
        """Return `total` of the whole logits, from the `[..., len(own)]` of each rank of `vocabulary.group`.

        `targets` are whole on every rank. May overwrite the logits. Where a subclass overrides `total` alone,
        this is not called: the logits are gathered.
        """


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
        """Return the sum over all counted targets, 0-d, in at least float32."""
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
        """Return `total` of the whole logits, from the ranks' `[..., len(own)]`.

        Overwrites float32 and float64 logits where a gradient is wanted; see `plait.tensor.cross_entropy`.
        Communication: two all-reduces over the group, of 1 and then 2 (with label smoothing 3) numbers a
        target. Raises DataError for targets that are no classes; on CUDA the loss is then nan.
        """
        terms = Terms(self.ignore_index, self.label_smoothing, self.z_loss)
        return total_of_pieces(logits, targets, vocabulary, terms)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of counted targets, 0-d."""
        return (targets != self.ignore_index).sum()


cross_entropy = CrossEntropy()
"""Cross-entropy over the last dim, mean over all targets of the global batch but those of -100."""


def loss_of_pieces(loss: Loss, vocabulary: Vocabulary) -> Loss:
    """Return `loss` as a loss whose `total` accepts this rank's piece `[..., len(own)]` of the output.

    Uses `total_of_pieces` where the loss has it, else gathers the logits. Communication: then one all-gather
    of the logits over the group. `total` raises ModelError if the output is not such a piece.
    """
    return _LossOfPieces(loss, vocabulary, _takes_pieces(loss))


def _takes_pieces(loss: Loss) -> bool:
    """Return whether `total_of_pieces` matches `total`: a subclass may override only `total`."""
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
