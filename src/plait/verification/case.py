"""The model, data and options to verify, and the changes that each mode makes before either run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from plait.models.layers.model_validation import refuse_lost_settings
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.mesh import Mesh
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import Router
from plait.tensor.losses import Loss
from plait.tensor.microbatches import split
from plait.verification.options import VerifyOptions
from plait.verification.reference.integer_mode import (
    IntegerMode,
    WeightedSum,
    integer_batch,
    integer_buffer,
    integer_parameter,
)
from plait.verification.reference.reference_run import Batch
from plait.verification.reference.start_values import ValueChange, add_offsets, unchanged, with_values
from plait.verification.step_batches import rows_of


@dataclass(frozen=True)
class Case:
    """Input of a verification: a model, its loss, a global batch for each step, and options."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it in each rank, for a model that cannot be pickled."""
    loss: Loss
    batches: Sequence[Batch]
    options: VerifyOptions
    rules: Rules | None = None
    device: str = "auto"
    timeout: float = 600.0
    ranks_as: Literal["processes", "threads"] = "processes"
    ranks_per_gpu: int = 1
    change: ValueChange = unchanged
    """Applied to each initial value before the first step."""

    def build(self) -> nn.Module:
        """Return the model; if `model` is a function, seed torch with `options.seed` and call it."""
        if isinstance(self.model, nn.Module) or not callable(self.model):
            return self.model  # `sequence_of` refuses what is not a module
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.options.seed)
            return self.model()

    def mesh(self, plan: Plan) -> Mesh:
        """Return a mesh of `plan` on the device of the case, with its timeout."""
        return Mesh(plan, device=None if self.device == "auto" else self.device, timeout=self.timeout)

    def rules_of(self, model: nn.Module) -> Rules | None:
        """Return the tensor-parallel rules given in the case, or else those in `model.rules`, if any."""
        return getattr(model, "rules", None) if self.rules is None else self.rules


@contextmanager
def prepared(case: Case) -> Iterator[Case]:
    """Context: yield the case with its model built; in mode exact, with integer values and operations.

    Both runs take place within this context, because mode exact replaces operations of torch.
    """
    model, options = case.build(), case.options
    seed = options.seed
    for inputs, targets in case.batches:
        rows_of(inputs)
        if options.mode != "exact":  # which replaces the targets
            split(targets, 1, "targets")
    case = replace(case, model=model, rules=case.rules_of(model))
    if options.mode != "exact":
        yield replace(case, change=add_offsets(seed))
        return
    refuse_lost_settings(model, case.loss)  # of the model itself, since the copy has lost them
    inputs, _ = case.batches[0]
    batch = integer_batch(inputs, rows_of(inputs))
    start = with_values(model, seed, integer_parameter(seed), integer_buffer)
    for router in start.modules():
        if isinstance(router, Router):
            router.balance = Balance()  # whose losses are means, and its rate of correction no whole number
    whole_steps = partial(torch.optim.SGD, lr=1.0)  # which keeps integer parameters integer
    plain = replace(options, clip=None, weight_decay=0.0, optimizer=whole_steps)
    with IntegerMode():
        yield replace(case, model=start, loss=WeightedSum(), batches=[batch], options=plain)
