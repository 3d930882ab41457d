"""Outputs of a layer with attention after common mistakes with the window and documents.

The reference run computes these, since a rank of the candidate has neither all heads nor all positions. Of
each output a weighted sum over the features is kept, one number a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from plait.tensor.layer_values import Value, map_tensors, tensors_of
from plait.verification.definitions.functions import Definitions
from plait.verification.location import RecordKey, Records, RecordScope

KIND = "mistaken"
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
    """Return the sums of a layer's first output after each mistake; the layer has run on `given` just now.

    `number`: of the layer. `others`: the document ids of other micro-batches, by their names in a sentence.
    """
    records: Records = {}
    for sentence, mistaken in list(_mistakes(definitions, others)):
        with torch.no_grad(), mistaken():
            output = next(tensors_of(run(map_tensors(torch.clone, given))), None)
        if output is not None and output.is_floating_point() and output.dim() > 2:
            records[RecordKey(KIND, number, sentence)] = summed(output)
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
        whole = "" if name.startswith("each") else "the documents of "
        yield (
            f"it is what the layer gives for {whole}{name}",
            partial(definitions.mistaken, mask=theirs, positions=theirs),
        )
        yield (
            f"its attention mask is that for {whole}{name}",
            partial(definitions.mistaken, mask=theirs),
        )
        yield (
            f"its positions (rotary angles) are those for {whole}{name}",
            partial(definitions.mistaken, positions=theirs),
        )


def other_documents(ids: Mapping[RecordScope, Tensor], scope: RecordScope) -> dict[str, Tensor]:
    """Return document ids that a micro-batch may have by mistake: of the one before, or of the last step."""
    others = {}
    last = ids.get(scope._replace(microbatch=scope.microbatch - 1))
    if last is not None:
        others[f"micro-batch {scope.microbatch - 1}"] = last
    for (step, microbatch, evaluated), one in ids.items():
        if step == scope.step - 1 and not evaluated:
            others[f"micro-batch {microbatch} of the step before"] = one
    return others


def summed(output: Tensor) -> Tensor:
    """Return a weighted sum over the last dim of `[rows, length, …, features]`, as `[…, 1]`, float64."""
    weights = weights_for(output.shape[-1], output.device)
    return (output.detach().double() @ weights).unsqueeze(-1)


def weights_for(features: int, device: torch.device) -> Tensor:
    """Return unequal weights between 0.5 and 1.5."""
    numbers = torch.arange(1, features + 1, dtype=torch.float64, device=device)
    return (numbers * 0.6180339887498949) % 1 + 0.5


def fitting_mistakes(
    actual: Tensor, allowed: float, sums: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `actual` after the sentence of each mistake whose sums are those of `actual`.

    `allowed`: the largest difference of an element that rounding explains.
    """
    if actual.dim() < 3 or not actual.is_floating_point():
        return
    found, slack = summed(actual), 1.5 * allowed * actual.shape[-1]
    for sentence, expected in sums:
        if found.shape == expected.shape and bool(((found - expected.to(found)).abs() <= slack).all()):
            yield sentence, actual
