"""Cross-entropy of logits partitioned by class, without gathering whole rows of logits.

With the rank's piece `x` of a row, the largest logit `m` of the whole row, and `s = x - m`:

    all-reduce 1   m                                                    max over the ranks
    all-reduce 2   Σ exp(s),  s[target],  Σ s (for label smoothing)     sums over the ranks, packed
    loss           log Σ exp(s) - (1 - ε) s[target] - ε/C Σ s + z lse²      with lse = m + log Σ exp(s)
    gradient       (1 + 2 z lse) exp(s) / Σ exp(s) - (1 - ε) [target] - ε/C

The partition is that of Shoeybi et al. 2019 (Megatron-LM, section 3); ε over C classes is label smoothing, z
the z-loss of Chowdhery et al. 2022 (PaLM, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce
from plait.errors import DataError, ModelError
from plait.tensor.vocabulary_partition import Vocabulary

WIDE = (torch.float32, torch.float64)
"""Dtypes in which the loss is computed; logits of others are computed in float32."""


@dataclass(frozen=True)
class Terms:
    """The options of `plait.tensor.losses.CrossEntropy`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def total_of_pieces(logits: Tensor, targets: Tensor, vocabulary: Vocabulary, terms: Terms) -> Tensor:
    """Return the summed cross-entropy of the ranks' `logits` `[..., len(own)]`: 0-d, equal on every rank.

    `targets`, a class number for each row of logits, is whole on every rank. Where a gradient is wanted,
    float32 and float64 logits are overwritten, by the exponentials and in the backward by the gradient, so
    nothing of their size is allocated. Without a gradient, and for 16-bit logits, which are copied to
    float32, the logits stay as they are.
    Communication: two all-reduces over the group, of 1 and then 2 (with label smoothing 3) numbers a row.
    DataError for targets that are no classes; on CUDA, which is not synchronised, loss and gradient are nan.
    """
    found = _local_targets(targets, logits, vocabulary, terms.ignore_index)
    wide = logits if logits.dtype in WIDE else logits.float()
    if wide is logits and not (torch.is_grad_enabled() and logits.requires_grad):
        wide = logits.clone()
    rows = wide.reshape(targets.numel(), wide.shape[-1]).contiguous()
    total: Tensor = _CrossEntropy.apply(rows, found, vocabulary, terms)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True)
class _LocalTargets:
    """The targets of `n` rows that are among this rank's classes."""

    counted: Tensor
    """bool `[n]`: not `ignore_index`."""
    known: Tensor
    """bool `[n]`: a class, or ignored."""
    here: Tensor
    """bool `[n]`: counted, and one of this rank's classes."""
    columns: Tensor
    """int64 `[n, 1]`: the column in this rank's piece, 0 for targets that are not here; `[n, 0]` for an
    empty piece."""

    def pick(self, piece: Tensor) -> Tensor:
        """Return the targets' elements of `piece` `[n, len(own)]`: `[n]`, 0 for targets on other ranks."""
        return piece.gather(1, self.columns).masked_fill(~self.here[:, None], 0).sum(1)

    def subtract(self, piece: Tensor, amounts: Tensor) -> None:
        """Subtract `amounts` `[n]` from the targets' elements of `piece`, in place."""
        # Not scatter_add_, which is not deterministic on CUDA; each row has at most one element here.
        amounts = amounts.where(self.here, 0)[:, None]
        piece.scatter_(1, self.columns, piece.gather(1, self.columns) - amounts)


def _local_targets(
    targets: Tensor, logits: Tensor, vocabulary: Vocabulary, ignore_index: int
) -> _LocalTargets:
    """Find the targets among own classes. Raises DataError for wrong shapes or (not on CUDA) classes."""
    if targets.numel() != logits.shape[:-1].numel() or targets.is_floating_point():
        dtype = str(targets.dtype).removeprefix("torch.")
        raise DataError(
            f"the targets are {dtype}{list(targets.shape)} and the logits {list(logits.shape)}: "
            "give one class number for each row of logits."
        )
    flat, own = targets.reshape(-1).long(), vocabulary.own
    counted = flat != ignore_index
    known = ((flat >= 0) & (flat < vocabulary.classes)) | ~counted
    if not flat.is_cuda and not known.all():
        raise DataError(
            f"the target {int(flat[~known][0])} is no class: give numbers from 0 to "
            f"{vocabulary.classes - 1}, or {ignore_index} for targets to ignore."
        )
    here = counted & (flat >= own.start) & (flat < own.stop)
    columns = (flat - own.start).where(here, 0)[:, None]
    return _LocalTargets(counted, known, here, columns[:, : len(own)])


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of the partitioned cross-entropy; overwrites its contiguous logits `[n, len(own)]`.

    The formulas are in the module's docstring. Logits are float32 or float64.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, found: _LocalTargets, vocabulary: Vocabulary, terms: Terms
    ) -> Tensor:
        # The same memory and version counter, so that autograd notices the write to saved logits.
        piece = logits.detach()
        largest = piece.amax(1) if len(vocabulary.own) else piece.new_full(piece.shape[:1], -torch.inf)
        all_reduce(largest, vocabulary.group, "max", checked=False).wait()
        piece.sub_(largest[:, None])
        sums = [found.pick(piece), *([piece.sum(1)] if terms.label_smoothing else [])]
        packed = torch.stack([piece.exp_().sum(1), *sums])
        all_reduce(packed, vocabulary.group, checked=False).wait()
        normalizer, at_target, *whole = packed.unbind()
        normalizer.masked_fill_(~found.known, torch.nan)
        log_normalizer = normalizer.log()
        losses = log_normalizer - (1 - terms.label_smoothing) * at_target
        if terms.label_smoothing:
            losses.sub_(whole[0], alpha=terms.label_smoothing / vocabulary.classes)
        factor = normalizer.reciprocal()
        if terms.z_loss:
            log_sum = largest + log_normalizer
            losses.add_(log_sum.square(), alpha=terms.z_loss)
            factor.mul_(1 + 2 * terms.z_loss * log_sum)
        ctx.save_for_backward(piece, factor)
        ctx.found, ctx.classes, ctx.terms, ctx.ran = found, vocabulary.classes, terms, False
        return losses.where(found.counted, 0).sum()

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
        found, smoothing = ctx.found, ctx.terms.label_smoothing
        scale = gradient.where(found.counted, 0)
        piece.mul_((scale * factor)[:, None])
        found.subtract(piece, scale * (1 - smoothing))
        if smoothing:
            piece.sub_((scale * (smoothing / ctx.classes))[:, None])
        return piece, None, None, None
