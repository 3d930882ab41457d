"""Losses as a sum and the weight that divides it; the cross-entropy of logits partitioned over `tp`.

Every layout has the same mean only if the divisor belongs to the global batch. So a loss returns a sum over
the targets of a micro-batch, and their weight; plait sums both over micro-batches and ranks, and divides
once.

With a rank's part `x` of a row of logits, the largest logit `m` of the whole row, and `s = x - m`:

    all-reduce 1   m                                                    max over the ranks
    all-reduce 2   Σ exp(s),  s[target],  Σ s (for label smoothing)     sums over the ranks, packed
    loss           log Σ exp(s) - (1 - ε) s[target] - ε/C Σ s + z lse²      with lse = m + log Σ exp(s)
    gradient       (1 + 2 z lse) exp(s) / Σ exp(s) - (1 - ε) [target] - ε/C

The partition is that of Shoeybi et al. 2019 (Megatron-LM, section 3); ε over C is label smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import ConfigError, DataError, ModelError
from plait.plan.argument_checks import require_number
from plait.ranks.accelerator import is_accelerator
from plait.ranks.collectives import all_reduce
from plait.tensor.autograd.paired_collectives import gather
from plait.tensor.parallel.partition import Vocabulary

WIDE = (torch.float32, torch.float64)
"""Dtypes in which the terms are computed; logits of others are converted to float32."""


def wide(logits: Tensor) -> Tensor:
    """Return `logits` in float32, or in float64 if they are; a copy only if the dtype changes."""
    return logits if logits.dtype in WIDE else logits.float()


@dataclass(frozen=True)
class LocalTargets:
    """Of `n` target classes, which ones this rank has logits of, and in which column."""

    ignored: Tensor
    """bool `[n]`: `ignore_index`."""
    unknown: Tensor | None
    """bool `[n]`: neither a class nor ignored; None where the targets were looked at, and there are none."""
    elsewhere: Tensor | None
    """bool `[n]`: ignored, or a class of another rank; None where this rank has all classes."""
    columns: Tensor
    """int64 `[n, 1]`: the column in this rank's part, 0 for targets that are elsewhere; `[n, 0]` for an empty
    part."""

    def rows(self, chunk: slice) -> LocalTargets:
        """Return the targets of a chunk of the rows, as views."""
        unknown = None if self.unknown is None else self.unknown[chunk]
        elsewhere = None if self.elsewhere is None else self.elsewhere[chunk]
        return LocalTargets(self.ignored[chunk], unknown, elsewhere, self.columns[chunk])

    def pick(self, part: Tensor) -> Tensor:
        """Return each row's element of `part` in its target's column, `[n]`; 0 where another rank has it.

        `part` is `[n, len(own)]`. 0 also for an ignored target, where another rank may have classes.
        """
        found = part.gather(1, self.columns)
        if self.elsewhere is None:
            return found.squeeze(1)
        return found.masked_fill(self.elsewhere[:, None], 0).sum(1)

    def subtract(self, part: Tensor, amounts: Tensor) -> None:
        """Subtract in place each row's amount, 0 if ignored, from its element of `part` at its target."""
        # Not scatter_add_, which is not deterministic on CUDA; each row has at most one element here.
        if self.elsewhere is not None:
            amounts = amounts.masked_fill(self.elsewhere, 0)
        part.scatter_(1, self.columns, part.gather(1, self.columns).sub_(amounts[:, None]))


def require_target_of_each_row(targets: Tensor, shape: torch.Size) -> None:
    """Raise DataError unless there is a class number for each row of logits of `shape`, `[..., classes]`."""
    if targets.numel() != shape[:-1].numel() or targets.is_floating_point():
        dtype = str(targets.dtype).removeprefix("torch.")
        raise DataError(
            f"the targets are {dtype}{list(targets.shape)} and the logits {list(shape)}: "
            "give one class number for each row of logits."
        )


def local_targets(
    targets: Tensor, shape: torch.Size, vocabulary: Vocabulary, ignore_index: int
) -> LocalTargets:
    """Return which targets are among this rank's classes, and their columns in the rank's logits.

    `shape`: of the logits, `[..., classes]`. Raises DataError for targets of a wrong shape, and (not on an
    accelerator) for numbers that are no class.
    """
    require_target_of_each_row(targets, shape)
    own = vocabulary.own
    flat = targets.reshape(-1).long()
    ignored = flat == ignore_index
    numbers, unknown = flat.masked_fill(ignored, own.start), None
    if is_accelerator(flat) or flat.is_meta:
        unknown = (numbers < 0) | (numbers >= vocabulary.classes)
    else:
        _require_classes(numbers, vocabulary.classes, ignore_index)
    if vocabulary.group.size == 1:
        return LocalTargets(ignored, unknown, None, numbers[:, None])
    elsewhere = ignored | (numbers < own.start) | (numbers >= own.stop)
    columns = (numbers - own.start).masked_fill_(elsewhere, 0)[:, None]
    return LocalTargets(ignored, unknown, elsewhere, columns[:, : len(own)])


@contextmanager
def naming_unknown_targets(numbers: Tensor, classes: int, ignore_index: int) -> Iterator[None]:
    """Context: where torch meets a target that is no class, raise DataError with its number.

    It raises IndexError on a CPU; on an accelerator, which is not asked, the next synchronisation fails.
    """
    try:
        yield
    except IndexError:
        _require_classes(numbers.masked_fill(numbers == ignore_index, 0), classes, ignore_index)
        raise


def _require_classes(numbers: Tensor, classes: int, ignore_index: int) -> None:
    """Raise DataError unless all `numbers` are from 0 to below `classes`. The host reads them."""
    for found in map(int, numbers.aminmax() if len(numbers) else ()):
        if not 0 <= found < classes:
            raise DataError(
                f"the target {found} is no class: give numbers from 0 to {classes - 1}, or {ignore_index} "
                "for targets to ignore."
            )


def softmax_terms(
    part: Tensor, found: LocalTargets, vocabulary: Vocabulary, terms: CrossEntropy
) -> tuple[Tensor, Tensor]:
    """Overwrite logits with exponentials; return rows' cross-entropy and softmax-gradient factor, `[n]`.

    `part` `[n, len(own)]` gets exp(s). Both results are 0 for ignored targets. Communication: the two
    all-reduces above.
    """
    smoothing, z_loss = terms.label_smoothing, terms.z_loss
    largest = part.amax(1) if len(vocabulary.own) else part.new_full(part.shape[:1], -torch.inf)
    all_reduce(largest, vocabulary.group, "max", checked=False).wait()
    part.sub_(largest[:, None])
    sums = [found.pick(part), *([part.sum(1)] if smoothing else [])]
    sums.insert(0, part.exp_().sum(1))
    if vocabulary.group.size > 1:
        packed = torch.stack(sums)
        all_reduce(packed, vocabulary.group, checked=False).wait()
        sums = list(packed.unbind())
    normalizer, at_target, *whole = sums
    if found.unknown is not None:
        normalizer.masked_fill_(found.unknown, torch.nan)
    log_normalizer = normalizer.log()
    losses = log_normalizer.sub(at_target, alpha=1 - smoothing)
    if smoothing:
        losses.sub_(whole[0], alpha=smoothing / vocabulary.classes)
    factor = normalizer.reciprocal()
    if z_loss:
        log_sum = largest + log_normalizer
        losses.add_(log_sum.square(), alpha=z_loss)
        factor.mul_(1 + 2 * z_loss * log_sum)
    return losses.masked_fill_(found.ignored, 0), factor.masked_fill_(found.ignored, 0)


def overwrite_with_gradient(
    part: Tensor, factor: Tensor, found: LocalTargets, classes: int, smoothing: float, scale: Tensor
) -> None:
    """Overwrite `part`, the exponentials of `softmax_terms`, with the loss's gradient by the logits.

    Times `scale`, 0-d or `[n]`: one for all rows, or one each.
    """
    scales = scale * ~found.ignored
    part.mul_((scales * factor)[:, None])
    found.subtract(part, scales * (1 - smoothing) if smoothing else scales)
    if smoothing:
        part.sub_((scales * (smoothing / classes))[:, None])


def overwrite_logits(
    part: Tensor, found: LocalTargets, vocabulary: Vocabulary, terms: CrossEntropy, scale: Tensor
) -> Tensor:
    """Overwrite logits with the gradient of their cross-entropy times `scale`, 0-d; return the summed loss.

    `part` `[n, len(own)]` is in float32 or float64. Communication: as `softmax_terms`.
    """
    losses, factor = softmax_terms(part, found, vocabulary, terms)
    overwrite_with_gradient(
        part, factor, found, vocabulary.classes, terms.label_smoothing, scale.to(part.dtype)
    )
    return losses.sum()


@runtime_checkable
class Loss(Protocol):
    """Interface of a loss for `parallelize`: any object with methods `total` and `weight`."""

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss of one micro-batch, 0-d, differentiable in `output`."""

    def weight(self, targets: Any) -> Tensor:
        """Return the divisor of the summed loss, 0-d, additive over micro-batches, e.g. the token count."""


@runtime_checkable
class PiecewiseLoss(Loss, Protocol):
    """A loss that can also be computed from logits partitioned by class over `tp`, without a gather."""

    def total_of_pieces(self, logits: Tensor, targets: Any, vocabulary: Vocabulary) -> Tensor:
        """Return the summed loss from this rank's classes of the logits alone, which it may overwrite.

        `logits` are `[..., len(own)]`; `targets` are whole on every rank. Where a subclass overrides `total`
        alone, this is not called: the logits are gathered.
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
    """Cross-entropy of logits `[..., classes]` and class numbers `[...]`, leaving out `ignore_index`.

    `label_smoothing` is the share of each target that is spread evenly over all classes. `z_loss` times the
    square of log Σ exp(logits) is added for each counted target; it keeps that logarithm near zero
    (Chowdhery et al. 2022, PaLM, section 5).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError unless `label_smoothing` is from 0 to 1, and `z_loss` at least 0."""
        require_number("CrossEntropy's label_smoothing", self.label_smoothing)
        require_number("CrossEntropy's z_loss", self.z_loss)
        if self.label_smoothing > 1:
            raise ConfigError(
                f"CrossEntropy's label_smoothing is {self.label_smoothing!r}: give a number from 0 to 1."
            )

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy summed over all targets not ignored, 0-d, in at least float32.

        Raises ModelError unless the output is a tensor, DataError for targets that are not one number for
        each row of logits, and (on a CPU) for one that is no class.
        """
        if not isinstance(output, Tensor):
            raise ModelError(
                f"the cross-entropy was given a {type(output).__name__}, but takes a tensor of logits "
                "[..., classes]: let the last layer return one, as those of a model of transformers do after "
                "plait.models.from_huggingface(model)."
            )
        require_target_of_each_row(targets, output.shape)
        logits, numbers = wide(output.reshape(-1, output.shape[-1])), targets.reshape(-1).long()
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        with naming_unknown_targets(numbers, logits.shape[1], self.ignore_index):
            total = functional.cross_entropy(logits, numbers, **options, reduction="sum")  # type: ignore[arg-type]
        if self.z_loss:
            squares = logits.logsumexp(-1).square()
            total = total + self.z_loss * squares.where(numbers != self.ignore_index, 0).sum()
        return total

    def total_of_pieces(self, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return the summed loss from this rank's classes of the logits, which it may overwrite.

        The result is 0-d, equal on all ranks. `targets`, a class number for each row of logits, is whole on
        every rank. Where a gradient is wanted, float32 and float64 logits are overwritten, by the
        exponentials and in the backward by the gradient, so nothing of their size is allocated. Without a
        gradient, and for 16-bit logits, which are copied to float32, the logits stay as they are.
        Communication: two all-reduces over the group, of 1 and then 2 (with label smoothing 3) numbers a row.
        DataError for targets that are no classes; on CUDA, which is not synchronised, loss and gradient are
        nan.
        """
        return token_losses_over_vocabulary(logits, targets, vocabulary, self).sum()

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of targets that are not `ignore_index`, 0-d."""
        return (targets.long() != self.ignore_index).sum()  # as uint8 it would be taken modulo 256


def token_losses_over_vocabulary(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, terms: CrossEntropy
) -> Tensor:
    """Return targets' cross-entropy `[n]`, 0 if ignored, from this rank's `logits`; may overwrite them."""
    found = local_targets(targets, logits.shape, vocabulary, terms.ignore_index)
    values = wide(logits)
    if values is logits and not (torch.is_grad_enabled() and logits.requires_grad):
        values = logits.clone()
    rows = values.reshape(targets.numel(), values.shape[-1]).contiguous()
    losses: Tensor = _TokenLosses.apply(rows, found, vocabulary, terms)  # type: ignore[no-untyped-call]
    return losses


cross_entropy = CrossEntropy()
"""Cross-entropy over the last dim, mean over all targets of the global batch but those of -100."""


@dataclass(frozen=True)
class LossOverVocabulary:
    """Adapts a loss so that its `total` takes this rank's part of the logits, partitioned by class.

    Uses `total_of_pieces` where the loss has it, else gathers the logits. Communication: then one all-gather
    of the logits over the group. `total` raises ModelError if the output is not such a part.
    """

    loss: Loss
    vocabulary: Vocabulary

    def total(self, output: Any, targets: Any) -> Tensor:
        """Return the summed loss, 0-d, from this rank's classes of the logits, which it may overwrite."""
        part, vocabulary = self.vocabulary.require_vocabulary_shard(output), self.vocabulary
        if self._takes_shards:
            assert isinstance(self.loss, PiecewiseLoss)
            return self.loss.total_of_pieces(part, targets, vocabulary)
        return self.loss.total(gather(part, vocabulary.group, -1, vocabulary.classes), targets)

    def weight(self, targets: Any) -> Tensor:
        """Return the divisor of the summed loss, 0-d."""
        return self.loss.weight(targets)

    @cached_property
    def _takes_shards(self) -> bool:
        """Whether `total_of_pieces` of the loss can be used: not if a subclass overrides only `total`."""
        if not isinstance(self.loss, PiecewiseLoss):
            return False
        classes = (vars(kind) for kind in type(self.loss).__mro__)
        first = next((members for members in classes if {"total", "total_of_pieces"} & members.keys()), None)
        return first is None or "total_of_pieces" in first


class _TokenLosses(torch.autograd.Function):
    """Autograd function of the loss of each row of partitioned logits `[n, len(own)]`; overwrites them."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, found: LocalTargets, vocabulary: Vocabulary, terms: CrossEntropy
    ) -> Tensor:
        # The same memory and version counter, so that autograd notices the write to saved logits.
        part = logits.detach()
        losses, factor = softmax_terms(part, found, vocabulary, terms)
        ctx.save_for_backward(part, factor)
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
        part, factor = ctx.saved_tensors
        overwrite_with_gradient(part, factor, ctx.found, ctx.classes, ctx.terms.label_smoothing, gradient)
        return part, None, None, None
