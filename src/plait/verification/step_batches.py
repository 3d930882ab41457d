"""The global batch of each step of a verification: the given one, then copies with other rows and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from plait.tensor.microbatches import Microbatches, split
from plait.tensor.nested_values import Value, list_of_tensors, map_tensors, tensors_of
from plait.verification.reference.reference_run import Batch


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
