"""This rank's part of a batch: micro-batches, and under context parallelism its positions of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from plait.engine.fingerprint import fingerprint_of_tokens
from plait.errors import DataError
from plait.plan.argument_checks import require_instance
from plait.plan.layout.sequence_layout import SequenceLayout, sequence_layout
from plait.plan.plan import Plan
from plait.ranks.collectives import all_gather
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.microbatches import Microbatches
from plait.tensor.nested_values import Value, map_tensors, signature, tensors_of
from plait.tensor.running_sequence import ContextParallelism, LocalSequence

DOCUMENT_IDS = "document_ids"
"""The key of packed sequences' document ids, `[rows, length]`, in a batch that is a dictionary."""


@dataclass(frozen=True)
class LocalInputs:
    """A rank's inputs of each micro-batch, without document ids; under `cp` its positions only."""

    values: Sequence[Value]
    sequences: Sequence[LocalSequence | None]
    """Of each micro-batch; None where sequences are whole and each is one document."""


@dataclass(frozen=True, eq=False)
class SequencePart:
    """A batch of which a data loader has kept only one `cp` rank's positions; made by `sequence_part`."""

    value: Value
    """Without the other ranks' positions; document ids are whole."""
    layout: SequenceLayout
    """Of the whole sequences."""
    index: int
    """That of the rank along `cp`."""
    whole: str
    """The structure and shapes of the whole batch, and a hash of its document ids."""


def sequence_part(batch: Value, plan: Plan, index: int) -> SequencePart:
    """Return the part of `batch` that the rank with `index` along `cp` holds, to be given to its engine.

    For data loaders; an engine cuts whole batches by itself. Inputs and targets are both given as parts.
    Dim 1 of all tensors is the sequence. Raises DataError for tensors that have no such dim, or another
    length, for `Microbatches`, and for an index that no rank has.
    """
    if isinstance(batch, Microbatches):
        raise DataError(
            "plait.sequence_part was given Microbatches, each of which may have its own length: give the "
            "engine whole Microbatches, or make parts of a batch whose dim 0 can be cut."
        )
    require_instance("the plan", plan, Plan, "give a plait.Plan", DataError)
    if not isinstance(index, Integral) or not 0 <= int(index) < plan.cp:
        raise DataError(
            f"plait.sequence_part was given the index {index!r}, where plan.cp is {plan.cp}: give "
            'mesh.index("cp").'
        )
    value, ids = _without_documents(batch)
    layout = sequence_layout(_length(value), plan.cp, plan.context_layout)
    mine = map_tensors(lambda tensor: _at_positions(tensor, layout, index, "batch"), value)
    described = f"{signature(batch)}, document ids {fingerprint_of_tokens(ids)}"
    return SequencePart(
        mine if ids is None else {"inputs": mine, DOCUMENT_IDS: ids}, layout, index, described
    )


def without_part(
    parallelism: ContextParallelism, *given: Value
) -> tuple[list[Value], int | None, str | None]:
    """Unwrap `SequencePart`s: return their local values, and length and description of the whole batch.

    The description is the same on every rank of `cp`. Raises DataError where only some values are parts, and
    for parts of another rank or layout.
    """
    parts = [one for one in given if isinstance(one, SequencePart)]
    if not parts:
        return list(given), None, None
    if len(parts) < len(given) or len({one.layout.length for one in parts}) > 1:
        raise DataError(
            "the inputs and the targets are parts of sequences of unlike lengths, or only one of them is a "
            "SequencePart: give both as parts, or both whole."
        )
    group, length = parallelism.group, parts[0].layout.length
    expected = sequence_layout(length, group.size, parallelism.kind), group.index
    for one in parts:
        if (one.layout, one.index) != expected:
            raise DataError(
                f"a SequencePart is that of index {one.index} along cp of {one.layout.ranks} ranks, where "
                f"this rank has index {group.index} of {group.size}, or is not of its context_layout "
                f"{parallelism.kind!r}: make parts by plait.sequence_part(batch, plan, "
                'mesh.index("cp")), with the plan of the engine.'
            )
    return [one.value for one in parts], length, "; ".join(one.whole for one in parts)


def local_inputs(
    batch: Sequence[Value], parallelism: ContextParallelism, length: int | None = None
) -> LocalInputs:
    """Return this rank's part of the micro-batches of `batch`; dim 1 of all tensors is the sequence.

    `length`: that of the whole sequences, of which `batch` has this rank's positions only. Raises DataError
    for tensors that have no such dim, or another length.
    """
    values, sequences = [], []
    for given in batch:
        value, ids = _without_documents(given)
        sequence = None
        if parallelism.group.size > 1 or ids is not None:
            bounds = None if ids is None else document_bounds(ids.cpu())
            sequence = parallelism.sequence(length or _length(value), bounds)
        if ids is not None and sequence is not None and ids.shape[1] != sequence.layout.length:
            raise DataError(
                f"the batch's {DOCUMENT_IDS} are {list(ids.shape)}, but its sequences have "
                f"{sequence.layout.length} positions: give one id for each position."
            )
        values.append(cut(value, sequence, "inputs", length))
        sequences.append(sequence)
    return LocalInputs(values, sequences)


def cut(value: Value, sequence: LocalSequence | None, what: str, length: int | None = None) -> Value:
    """Return the tensors of `value` at this rank's positions along dim 1.

    With `length`, that of the whole sequences, a data loader has cut `value` already: it is checked, and
    returned as it is. Raises DataError for tensors of another size in dim 1.
    """
    if sequence is None or sequence.group.size == 1:
        return value
    layout, index = sequence.layout, sequence.group.index
    if length is None:
        return map_tensors(lambda tensor: _at_positions(tensor, layout, index, what), value)
    for tensor in tensors_of(value):
        if tensor.shape[1:2] != (sequence.size,):
            raise DataError(
                f"the {what} have a tensor of shape {list(tensor.shape)}, where this rank has "
                f"{sequence.size} of {length} positions: make the part by plait.sequence_part, for this "
                "rank's index along cp."
            )
    return value


def _at_positions(tensor: Tensor, layout: SequenceLayout, index: int, what: str) -> Tensor:
    """Return the elements of a tensor at a rank's positions along dim 1."""
    if tensor.dim() < 2 or tensor.shape[1] != layout.length:
        raise DataError(
            f"the {what} have a tensor of shape {list(tensor.shape)}, but sequences of {layout.length} "
            f"positions are divided over plan.cp = {layout.ranks} ranks: give tensors whose dim 1 is the "
            "sequence, or set plan.cp to 1."
        )
    return layout.cut(tensor, index)


def joined(value: Value, sequence: LocalSequence | None) -> Value:
    """Return whole sequences, all-gathered over `cp` from the ranks' parts (along dim 1): inverse of `cut`.

    Communication: one all-gather of each tensor over `cp`, padded to the longest part.
    """
    if sequence is None or sequence.group.size == 1:
        return value
    sizes = [sequence.layout.size(rank) for rank in range(sequence.group.size)]

    def whole(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != sequence.size:
            raise DataError(
                f"the model gives a tensor of shape {list(tensor.shape)}, whose dim 1 is not the sequence: "
                "its parts on the ranks of cp cannot be joined."
            )
        padded = tensor.new_zeros(tensor.shape[0], max(sizes), *tensor.shape[2:])
        padded[:, : sequence.size] = tensor
        every = all_gather(padded, sequence.group, checked=False).about("the output").wait()
        parts = zip(every.chunk(sequence.group.size), sizes, strict=True)
        return sequence.layout.join([part[:, :size] for part, size in parts])

    return map_tensors(whole, value)


def map_inputs(convert: Callable[[Tensor], Tensor], value: Value) -> Value:
    """Return inputs with `convert` applied to all tensors but document ids."""
    if not isinstance(value, dict) or DOCUMENT_IDS not in value:
        return map_tensors(convert, value)
    return {key: one if key == DOCUMENT_IDS else map_tensors(convert, one) for key, one in value.items()}


def _without_documents(value: Value) -> tuple[Value, Tensor | None]:
    """Return a micro-batch without its document ids, and the ids; a single other entry stands for itself."""
    if not isinstance(value, dict) or DOCUMENT_IDS not in value:
        return value, None
    rest = {key: one for key, one in value.items() if key != DOCUMENT_IDS}
    ids = value[DOCUMENT_IDS]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DataError(f"the batch's {DOCUMENT_IDS} are {found}: give whole numbers [rows, length].")
    if not rest:
        raise DataError(f"the batch has {DOCUMENT_IDS} only: give the inputs beside them.")
    return (next(iter(rest.values())) if len(rest) == 1 else rest), ids


def _length(value: Value) -> int:
    shapes = [tensor.shape for tensor in tensors_of(value) if tensor.dim() >= 2]
    if not shapes:
        raise DataError("the inputs have no tensor with rows and positions: give tensors of at least 2 dims.")
    return shapes[0][1]
