"""The terms of a cross-entropy of logits whose classes are partitioned over `tp`, and their gradient.

With a rank's piece `x` of a row of logits, the largest logit `m` of the whole row, and `s = x - m`:

    all-reduce 1   m                                                    max over the ranks
    all-reduce 2   Σ exp(s),  s[target],  Σ s (for label smoothing)     sums over the ranks, packed
    loss           log Σ exp(s) - (1 - ε) s[target] - ε/C Σ s + z lse²      with lse = m + log Σ exp(s)
    gradient       (1 + 2 z lse) exp(s) / Σ exp(s) - (1 - ε) [target] - ε/C

The partition is that of Shoeybi et al. 2019 (Megatron-LM, section 3); ε over C is label smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import DataError
from plait.ranks.collectives import all_reduce
from plait.ranks.device import is_accelerator
from plait.tensor.parallel.vocabulary_partition import Vocabulary

WIDE = (torch.float32, torch.float64)
"""Dtypes in which the terms are computed; logits of others are converted to float32."""


def wide(logits: Tensor) -> Tensor:
    """Return `logits` in float32 or float64: themselves, or a copy."""
    return logits if logits.dtype in WIDE else logits.float()


@dataclass(frozen=True)
class LocalTargets:
    """For each of `n` rows, whether its target is one of this rank's classes, and in which column."""

    counted: Tensor
    """bool `[n]`: not `ignore_index`."""
    known: Tensor
    """bool `[n]`: a class, or ignored."""
    here: Tensor
    """bool `[n]`: counted, and one of this rank's classes."""
    columns: Tensor
    """int64 `[n, 1]`: the column in this rank's piece, 0 for targets that are not here; `[n, 0]` for an
    empty piece."""

    def rows(self, chunk: slice) -> LocalTargets:
        """Return the targets of a chunk of the rows, as views."""
        return LocalTargets(self.counted[chunk], self.known[chunk], self.here[chunk], self.columns[chunk])

    def pick(self, piece: Tensor) -> Tensor:
        """Return each row's element of `piece` at its target's column, `[n]`.

        0 where the target belongs to another rank or is ignored. `piece` is `[n, len(own)]`.
        """
        return piece.gather(1, self.columns).masked_fill(~self.here[:, None], 0).sum(1)

    def subtract(self, piece: Tensor, amounts: Tensor) -> None:
        """Subtract each row's amount from its element of `piece` at its target's column, in place."""
        # Not scatter_add_, which is not deterministic on CUDA; each row has at most one element here.
        amounts = amounts.where(self.here, 0)[:, None]
        piece.scatter_(1, self.columns, piece.gather(1, self.columns) - amounts)


def local_targets(
    targets: Tensor, shape: torch.Size, vocabulary: Vocabulary, ignore_index: int
) -> LocalTargets:
    """Return which targets are among this rank's classes, and their columns in the rank's logits.

    `shape`: of the logits, `[..., classes]`. Raises DataError for targets of a wrong shape, and (not on an
    accelerator) for numbers that are no class.
    """
    if targets.numel() != shape[:-1].numel() or targets.is_floating_point():
        dtype = str(targets.dtype).removeprefix("torch.")
        raise DataError(
            f"the targets are {dtype}{list(targets.shape)} and the logits {list(shape)}: "
            "give one class number for each row of logits."
        )
    flat, own = targets.reshape(-1).long(), vocabulary.own
    counted = flat != ignore_index
    known = ((flat >= 0) & (flat < vocabulary.classes)) | ~counted
    if not is_accelerator(flat) and not known.all():
        raise DataError(
            f"the target {int(flat[~known][0])} is no class: give numbers from 0 to "
            f"{vocabulary.classes - 1}, or {ignore_index} for targets to ignore."
        )
    here = counted & (flat >= own.start) & (flat < own.stop)
    columns = (flat - own.start).where(here, 0)[:, None]
    return LocalTargets(counted, known, here, columns[:, : len(own)])


def softmax_terms(
    piece: Tensor, found: LocalTargets, vocabulary: Vocabulary, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return each row's loss, 0 where it does not count, and the factor of exp(s) in its gradient: `[n]`.

    Overwrites `piece` `[n, len(own)]` with exp(s). Communication: the two all-reduces above.
    """
    largest = piece.amax(1) if len(vocabulary.own) else piece.new_full(piece.shape[:1], -torch.inf)
    all_reduce(largest, vocabulary.group, "max", checked=False).wait()
    piece.sub_(largest[:, None])
    sums = [found.pick(piece), *([piece.sum(1)] if smoothing else [])]
    packed = torch.stack([piece.exp_().sum(1), *sums])
    all_reduce(packed, vocabulary.group, checked=False).wait()
    normalizer, at_target, *whole = packed.unbind()
    normalizer.masked_fill_(~found.known, torch.nan)
    log_normalizer = normalizer.log()
    losses = log_normalizer - (1 - smoothing) * at_target
    if smoothing:
        losses.sub_(whole[0], alpha=smoothing / vocabulary.classes)
    factor = normalizer.reciprocal()
    if z_loss:
        log_sum = largest + log_normalizer
        losses.add_(log_sum.square(), alpha=z_loss)
        factor.mul_(1 + 2 * z_loss * log_sum)
    return losses.where(found.counted, 0), factor


def overwrite_with_gradient(
    piece: Tensor, factor: Tensor, found: LocalTargets, classes: int, smoothing: float, scale: Tensor
) -> None:
    """Overwrite exp(s), of `softmax_terms`, with each row's gradient times `scale`, 0-d or `[n]`."""
    scales = scale.where(found.counted, 0)
    piece.mul_((scales * factor)[:, None])
    found.subtract(piece, scales * (1 - smoothing))
    if smoothing:
        piece.sub_((scales * (smoothing / classes))[:, None])
