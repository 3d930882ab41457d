"""Global batches and losses of the parity tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from parity.case import ROWS, Batch, mean_cross_entropy
from parity.layers import CLASSES, HIDDEN, VOCAB
from plait.tensor.losses import CrossEntropy

LENGTH = 4


def draw_tokens(rows: int, generator: torch.Generator) -> Batch:
    """Tokens `[rows, LENGTH]` and a class for each."""
    inputs = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    return inputs, torch.randint(CLASSES, (rows, LENGTH), generator=generator)


def draw_vectors(rows: int, generator: torch.Generator) -> Batch:
    """Vectors `[rows, HIDDEN]` and a class for each."""
    inputs = torch.randn(rows, HIDDEN, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def draw_images(rows: int, generator: torch.Generator) -> Batch:
    """Images `[rows, 1, 5, 5]` and a class for each."""
    inputs = torch.randn(rows, 1, 5, 5, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def draw_dictionary(rows: int, generator: torch.Generator) -> Batch:
    """Tokens, segments and importance, and what is no tensor; and classes."""
    tokens, targets = draw_tokens(rows, generator)
    segments = torch.randint(3, (rows, LENGTH), generator=generator)
    importance = torch.rand(rows, LENGTH, generator=generator)
    batch = {"tokens": tokens, "segments": segments, "importance": importance, "factor": 0.5, "note": None}
    return batch, targets


def draw_tuple(rows: int, generator: torch.Generator) -> Batch:
    """The tensors without names."""
    inputs, targets = draw_dictionary(rows, generator)
    return tuple(inputs[name] for name in ("tokens", "segments", "importance")), targets


def draw_ignored(rows: int, generator: torch.Generator) -> Batch:
    """Counts that differ from row to row; nothing counts in the first of several micro-batches."""
    inputs, targets = draw_tokens(rows, generator)
    kept = torch.rand(rows, LENGTH, generator=generator) < torch.linspace(0.1, 1, rows).unsqueeze(1)
    kept[: min(ROWS, rows - 1)] = False
    return inputs, targets.masked_fill(~kept, -100)


def draw_weighted(rows: int, generator: torch.Generator) -> Batch:
    """Vectors to fit, each with a weight of its own."""
    inputs, _ = draw_vectors(rows, generator)
    targets = torch.randn(rows, CLASSES, generator=generator)
    return inputs, {"target": targets, "weight": torch.rand(rows, generator=generator) + 0.1}


def draw_regression(rows: int, generator: torch.Generator) -> Batch:
    """Vectors to fit."""
    inputs, targets = draw_weighted(rows, generator)
    return inputs, targets["target"]


@dataclass(frozen=True)
class Squares:
    """The mean squared error."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())


@dataclass(frozen=True)
class WeightedSquares:
    """Squared errors, each row by its weight, over the sum of the weights."""

    def total(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return ((output - targets["target"]).square().sum(-1) * targets["weight"]).sum()

    def weight(self, targets: dict[str, Tensor]) -> Tensor:
        return targets["weight"].sum()


def mean_weighted_squares(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """The same over the whole batch."""
    weight = targets["weight"] / targets["weight"].sum()
    return ((output - targets["target"]) ** 2).sum(1).dot(weight)


@dataclass(frozen=True)
class NamedCrossEntropy(CrossEntropy):
    """Of an output that is a dictionary."""

    def total(self, output: dict[str, Tensor], targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().total(output["logits"], targets)


def mean_of_named(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return mean_cross_entropy(output["logits"], targets)


def mean_smoothed(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels; those of class 0 do not count."""
    logits, labels = output.flatten(0, -2), targets.flatten()
    return functional.cross_entropy(logits, labels, ignore_index=0, label_smoothing=0.1)


def mean_with_z_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy plus a tenth of the mean square of log Σ exp(logits); targets of class 0 do not count."""
    logits, labels = output.flatten(0, -2), targets.flatten()
    squares = logits.logsumexp(-1).square()[labels != 0]
    return functional.cross_entropy(logits, labels, ignore_index=0) + 0.1 * squares.mean()


class WholeCrossEntropy:
    """A user's own loss, which knows nothing of logits in parts."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())
