"""Tensor values that common mistakes would produce, each with a sentence that names the mistake.

For mistakes with the window and the documents of attention the reference run computes outputs, since a rank
of the candidate has neither all heads nor all positions. Of each output a weighted sum over the features is
kept, one number a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from plait.tensor.losses import Loss
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.verification.definitions.attention_and_dropout import Definitions
from plait.verification.definitions.float8 import EightBits
from plait.verification.reference.differences_within_layers import unequal_weights
from plait.verification.step_location import RecordKey, Records, RecordScope

NamedTensors = Iterator[tuple[str, Tensor]]
SAME_TIMES = 1e-6
"""Largest difference of a fitted factor from 0 that is taken for 0."""


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


def with_other_router_losses(expected: Tensor, of_losses: Tensor, actual: Tensor) -> NamedTensors:
    """Yield a gradient with the summand of routers' losses scaled by the factor that fits best."""
    own, square = of_losses.double(), float(of_losses.double().square().sum())
    if not square or actual.shape != expected.shape:
        return
    times = 1 + float(((actual.double() - expected.double()) * own).sum()) / square
    text = "are not in it" if abs(times) < SAME_TIMES else f"count {times:.4g} times in it"
    yield f"the losses of the layer's router {text}", expected + ((times - 1) * own).to(expected)


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
        text = f"it is a mean: divided by its weight, {float(weight):g}, which the engine does itself"
        yield text, total / weight
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


def with_other_scales(actual: Tensor, expected: Tensor, how: EightBits) -> NamedTensors:
    """Yield the scales of an operand that is cast as `how` says, after common mistakes."""
    for name, dtype in {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.items():
        if dtype != how.dtype:
            ratio = torch.finfo(how.dtype).max / torch.finfo(dtype).max
            yield f"it is that of {name}, in which it is not cast", expected * ratio
    yield "it is the factor of the cast in place of its reciprocal", expected.reciprocal()
    yield "it counts twice", expected.square()
    if how.power_of_two:
        yield "it is rounded up to a power of two, not down", expected / 2
    if how.power_of_two and bool((actual.log2() != actual.log2().round()).any()):
        yield "it is not rounded to a power of two", actual


MISTAKEN = "mistaken"
"""The kind of the recorded sums; their name is the sentence on the mistake."""

Mistake = tuple[str, Callable[[], AbstractContextManager[None]]]
"""A sentence, and the context in which the definitions make the mistake."""


def sums_after_mistakes(
    definitions: Definitions,
    run: Callable[[Value], Value],
    given: Value,
    number: int,
    others: Mapping[str, Tensor],
) -> Records:
    """Return sums over features of a layer's output, as computed with each of several mistakes.

    `number`: of the layer. `others`: the document ids of other micro-batches, by their names in a sentence.
    """
    records: Records = {}
    for sentence, mistaken in list(_mistakes(definitions, others)):
        with torch.no_grad(), mistaken():
            output = next(tensors_of(run(map_tensors(torch.clone, given))), None)
        if output is not None and output.is_floating_point() and output.dim() > 2:
            records[RecordKey(MISTAKEN, number, sentence)] = summed(output)
    return records


def _mistakes(definitions: Definitions, others: Mapping[str, Tensor]) -> Iterator[Mistake]:
    for window in sorted(definitions.windows):
        for other in (window + 1, window - 1):
            sentence = f"it is what the layer gives with a window of {other} instead of {window}"
            yield sentence, partial(definitions.mistaken, windows={window: other})
    ids = definitions.ids
    if ids is None:
        return
    for name, theirs in (*others.items(), ("each row as one document", torch.zeros_like(ids))):
        if theirs.shape != ids.shape or torch.equal(theirs, ids):
            continue
        of, wrong = name if name.startswith("each") else f"the documents of {name}", definitions.mistaken
        yield f"it is what the layer gives for {of}", partial(wrong, mask=theirs, positions=theirs)
        yield f"its attention mask is that for {of}", partial(wrong, mask=theirs)
        yield f"its positions (rotary angles) are those for {of}", partial(wrong, positions=theirs)


def other_documents(ids: Mapping[RecordScope, Tensor], scope: RecordScope) -> dict[str, Tensor]:
    """Return document ids after a mistake: of the previous micro-batch, or of the last step."""
    others = {}
    last = ids.get(scope._replace(microbatch=scope.microbatch - 1))
    if last is not None:
        others[f"micro-batch {scope.microbatch - 1}"] = last
    for (step, microbatch, evaluated), one in ids.items():
        if step == scope.step - 1 and not evaluated:
            others[f"micro-batch {microbatch} of the step before"] = one
    return others


def summed(output: Tensor) -> Tensor:
    """Return a weighted sum of `output` over its last dim, float64, by which mistakes are recognised."""
    return (output.detach().double() @ unequal_weights(output.shape[-1], output.device)).unsqueeze(-1)


def fitting_mistakes(
    actual: Tensor, allowed: float, sums: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the sentence on each mistake whose recorded sums equal those of `actual`, and `actual` itself.

    `allowed`: the largest difference of an element that rounding explains.
    """
    if actual.dim() < 3 or not actual.is_floating_point():
        return
    found, slack = summed(actual), 1.5 * allowed * actual.shape[-1]
    for sentence, expected in sums:
        if found.shape == expected.shape and bool(((found - expected.to(found)).abs() <= slack).all()):
            yield sentence, actual
