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
from plait.verification.exact import (
    WeightedSum,
    WholeNumbers,
    whole_batch,
    whole_buffer,
    whole_parameter,
)
from plait.verification.recipe import Recipe
from plait.verification.reference import Batch
from plait.verification.values import Change, moved, unchanged, with_values


@dataclass(frozen=True)
class Case:
    """A model on global batches, one for each step."""

    model: nn.Module | Callable[[], nn.Module]
    """Or what builds it, for one that cannot be sent to the ranks."""
    loss: Loss
    batches: Sequence[Batch]
    recipe: Recipe
    rules: Rules | None = None
    device: str | None = None
    timeout: float = 600.0

    def build(self) -> nn.Module:
        """The model; one that is built draws its values from the recipe's seed."""
        if isinstance(self.model, nn.Module) or not callable(self.model):
            return self.model  # what is no module is refused where its layers are asked for
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.recipe.seed)
            return self.model()

    def rules_of(self, model: nn.Module) -> Rules | None:
        """What cuts the model that was built."""
        return getattr(model, "rules", None) if self.rules is None else self.rules


@dataclass(frozen=True)
class Ready:
    """A case as its mode prepares it, for both sides."""

    model: nn.Module
    change: Change
    """What is done to the model's initial values before the first step."""
    loss: Loss
    batches: Sequence[Batch]
    recipe: Recipe
    rules: Rules | None


@contextmanager
def prepared(case: Case) -> Iterator[Ready]:
    """The case as its mode runs it; both sides run while this is entered."""
    model, recipe = case.build(), case.recipe
    seed = recipe.seed
    for inputs, targets in case.batches:
        rows_of(inputs)
        if recipe.mode != "exact":  # that has a loss of its own
            split(targets, 1, "targets")
    rules = case.rules_of(model)
    if recipe.mode != "exact":
        yield Ready(model, moved(seed), case.loss, case.batches, recipe, rules)
        return
    inputs, _ = case.batches[0]
    batch = whole_batch(inputs, rows_of(inputs))
    start = with_values(model, seed, whole_parameter(seed), whole_buffer)
    plain = replace(recipe, clip=None, weight_decay=0.0, optimizer=descent)
    with WholeNumbers():
        yield Ready(start, unchanged, WeightedSum(), [batch], plain, rules)


def rows_of(inputs: Value) -> int:
    """How many rows a batch has. DataError or PlanError where its tensors have none, or do not agree."""
    split(inputs, 1, "inputs")
    return next(tensors_of(inputs)).shape[0]


def descent(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Whole numbers minus whole numbers."""
    return torch.optim.SGD(groups, lr=1.0)
