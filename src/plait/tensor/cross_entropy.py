"""Cross-entropy of logits that are cut by class, so that no rank ever holds a whole row of them.

With the rank's piece `x` of a row, the largest logit `m` of the whole row, and `s = x - m`:

    sent first     m                                                    max over the ranks
    sent then      Σ exp(s),  s[target],  Σ s (for label smoothing)     sums over the ranks, packed
    loss           log Σ exp(s) - (1 - ε) s[target] - ε/C Σ s + z lse²      with lse = m + log Σ exp(s)
    gradient       (1 + 2 z lse) exp(s) / Σ exp(s) - (1 - ε) [target] - ε/C

The cut is that of Shoeybi et al. 2019 (Megatron-LM, section 3); ε over C classes is label smoothing, z the
z-loss of Chowdhery et al. 2022 (PaLM, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce
from plait.errors import DataError, ModelError
from plait.tensor.vocabulary import Vocabulary

WIDE = (torch.float32, torch.float64)
"""Dtypes in which the loss is computed; logits of others are computed in float32."""


@dataclass(frozen=True)
class Terms:
    """What is added up: see `plait.tensor.losses.CrossEntropy`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def total_of_pieces(logits: Tensor, targets: Tensor, vocabulary: Vocabulary, terms: Terms) -> Tensor:
    """The summed cross-entropy of this rank's `logits` `[..., len(own)]`, 0-d, the same bits on every rank.

    `targets`, a class number for each row of logits, is whole on every rank. Where a gradient is wanted, the
    logits are *spent*: their memory becomes that of the exponentials, and in the backward that of the
    gradient, so nothing of their size is allocated. That is for float32 and float64; 16-bit logits are
    copied to float32 and left alone, as all are when there is no gradient to make.
    Communication: two all-reduces over the group, of 1 and then 2 (with label smoothing 3) numbers a row.
    DataError for targets that are no classes; on CUDA, where looking would wait, loss and gradient are nan.
    """
    hits = _find(targets, logits, vocabulary, terms.ignore_index)
    wide = logits if logits.dtype in WIDE else logits.float()
    if wide is logits and not (torch.is_grad_enabled() and logits.requires_grad):
        wide = logits.clone()
    rows = wide.reshape(targets.numel(), wide.shape[-1]).contiguous()
    total: Tensor = _CrossEntropy.apply(rows, hits, vocabulary, terms)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True)
class _Hits:
    """Where the targets of `n` rows are among this rank's classes."""

    counted: Tensor
    """bool `[n]`: not to be ignored."""
    known: Tensor
    """bool `[n]`: a class, or ignored."""
    here: Tensor
    """bool `[n]`: counted, and one of this rank's classes."""
    columns: Tensor
    """int64 `[n, 1]`: which column of this rank's piece, 0 for targets that are not here; `[n, 0]` for an
    empty piece."""

    def pick(self, piece: Tensor) -> Tensor:
        """The targets' elements of `piece` `[n, len(own)]`: `[n]`, 0 where a target is not here."""
        return piece.gather(1, self.columns).masked_fill(~self.here[:, None], 0).sum(1)

    def subtract(self, piece: Tensor, amounts: Tensor) -> None:
        """Take `amounts` `[n]` off the targets' elements of `piece`, in place."""
        # Not scatter_add_, which CUDA has no deterministic form of; here each row has one element at most.
        amounts = amounts.where(self.here, 0)[:, None]
        piece.scatter_(1, self.columns, piece.gather(1, self.columns) - amounts)


def _find(targets: Tensor, logits: Tensor, vocabulary: Vocabulary, ignore_index: int) -> _Hits:
    """Looks the targets up; DataError where they do not fit the logits, or (not on CUDA) are no classes."""
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
            f"{vocabulary.classes - 1}, or {ignore_index} for what is not to be counted."
        )
    here = counted & (flat >= own.start) & (flat < own.stop)
    columns = (flat - own.start).where(here, 0)[:, None]
    return _Hits(counted, known, here, columns[:, : len(own)])


class _CrossEntropy(torch.autograd.Function):
    """The table at the top, for contiguous logits `[n, len(own)]` in float32 or float64, which it spends."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hits: _Hits, vocabulary: Vocabulary, terms: Terms) -> Tensor:
        # The same memory with the same version counter: who saved the logits for a backward is told.
        piece = logits.detach()
        largest = piece.amax(1) if len(vocabulary.own) else piece.new_full(piece.shape[:1], -torch.inf)
        all_reduce(largest, vocabulary.group, "max", checked=False).wait()
        piece.sub_(largest[:, None])
        sums = [hits.pick(piece), *([piece.sum(1)] if terms.label_smoothing else [])]
        packed = torch.stack([piece.exp_().sum(1), *sums])
        all_reduce(packed, vocabulary.group, checked=False).wait()
        normaliser, at_target, *whole = packed.unbind()
        normaliser.masked_fill_(~hits.known, torch.nan)
        log_normaliser = normaliser.log()
        losses = log_normaliser - (1 - terms.label_smoothing) * at_target
        if terms.label_smoothing:
            losses.sub_(whole[0], alpha=terms.label_smoothing / vocabulary.classes)
        factor = normaliser.reciprocal()
        if terms.z_loss:
            log_sum = largest + log_normaliser
            losses.add_(log_sum.square(), alpha=terms.z_loss)
            factor.mul_(1 + 2 * terms.z_loss * log_sum)
        ctx.save_for_backward(piece, factor)
        ctx.hits, ctx.classes, ctx.terms, ctx.spent = hits, vocabulary.classes, terms, False
        return losses.where(hits.counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # Gradients are enabled inside a backward only when it was asked to make a graph of itself.
        if ctx.spent or torch.is_grad_enabled():
            raise ModelError(
                "the vocabulary-parallel cross-entropy met a second backward, or one with create_graph: its "
                "gradient stands in the memory of the logits, so call backward once, without either."
            )
        ctx.spent = True
        piece, factor = ctx.saved_tensors
        hits, smoothing = ctx.hits, ctx.terms.label_smoothing
        scale = gradient.where(hits.counted, 0)
        piece.mul_((scale * factor)[:, None])
        hits.subtract(piece, scale * (1 - smoothing))
        if smoothing:
            piece.sub_((scale * (smoothing / ctx.classes))[:, None])
        return piece, None, None, None
