"""What is verified, and how each mode prepares it: the values, the data, the loss, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plait.layers.nested import Value, split, tensors_of
from plait.rules import Rules
from plait.tensor.losses import Loss
from plait.verification.integer_mode import (
    IntegerMode,
    WeightedSum,
    integer_batch,
    integer_buffer,
    integer_parameter,
)
from plait.verification.options import VerifyOptions
from plait.verification.reference_run import Batch
from plait.verification.start_values import ValueChange, moved, unchanged, with_values


@dataclass(frozen=True)
class Case:
    """A model on global batches, one for each step."""

    model: nn.Module | Callable[[], nn.Module]
    """Or what builds it, for one that cannot be sent to the ranks."""
    loss: Loss
    batches: Sequence[Batch]
    options: VerifyOptions
    rules: Rules | None = None
    device: str | None = None
    timeout: float = 600.0

    def build(self) -> nn.Module:
        """The model; one that is built draws its values from the options's seed."""
        if isinstance(self.model, nn.Module) or not callable(self.model):
            return self.model  # what is no module is refused where its layers are asked for
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.options.seed)
            return self.model()

    def rules_of(self, model: nn.Module) -> Rules | None:
        """What cuts the model that was built."""
        return getattr(model, "rules", None) if self.rules is None else self.rules


@dataclass(frozen=True)
class PreparedCase:
    """A case as its mode prepares it, for both sides."""

    model: nn.Module
    change: ValueChange
    """What is done to the model's initial values before the first step."""
    loss: Loss
    batches: Sequence[Batch]
    options: VerifyOptions
    rules: Rules | None


@contextmanager
def prepared(case: Case) -> Iterator[PreparedCase]:
    """The case as its mode runs it; both sides run while this is entered."""
    model, options = case.build(), case.options
    seed = options.seed
    for inputs, targets in case.batches:
        rows_of(inputs)
        if options.mode != "exact":  # that has a loss of its own
            split(targets, 1, "targets")
    rules = case.rules_of(model)
    if options.mode != "exact":
        yield PreparedCase(model, moved(seed), case.loss, case.batches, options, rules)
        return
    inputs, _ = case.batches[0]
    batch = integer_batch(inputs, rows_of(inputs))
    start = with_values(model, seed, integer_parameter(seed), integer_buffer)
    plain = replace(options, clip=None, weight_decay=0.0, optimizer=descent)
    with IntegerMode():
        yield PreparedCase(start, unchanged, WeightedSum(), [batch], plain, rules)


def rows_of(inputs: Value) -> int:
    """How many rows a batch has. DataError or PlanError where its tensors have none, or do not agree."""
    split(inputs, 1, "inputs")
    return next(tensors_of(inputs)).shape[0]


def descent(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Whole numbers minus whole numbers."""
    return torch.optim.SGD(groups, lr=1.0)
