"""Tensor values that common mistakes would produce, each with a sentence that names the mistake."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from plait.tensor.layer_values import Value
from plait.tensor.losses import Loss

NamedTensors = Iterator[tuple[str, Tensor]]


def with_other_parameters(expected: Tensor, parameters: Mapping[str, Tensor], tp: int) -> NamedTensors:
    """Yield a layer's output with its bias or position table left out or added more than once.

    `expected` `[..., features]`; `parameters`, whole, by name. `tp`: on how many ranks each may be added.
    """
    for name, value in parameters.items():
        is_bias = value.dim() == 1 and value.shape[0] == expected.shape[-1]
        is_table = value.dim() == 2 < expected.dim() and value.shape[1] == expected.shape[-1]
        if is_table and value.shape[0] >= expected.shape[-2]:
            value = value[: expected.shape[-2]]
        elif not is_bias:
            continue
        yield f"{name} is not added", expected - value
        yield f"{name} is added twice", expected + value
        if tp > 2:
            yield f"{name} is added {tp} times, once on each rank of tp", expected + (tp - 1) * value


def with_local_positions(
    expected: Tensor, parameters: Mapping[str, Tensor], positions: Tensor
) -> NamedTensors:
    """Yield a layer's output with positions counted from the start of this rank's part of the sequence.

    `expected` `[rows, size, features]`, at `positions` `[size]`; `parameters`, whole, by name.
    """
    for name, table in parameters.items():
        if table.dim() == 2 and table.shape[1] == expected.shape[-1] and len(positions) <= table.shape[0]:
            own = table[: len(positions)] - table[positions.clamp(max=table.shape[0] - 1)]
            text = f"{name} is read at positions 0, 1, 2, … instead of this rank's: take plait.positions"
            yield text, expected + own


def with_another_loss(
    loss: Loss,
    output: Tensor,
    targets: list[Value],
    number: int,
    total: Tensor,
    others: Iterable[tuple[str, Value]] = (),
) -> NamedTensors:
    """Yield the loss of micro-batch `number` with shifted or other targets, and as a mean instead of a sum.

    `targets` are those of each of the rank's micro-batches; `others`: further ones, named. Targets that the
    loss refuses are skipped.
    """
    own = targets[number]
    weight = torch.as_tensor(loss.weight(own)).to(total)
    if float(weight) not in (0.0, 1.0):
        yield (
            f"it is a mean: divided by its weight, {float(weight):g}, which the engine does itself",
            total / weight,
        )
    right = _total_of(loss, output, own)
    for text, other in (*others, *_other_targets(targets, number)):
        value = _total_of(loss, output, other)
        if value is not None and (right is None or not torch.equal(value, right)):
            yield f"it is the loss for {text}", value


def _total_of(loss: Loss, output: Tensor, targets: Value) -> Tensor | None:
    try:
        return loss.total(output.clone(), targets).detach()
    except Exception:  # a user's loss, on targets that it may not support
        return None


def _other_targets(targets: list[Value], number: int) -> Iterator[tuple[str, Value]]:
    own = targets[number]
    if isinstance(own, Tensor) and own.dim() > 1 and not own.is_floating_point():
        for shift, side in ((1, "later"), (-1, "earlier")):
            yield f"targets shifted by one position: each stands one {side}", own.roll(shift, 1)
    for other, theirs in enumerate(targets):
        if other != number:
            yield f"the targets of the rank's micro-batch {other}", theirs
