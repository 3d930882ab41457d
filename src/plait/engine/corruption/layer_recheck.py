"""Some runs of layers, drawn at random, are computed again by another data-parallel rank, and compared.

Each rank sends what a run of its layers read and wrote to the next rank along `dp`, which has the same layers
with the same parameters, and runs those of the rank before it. Ranks along `tp` and `cp` do so together.

    F   input                          → output
    I   gradients of the output        → gradients of the input
    W   gradient buffers before        → gradient buffers after

What both ranks compute must have the same bits.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.engine.pipeline.layer_record import GradientSnapshot, LayerRecord
from plait.engine.pipeline.stage import Stage
from plait.engine.runner import Runtime
from plait.engine.sharding.flat_buffer import StageView, allocate_storage, free_storage
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.unit import Unit
from plait.errors import CorruptionError
from plait.ranks.collectives import all_to_all_uneven
from plait.ranks.text_collectives import all_gather_text
from plait.tensor.layer_values import Value, list_of_tensors, signature, with_tensors
from plait.tensor.running_sequence import DocumentBounds


class _Place(NamedTuple):
    """A run of layers of this rank: those of a stage from `first` on that ran together."""

    stage: int
    microbatch: int
    first: int


class LayerRecheck:
    """Draws runs of layers in each step, and lets the next rank along `dp` compute them again."""

    def __init__(self, runtime: Runtime, rate: float) -> None:
        """`rate`: the probability with which a run is drawn."""
        self._runtime, self._mesh, self._rate = runtime, runtime.mesh, rate
        self.rechecked = 0
        """How many runs this rank has computed again."""

    def begin_pass(self) -> None:
        """Draw the runs of this pass, and have them recorded; the same on all ranks of a stage."""
        passes = self._runtime.dropout.step
        drawn = random.Random(f"recheck {passes} {self._mesh.index('pp')}")
        for stage in self._runtime.pipeline.stages.values():
            stage.records = {
                (microbatch, layer): LayerRecord(partial(self._snapshot, stage, layer))
                for microbatch in range(self._runtime.blueprint.plan.microbatches)
                for layer in range(len(stage.layers))
                if drawn.random() < self._rate
            }

    def end_pass(self, gatherer: Gatherer) -> None:
        """Compute the drawn runs of the rank before this one. Raises CorruptionError where bits differ.

        Once all are done, so that no other rank waits. Communication: what each run has read and written,
        over `dp`.
        """
        found: list[CorruptionError] = []
        for number, stage in self._runtime.pipeline.stages.items():
            records, stage.records = stage.records, {}
            for (microbatch, first), record in records.items():
                if record.last >= 0:  # else a layer before it ran together with it
                    found += self._recheck(_Place(number, microbatch, first), record, gatherer)
        if found:
            raise found[0]

    def _recheck(self, place: _Place, own: LayerRecord, gatherer: Gatherer) -> list[CorruptionError]:
        """Exchange records of a run, compute that of the rank before, and return what is found."""
        mesh, stage = self._mesh, self._runtime.pipeline.stages[place.stage]
        group = mesh.group("dp")
        before = (group.index - 1) % group.size
        told = all_gather_text(json.dumps(self._described(place, own)), group, mesh.device)
        if len({json.loads(text)["shapes"] for text in told}) > 1:
            return []  # micro-batches of unlike shapes
        given = self._exchanged(own, before)
        units = self._units(stage, place.first, own.last)
        with _gathered(units, gatherer), self._as_on_the_rank_before(place, json.loads(told[before])):
            differing = self._run(place, stage, own, given)
        self.rechecked += 1
        return [self._difference(place, own, group.ranks[before], differing)] if differing else []

    def _described(self, place: _Place, own: LayerRecord) -> dict[str, Any]:
        """Return what other ranks must know of a run beside its tensors, as JSON values."""
        stage = self._runtime.pipeline.stages[place.stage]
        sequence = stage.sequences[place.microbatch] if stage.sequences else None
        documents = None if sequence is None or sequence.documents is None else astuple(sequence.documents)
        rows = self._runtime.dropout.rows
        span = rows[place.microbatch] if place.microbatch < len(rows) else range(0)
        shapes = f"{signature(own.inputs)} {[signature(one) for one in _tensors_of(own)]}"
        return {"shapes": shapes, "rows": [span.start, span.stop], "documents": documents}

    def _exchanged(self, own: LayerRecord, before: int) -> list[Tensor]:
        """Return the tensors of the rank before, in the order of `_tensors_of`; send this rank's."""
        group, mine = self._mesh.group("dp"), _tensors_of(own)
        packed = torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in mine])
        sent, received = [0] * group.size, [0] * group.size
        sent[(group.index + 1) % group.size] = received[before] = len(packed)
        arriving = all_to_all_uneven(packed, group, sent, received, most=len(packed), checked=False)
        flat = arriving.about("a run of layers that is computed again").wait()
        parts = torch.split(flat, [one.nbytes for one in mine])
        # Cloned, so that each lies where tensors are allocated, as on the other rank.
        return [part.clone().view(one.dtype).view(one.shape) for part, one in zip(parts, mine, strict=True)]

    @contextmanager
    def _as_on_the_rank_before(self, place: _Place, described: dict[str, Any]) -> Iterator[None]:
        """Run layers with the rows and the documents of another rank's micro-batch."""
        dropout, stage = self._runtime.dropout, self._runtime.pipeline.stages[place.stage]
        rows, sequences = dropout.rows, stage.sequences
        if rows:
            dropout.rows = _with(rows, place.microbatch, range(*described["rows"]))
        if described["documents"] is not None:
            length, starts, padding = described["documents"]
            bounds = DocumentBounds(length, _tuples(starts), _tuples(padding))
            here = self._runtime.context_parallelism.sequence(length, bounds)
            stage.sequences = _with(sequences, place.microbatch, here)
        try:
            yield
        finally:
            dropout.rows, stage.sequences = rows, sequences

    def _run(self, place: _Place, stage: Stage, own: LayerRecord, given: Sequence[Tensor]) -> list[str]:
        """Run the layers on `given`, and return what differs from the results in it."""
        parts = _Parts.of(own, given)
        views = self._views(stage, place.first, own.last)
        microbatch, first = place.microbatch, place.first
        differing = []
        with _borrowed(views), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            stage.values[microbatch] = parts.inputs
            stage.forward(microbatch, first, own.last)
            outputs = list_of_tensors(stage.values.pop(microbatch))
            differing += ["the output"] * _differ(outputs, parts.outputs)
            if own.buffers:
                stage.gradients[microbatch] = parts.given
                self._restore(views, parts.buffers[0], own.buffers[0])
                if own.is_fused:
                    stage.backward(microbatch, first)
                else:
                    stage.backward_input(microbatch, first)
                    differing += self._differing(views, parts.buffers[1], own.buffers[1])
                    self._restore(views, parts.buffers[2], own.buffers[2])
                    stage.backward_weight(microbatch, first)
                gradients = stage.gradients.pop(microbatch)
                differing += ["the gradient of the input"] * _differ(gradients, parts.input_gradients)
                differing += self._differing(views, parts.buffers[-1], own.buffers[-1])
                self._runtime.queue.unwritten.clear()
            else:
                stage.runs.pop((microbatch, first), None)
        return list(dict.fromkeys(differing))

    def _restore(self, views: Sequence[StageView], flat: Sequence[Tensor], own: GradientSnapshot) -> None:
        """Write the gradients before a backward to the buffers of this rank."""
        with torch.no_grad():
            for view, before in zip(views, flat, strict=True):
                assert view.gradient is not None
                view.gradient.copy_(before)
        self._runtime.queue.unwritten.clear()
        self._runtime.queue.unwritten.update(own.unwritten)

    def _differing(
        self, views: Sequence[StageView], flat: Sequence[Tensor], own: GradientSnapshot
    ) -> list[str]:
        """Return the parameters whose gradients, after a backward, differ from those in `flat`."""
        found = []
        for view, expected in zip(views, flat, strict=True):
            assert view.gradient is not None
            first = int(view.gradient.storage_offset())
            for name, gradient in view.gradients.items():
                start = int(gradient.storage_offset()) - first
                other = expected[start : start + gradient.numel()].view(gradient.shape)
                if id(view.parameters[name]) not in own.unwritten and _differ([gradient], [other]):
                    found.append(f"the gradient of {name}")
        return found

    def _snapshot(self, stage: Stage, first: int, last: int) -> GradientSnapshot:
        """Return copies of the gradients of layers `first` to `last` as they are now."""
        views = self._views(stage, first, last)
        ids = {id(parameter) for view in views for parameter in view.parameters.values()}
        flat = [view.gradient.clone() for view in views if view.gradient is not None]
        return GradientSnapshot(flat, frozenset(ids & self._runtime.queue.unwritten))

    def _units(self, stage: Stage, first: int, last: int) -> list[Unit]:
        """Return the units that have parameters of layers `first` to `last`."""
        layers = stage.layers[first : last + 1]
        held = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
        units = [unit for unit in self._runtime.units.values() if stage.number in unit.stages]
        return [
            unit
            for unit in units
            if any(id(parameter) in held for parameter in unit.parameters_of(stage.number).values())
        ]

    def _views(self, stage: Stage, first: int, last: int) -> list[StageView]:
        """Return the stage's parts of the gradient buffers of layers `first` to `last`."""
        return [
            buffer.stage_views[unit.stages.index(stage.number)]
            for unit in self._units(stage, first, last)
            for buffer in unit.trainable
        ]

    def _difference(
        self, place: _Place, own: LayerRecord, other: int, differing: Sequence[str]
    ) -> CorruptionError:
        """Return the error for results of this rank that differ from those of rank `other`."""
        step = self._runtime.dropout.step + 1
        stage = self._runtime.pipeline.stages[place.stage]
        first, last = stage.layers[place.first].path, stage.layers[own.last].path
        layers = f"layer {first!r}" if first == last else f"layers {first!r} to {last!r}"
        more = f" and {len(differing) - 1} more results" if len(differing) > 1 else ""
        return CorruptionError(
            f"rank {self._mesh.rank} on host {socket.gethostname()} and rank {other} compute {differing[0]}"
            f"{more} of {layers}, micro-batch {place.microbatch} of step {step}, from the same values with "
            "other bits: one of their devices computes wrongly, so go on without them from a checkpoint or "
            f"snapshot of step {step - 1} or before; where devices or threads differ, turn rechecks off.",
            step - 1,
        )


class _Parts(NamedTuple):
    """The tensors of a record, as another rank has sent them."""

    inputs: Value
    outputs: Sequence[Tensor]
    given: list[Tensor | None]
    input_gradients: Sequence[Tensor | None]
    buffers: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(own: LayerRecord, given: Sequence[Tensor]) -> _Parts:
        """Return `given`, in the order of `_tensors_of`, structured as this rank's own record."""
        rest = iter(given)
        inputs = [next(rest).requires_grad_(one.requires_grad) for one in list_of_tensors(own.inputs)]
        return _Parts(
            with_tensors(own.inputs, inputs),
            [next(rest) for _ in own.outputs],
            [None if one is None else next(rest) for one in own.given],
            [None if one is None else next(rest) for one in own.input_gradients],
            [[next(rest) for _ in one.flat] for one in own.buffers],
        )


def _tensors_of(record: LayerRecord) -> list[Tensor]:
    """Return all tensors of a record, in a fixed order."""
    given = [one for one in (*record.given, *record.input_gradients) if one is not None]
    buffers = [flat for one in record.buffers for flat in one.flat]
    return [*list_of_tensors(record.inputs), *record.outputs, *given, *buffers]


@contextmanager
def _gathered(units: Sequence[Unit], gatherer: Gatherer) -> Iterator[None]:
    """Gather the parameters of units, and free them afterwards where the plan does not keep them."""
    for unit in units:
        gatherer.gather(unit.name)
        gatherer.wait(unit.name)
    try:
        yield
    finally:
        for unit in units:
            gatherer.release(unit.name)


@contextmanager
def _borrowed(views: Sequence[StageView]) -> Iterator[None]:
    """Let layers add to their gradient buffers within the context; then these are as they were before."""
    buffers = [view for view in views if view.gradient is not None]
    freed = [not view.gradient.untyped_storage().nbytes() for view in buffers if view.gradient is not None]
    kept: list[tuple[Tensor, Tensor | None]] = []
    for view, is_freed in zip(buffers, freed, strict=True):
        assert view.gradient is not None
        if is_freed:
            allocate_storage(view.gradient)
        kept.append((view.gradient, None if is_freed else view.gradient.clone()))
    grads = [(one, one.grad) for view in buffers for one in view.parameters.values()]
    for view in buffers:
        for name, parameter in view.parameters.items():
            parameter.grad = view.gradients[name]
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for gradient, before in kept:
                if before is None:
                    free_storage(gradient)
                else:
                    gradient.copy_(before)


def _differ(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Return whether tensors differ in any bit."""
    pairs = zip(found, expected, strict=True)
    return any(
        one is not None and other is not None and not torch.equal(_bytes(one), _bytes(other))
        for one, other in pairs
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _with(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    return [value if number == place else one for number, one in enumerate(values)]


def _tuples(lists: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one) for one in lists)
