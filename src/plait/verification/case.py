"""The model, data and options to verify, and the changes that each mode makes before either run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from plait.models.layers.model_validation import refuse_lost_settings
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.mesh import Mesh
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import Router
from plait.tensor.layer_values import Microbatches, Value, list_of_tensors, map_tensors, split, tensors_of
from plait.tensor.losses import Loss
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


def rows_of(inputs: Value) -> int:
    """Return the number of rows of a batch. Raises DataError if its tensors differ in it, PlanError for 0."""
    split(inputs, 1, "inputs")
    return next(tensors_of(inputs)).shape[0]


def batches_of_steps(inputs: Value, targets: Value, steps: int, microbatches: int) -> list[Batch]:
    """Return a global batch for each step: the given one, then copies with rows rolled (`torch.roll`).

    If each step had the same batch, nobody could see that a rank took that of an earlier step. Rows keep
    their targets. They are rolled so that, if possible, each of the `microbatches` has other inputs and
    other targets than in the step before. Where all rows are alike, positions are rolled within them.
    """
    given = (inputs, targets)
    roll = next(_rolls(given, microbatches), None)
    batches = [given]
    while len(batches) < steps:
        batches.append(given if roll is None else map_tensors(roll, batches[-1]))
    return batches


def _rolls(batch: Batch, microbatches: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield functions that shift the rows of a batch, those that change the most micro-batches first."""
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in list_of_tensors(batch)}
    if len(rows) != 1 or any(isinstance(one, Microbatches) for one in batch):
        return  # the batch cannot be cut, which the verification says
    (count,) = rows
    each = max(1, count // microbatches)
    shifts = dict.fromkeys(shift for shift in (each + 1, each, *range(1, count)) if 0 < shift < count)
    rolls = [partial(torch.roll, shifts=shift, dims=0) for shift in shifts]
    changed = {roll: _changed_parts(batch, roll, each) for roll in rolls}
    yield from sorted(filter(changed.get, rolls), key=lambda roll: -changed[roll])  # of equals the first
    if _are_sequences(batch) and _changed_parts(batch, _positions_rolled, each):
        yield _positions_rolled


def _changed_parts(batch: Batch, roll: Callable[[Tensor], Tensor], each: int) -> int:
    """Return in how many micro-batches of `each` rows a roll changes inputs, and targets, added up."""
    parts = 0
    for value in batch:
        pairs = [(tensor, roll(tensor)) for tensor in list_of_tensors(value)]
        rows = [(one != other).reshape(len(one), -1).any(1) for one, other in pairs if one.numel()]
        if rows:
            is_other = torch.stack(rows).any(0)
            parts += sum(bool(part.any()) for part in torch.split(is_other, each))
    return parts


def _positions_rolled(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 1) if tensor.dim() > 1 else tensor


def _are_sequences(batch: Batch) -> bool:
    """Return whether all tensors are numbers `[rows, length]` of one length: tokens, targets, documents."""
    tensors = list_of_tensors(batch)
    return len({tuple(tensor.shape) for tensor in tensors}) == 1 and all(
        tensor.dim() == 2 and tensor.dtype is not torch.bool for tensor in tensors
    )
