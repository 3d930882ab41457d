"""The cross-entropy of a model's last logits whose gradient is written over them, as the loss is computed.

    logits  ──▶  log-probabilities  ──▶  probabilities  ──▶  gradient       all in the memory of the logits

`functional.cross_entropy` allocates log-probabilities, their gradient and that of the logits, each as large
as the logits, and writes them once. Logits in 16 bits are converted to float32 some rows at a time. With
label smoothing, z-loss or partitioned classes the formulas of `plait.tensor.losses` take torch's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from plait.plan.decoder_sizes import LOSS_CHUNK_BYTES
from plait.tensor.losses import (
    CrossEntropy,
    LossOverVocabulary,
    local_targets,
    naming_unknown_targets,
    overwrite_logits,
    require_target_of_each_row,
    wide,
)
from plait.tensor.parallel.partition import Vocabulary

Overwrite: TypeAlias = Callable[[Tensor, slice], Tensor]
"""Overwrites the logits of a chunk of rows by their gradient, and returns the chunk's summed loss."""


@dataclass(frozen=True)
class CrossEntropyInPlace:
    """A `CrossEntropy` whose gradient overwrites the logits of the model's last layer."""

    loss: CrossEntropy
    vocabulary: Vocabulary | None
    """How the classes are partitioned; None where this rank has all of them."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss of one micro-batch, 0-d; without a gradient the logits stay as they are.

        Communication and errors as `gradient`.
        """
        if self.vocabulary is None:
            return self.loss.total(output, targets)
        return LossOverVocabulary(self.loss, self.vocabulary).total(output, targets)

    @torch.no_grad()
    def gradient(self, output: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss and its gradient by the logits times `scale`, written over `output`.

        `output`: the logits `[..., classes]` of this rank. Logits that are not contiguous are copied.
        Communication where classes are partitioned: the two all-reduces of `softmax_terms`. Raises DataError
        where there is not a class number for each row, and (on a CPU) for a number that is no class;
        ModelError where the last dim has not the size of this rank's classes.
        """
        logits = output if self.vocabulary is None else self.vocabulary.require_vocabulary_shard(output)
        require_target_of_each_row(targets, logits.shape)
        rows = logits.detach().reshape(-1, logits.shape[-1]).contiguous()
        overwrite, losses = self._overwrite(logits.shape, targets, scale), []
        for start in range(0, max(len(rows), 1), step := self.rows_at_once(rows)):
            chunk = slice(start, start + step)
            part = wide(rows[chunk])
            losses.append(overwrite(part, chunk))
            if part.dtype != rows.dtype:
                rows[chunk] = part
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return total, rows.view(output.shape)

    def _overwrite(self, shape: torch.Size, targets: Tensor, scale: Tensor) -> Overwrite:
        """Return a function that overwrites a chunk, by few operations of torch where these suffice."""
        terms = self.loss
        if self.vocabulary is None and not terms.label_smoothing and not terms.z_loss:
            numbers = targets.reshape(-1).long()
            return lambda part, chunk: _overwrite_whole(part, numbers[chunk], terms.ignore_index, scale)
        vocabulary = self.vocabulary or Vocabulary.of_one_rank(shape[-1])
        found = local_targets(targets, shape, vocabulary, terms.ignore_index)
        return lambda part, chunk: overwrite_logits(part, found.rows(chunk), vocabulary, terms, scale)

    def rows_at_once(self, rows: Tensor) -> int:
        """Return the rows per chunk: all `rows`, unless logits of all classes are copied in a wider dtype."""
        if self.vocabulary is not None or wide(rows[:0]).dtype == rows.dtype:
            return max(len(rows), 1)
        return max(LOSS_CHUNK_BYTES // (torch.float32.itemsize * max(rows.shape[1], 1)), 1)


def _overwrite_whole(part: Tensor, numbers: Tensor, ignore_index: int, scale: Tensor) -> Tensor:
    """Overwrite logits `[n, classes]` with the gradient of their cross-entropy; return the summed loss.

    Both have the bits of torch's, but for the rounding of the gradient's products.
    """
    torch.log_softmax(part, 1, out=part)  # reads a row before, and each element as, it writes them
    with naming_unknown_targets(numbers, part.shape[1], ignore_index):
        total = functional.nll_loss(part, numbers, ignore_index=ignore_index, reduction="sum")
    counted = numbers != ignore_index
    part.exp_().scatter_(1, (numbers * counted)[:, None], -1.0, reduce="add")  # one element a row: no order
    part.mul_((counted * scale.to(part.dtype))[:, None])
    return total
