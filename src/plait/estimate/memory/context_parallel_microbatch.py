"""The part of a micro-batch that a rank of `cp` holds, on meta, and the results that its layers share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from plait.engine.local_batch import DOCUMENT_IDS, cut, local_inputs
from plait.estimate.memory.operation_recorder import OperationRecorder, group_on_meta
from plait.plan.plan import Plan
from plait.tensor.attention.key_exchange_plan import ExchangePlan
from plait.tensor.attention.ulysses import MethodChoice
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.running_sequence import ContextParallelism, LocalSequence


@dataclass(frozen=True)
class ContextShare:
    """A context-parallel rank's part of a micro-batch: inputs, targets, and which positions they are."""

    inputs: Value
    targets: Value | None
    sequence: LocalSequence | None
    """None where sequences are whole and each is one document."""
    uncut: int
    """Bytes of the micro-batch's tensors that are not part of `inputs` and `targets`: those are copies."""

    def uncut_beside(self, classes: Value) -> int:
        """Return the bytes of whole inputs and targets that a rank keeps beside its part of the sequence.

        `classes`: the parts of targets, where `targets` are not known.
        """
        if self.targets is not None or self.sequence is None or self.sequence.group.size == 1:
            return self.uncut
        parts = sum(tensor.nbytes for tensor in tensors_of(classes))
        return self.uncut + parts * self.sequence.layout.length // self.sequence.size

    def new_sequence(self) -> LocalSequence | None:
        """Return a copy of `sequence` without the results that layers have computed and share."""
        known = self.sequence
        return None if known is None else LocalSequence(known.parallelism, known.layout, known.documents)


def context_share(
    plan: Plan, microbatch: Value, targets: Value | None, recorder: OperationRecorder | None = None
) -> ContextShare:
    """Return the part of a micro-batch on the rank of `cp` that holds the last position of the sequence.

    With a causal mask that rank sees most keys of other ranks; no rank has more than a few positions more.
    `recorder` records collectives over `cp`. Raises DataError where the tensors cannot be cut.
    """
    local = local_inputs([microbatch], _parallelism(plan, 0, recorder))
    sequence = local.sequences[0]
    if sequence is not None and sequence.group.size > 1:
        last = sequence.layout.length - 1
        held = (any(last in one for one in ranges) for ranges in sequence.layout.ranges)
        local = local_inputs([microbatch], _parallelism(plan, list(held).index(True), recorder))
        sequence = local.sequences[0]
    inputs, kept = local.values[0], None if targets is None else cut(targets, sequence, "targets")
    given, held_here = _storages((microbatch, targets)), _storages((inputs, kept))
    uncut = sum(nbytes for key, nbytes in given.items() if key not in held_here)
    return ContextShare(inputs, kept, sequence, uncut)


def as_input_batch(batch: Value, precision: torch.dtype | None) -> Value:
    """Return empty tensors on meta with a batch's shapes; floating-point ones have dtype `precision`.

    Ids of packed documents keep their values; where they are on the meta device, each row is one document.
    """
    value = map_tensors(lambda tensor: as_input(tensor, precision), batch)
    ids = batch.get(DOCUMENT_IDS) if isinstance(batch, dict) else None
    if isinstance(ids, Tensor):
        value[DOCUMENT_IDS] = torch.zeros(ids.shape, dtype=ids.dtype) if ids.is_meta else ids
    return value


def as_input(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    """Return an empty tensor like `tensor` on the meta device, in dtype `precision` if floating-point."""
    dtype = precision if tensor.is_floating_point() else None
    return torch.empty_like(tensor, dtype=dtype, device="meta")


def result_bytes(sequence: LocalSequence | None) -> Mapping[Hashable, int]:
    """Return by key the bytes of the results that layers cache and share for one micro-batch only."""
    if sequence is None:
        return {}
    lasting = lasting_bytes(sequence)
    return {key: _bytes(result) for key, result in _results(sequence) if key not in lasting}


def lasting_bytes(sequence: LocalSequence | None) -> Mapping[Hashable, int]:
    """Return by key the bytes of the results that layers cache and share for all micro-batches."""
    if sequence is None:
        return {}
    plans = (result for result in _results(sequence) if isinstance(result[1], ExchangePlan))
    return {key: _bytes(plan) for key, plan in plans}


def method_choices(sequence: LocalSequence | None) -> Iterator[MethodChoice]:
    """Yield the methods, ring or Ulysses (all-to-all), by which attention runs for a micro-batch."""
    if sequence is not None:
        yield from (one for one in sequence.results.values() if isinstance(one, MethodChoice))


def _parallelism(plan: Plan, index: int, recorder: OperationRecorder | None) -> ContextParallelism:
    return ContextParallelism.of(plan, group_on_meta("cp", plan.cp, index, recorder))


def _storages(value: Value) -> dict[int, int]:
    """Return the bytes of the tensors of a value, by the identity of their storage."""
    return {id(one.untyped_storage()): one.nbytes for one in tensors_of(value)}


def _bytes(result: Any) -> int:
    """Return the bytes of the tensors in a shared result; tensors with one memory count once."""
    storages = {id(storage): storage for storage in (one.untyped_storage() for one in _tensors(result))}
    return sum(storage.nbytes() for storage in storages.values())


def _results(sequence: LocalSequence) -> Iterator[tuple[Hashable, Any]]:
    """Yield keys and results of a sequence, and of the sequences among them."""
    for key, result in sequence.results.items():
        if isinstance(result, LocalSequence):
            yield from (((key, inner), one) for inner, one in _results(result))
        else:
            yield key, result


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for one in result:
            yield from _tensors(one)
    elif is_dataclass(result):
        yield from _tensors(tuple(getattr(result, field.name) for field in fields(result)))
