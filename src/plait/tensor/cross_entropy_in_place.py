"""The cross-entropy of whole logits whose gradient is written over them, in the pass that computes the loss.

    logits    ──▶   exp(s)   ──▶   gradient        in the same memory: nothing else of this size is allocated

`functional.cross_entropy` allocates log-probabilities, their gradient and that of the logits, each as large
as the logits, and writes them once. Logits in 16 bits are converted to float32 some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.tensor.losses import (
    CrossEntropy,
    LossOverVocabulary,
    local_targets,
    overwrite_logits,
    token_losses_over_vocabulary,
    wide,
)
from plait.tensor.parallel.partition import Vocabulary

CHUNK_BYTES = 1 << 26
"""Of 16-bit logits that are converted to float32 at once, in float32; more hide the host's time on a GPU."""


@dataclass(frozen=True)
class CrossEntropyInPlace:
    """A `CrossEntropy` of the logits of a model's last layer, which nothing else reads."""

    loss: CrossEntropy
    vocabulary: Vocabulary | None
    """How the classes are partitioned; None where this rank has all of them."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss of one micro-batch, 0-d; without a gradient the logits stay as they are.

        Communication and errors as `gradient`.
        """
        if self.vocabulary is not None:
            return LossOverVocabulary(self.loss, self.vocabulary).total(output, targets)
        vocabulary = Vocabulary.of_one_rank(output.shape[-1])
        return token_losses_over_vocabulary(output, targets, vocabulary, self.loss).sum()

    @torch.no_grad()
    def gradient(self, output: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss, and its gradient by the logits times `scale`, 0-d, in their memory.

        `output`: the logits `[..., classes]` of this rank. Logits that are not contiguous are copied.
        Communication where classes are partitioned: the two all-reduces of `softmax_terms`. Raises DataError
        as `local_targets`, ModelError where the last dim has not the size of this rank's classes.
        """
        vocabulary = self.vocabulary or Vocabulary.of_one_rank(output.shape[-1])
        logits = vocabulary.require_vocabulary_shard(output)
        found = local_targets(targets, logits.shape, vocabulary, self.loss.ignore_index)
        rows = logits.detach().reshape(-1, logits.shape[-1]).contiguous()
        losses = []
        for start in range(0, max(len(rows), 1), step := self._rows_at_once(rows)):
            chunk = slice(start, start + step)
            part = wide(rows[chunk])
            losses.append(overwrite_logits(part, found.rows(chunk), vocabulary, self.loss, scale))
            if part.dtype != rows.dtype:
                rows[chunk] = part
        return torch.stack(losses).sum(), rows.view(output.shape)

    def _rows_at_once(self, rows: Tensor) -> int:
        """Return how many rows are computed at once: all, if nothing is copied, or each has an all-reduce."""
        if self.vocabulary is not None or wide(rows[:0]).dtype == rows.dtype:
            return max(len(rows), 1)
        return max(CHUNK_BYTES // (torch.float32.itemsize * max(rows.shape[1], 1)), 1)
