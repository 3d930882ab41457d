"""This rank's part of a batch: micro-batches, and under context parallelism its positions of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.autograd.running_sequence import ContextParallelism, DocumentBounds, LocalSequence
from plait.comm.collectives import all_gather
from plait.context_attention.visibility import document_bounds
from plait.errors import DataError
from plait.layers.nested import Value, map_tensors, tensors_of

DOCUMENT_IDS = "document_ids"
"""The key of packed sequences' document ids, `[rows, length]`, in a batch that is a dictionary."""


@dataclass(frozen=True)
class LocalInputs:
    """The inputs of a rank's micro-batches: its positions only, without document ids."""

    values: Sequence[Value]
    sequences: Sequence[LocalSequence | None]
    """Of each micro-batch; None where sequences are whole and each is one document."""


def local_inputs(batch: Sequence[Value], parallelism: ContextParallelism) -> LocalInputs:
    """Return this rank's part of the micro-batches of `batch`; dim 1 of all tensors is the sequence.

    Raises DataError for tensors that have no such dim, or another length.
    """
    values, sequences = [], []
    for given in batch:
        value, ids = _without_documents(given)
        sequence = None
        if parallelism.group.size > 1 or ids is not None:
            bounds = None if ids is None else DocumentBounds(*document_bounds(ids.cpu()))
            sequence = parallelism.sequence(_length(value), bounds)
        if ids is not None and sequence is not None and ids.shape[1] != sequence.layout.length:
            raise DataError(
                f"the batch's {DOCUMENT_IDS} are {list(ids.shape)}, but its sequences have "
                f"{sequence.layout.length} positions: give one id for each position."
            )
        values.append(cut(value, sequence, "inputs"))
        sequences.append(sequence)
    return LocalInputs(values, sequences)


def cut(value: Value, sequence: LocalSequence | None, what: str) -> Value:
    """Return the tensors of `value` at this rank's positions, along dim 1."""
    if sequence is None or sequence.group.size == 1:
        return value

    def at_positions(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != sequence.layout.length:
            raise DataError(
                f"the {what} have a tensor of shape {list(tensor.shape)}, but sequences of "
                f"{sequence.layout.length} positions are divided over plan.cp = {sequence.group.size} ranks: "
                "give tensors whose dim 1 is the sequence, or set plan.cp to 1."
            )
        return sequence.layout.cut(tensor, sequence.group.index)

    return map_tensors(at_positions, value)


def joined(value: Value, sequence: LocalSequence | None) -> Value:
    """Return the whole sequences of which the ranks of `cp` hold parts along dim 1: inverse of `cut`.

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


def _without_documents(value: Value) -> tuple[Value, Tensor | None]:
    """Return a micro-batch without its document ids, and the ids; a single other entry stands for itself."""
    if not isinstance(value, dict) or DOCUMENT_IDS not in value:
        return value, None
    rest = {key: one for key, one in value.items() if key != DOCUMENT_IDS}
    ids = value[DOCUMENT_IDS]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not rest:
        raise DataError(
            f"the batch's {DOCUMENT_IDS} are {type(ids).__name__}: give whole numbers [rows, length] beside "
            "the inputs."
        )
    return (next(iter(rest.values())) if len(rest) == 1 else rest), ids


def _length(value: Value) -> int:
    shapes = [tensor.shape for tensor in tensors_of(value) if tensor.dim() >= 2]
    if not shapes:
        raise DataError("the inputs have no tensor with rows and positions: give tensors of at least 2 dims.")
    return shapes[0][1]
