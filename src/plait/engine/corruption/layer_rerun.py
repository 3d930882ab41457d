"""`LayerRerun`: computes layers again after a step, from the inputs that another rank recorded and sent.

The layers add to the gradient buffers of this rank, which get their values back afterwards; parameters that
the plan frees are gathered for as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from plait.engine.pipeline.layer_run_copies import GradientSnapshot, LayerRecord
from plait.engine.pipeline.stage import Stage
from plait.engine.runner import Runtime
from plait.engine.sharding.flat_buffer import StageView, allocate_storage, free_storage
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.unit import Unit
from plait.tensor.nested_values import Value, list_of_tensors, signature, with_tensors
from plait.tensor.running_sequence import DocumentBounds

Results: TypeAlias = list[tuple[str, Tensor]]
"""What layers computed: names, such as `the output`, and tensors."""


class RunPlace(NamedTuple):
    """Which layers of a stage ran together, from layer `first` on, and for which micro-batch."""

    stage: int
    microbatch: int
    first: int


class SentRecord(NamedTuple):
    """The tensors that another rank recorded of one run of layers, as they were received."""

    inputs: Value
    outputs: Sequence[Tensor]
    given: list[Tensor | None]
    input_gradients: Sequence[Tensor | None]
    buffers: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(own: LayerRecord, tensors: Sequence[Tensor]) -> SentRecord:
        """Return `tensors`, in the order of `tensors_of_record`, structured as this rank's own record."""
        rest = iter(tensors)
        inputs = [next(rest).requires_grad_(one.requires_grad) for one in list_of_tensors(own.inputs)]
        return SentRecord(
            with_tensors(own.inputs, inputs),
            [next(rest) for _ in own.outputs],
            [None if one is None else next(rest) for one in own.given],
            [None if one is None else next(rest) for one in own.input_gradients],
            [[next(rest) for _ in one.flat] for one in own.buffers],
        )


def tensors_of_record(record: LayerRecord) -> list[Tensor]:
    """Return all tensors of a record, in a fixed order."""
    gradients = [one for one in (*record.given, *record.input_gradients) if one is not None]
    buffers = [flat for one in record.buffers for flat in one.flat]
    return [*list_of_tensors(record.inputs), *record.outputs, *gradients, *buffers]


class LayerRerun:
    """Runs layers again on what another rank recorded, after the backward and before the update."""

    def __init__(self, runtime: Runtime, gatherer: Gatherer) -> None:
        self._runtime, self._gatherer = runtime, gatherer

    def described(self, place: RunPlace, own: LayerRecord) -> dict[str, Any]:
        """Return shapes, rows and documents with which another rank can compute a run again."""
        stage, dropout = self._runtime.pipeline.stages[place.stage], self._runtime.dropout
        sequence = stage.sequences[place.microbatch] if stage.sequences else None
        bounds = None if sequence is None else sequence.documents
        rows = dropout.rows[place.microbatch] if place.microbatch < len(dropout.rows) else range(0)
        shapes = f"{signature(own.inputs)} {[signature(one) for one in tensors_of_record(own)]}"
        documents = None if bounds is None else [bounds.length, bounds.starts, bounds.padding]
        return {"shapes": shapes, "rows": [rows.start, rows.stop], "documents": documents}

    def run(
        self, place: RunPlace, own: LayerRecord, sent: SentRecord, described: dict[str, Any]
    ) -> tuple[Results, Results]:
        """Run the layers on the inputs that another rank has `sent`; return the results, and that rank's."""
        stage = self._runtime.pipeline.stages[place.stage]
        views = stage_views(self._runtime, stage, place.first, own.last)
        units = units_of(self._runtime, stage, place.first, own.last)
        with (
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
            _gathered(units, self._gatherer),
            self._as_elsewhere(place, described),
            _borrowed(views),
        ):
            found = self._computed(place, stage, own, sent, views)
        expected: Results = [("the output", one) for one in sent.outputs]
        for flat, snapshot in zip(sent.buffers[1::2], own.buffers[1::2], strict=True):
            expected += _gradients(views, flat, snapshot)
        expected += [("the gradient of the input", one) for one in sent.input_gradients if one is not None]
        return found, expected

    def _computed(
        self, place: RunPlace, stage: Stage, own: LayerRecord, sent: SentRecord, views: Sequence[StageView]
    ) -> Results:
        """Return the output of the layers, the gradients of their parameters, and that of their input."""
        microbatch, first = place.microbatch, place.first
        stage.values[microbatch] = sent.inputs
        stage.forward(microbatch, first, own.last)
        found: Results = [("the output", one) for one in list_of_tensors(stage.values.pop(microbatch))]
        if not own.buffers:  # no backward, as of frozen layers
            stage.runs.pop((microbatch, first), None)
            return found
        stage.gradients[microbatch] = sent.given
        steps = [stage.backward] if own.is_fused else [stage.backward_input, stage.backward_weight]
        for number, step in enumerate(steps):
            before, after = 2 * number, 2 * number + 1
            self._write(views, sent.buffers[before], own.buffers[before])
            step(microbatch, first)
            flat = [view.gradient.clone() for view in views if view.gradient is not None]
            found += _gradients(views, flat, own.buffers[after])
        self._runtime.queue.unwritten.clear()
        gradients = stage.gradients.pop(microbatch)
        return found + [("the gradient of the input", one) for one in gradients if one is not None]

    def _write(self, views: Sequence[StageView], flat: Sequence[Tensor], own: GradientSnapshot) -> None:
        """Write another rank's gradient buffers, as before its backward, to those of this rank."""
        with torch.no_grad():
            for view, before in zip(views, flat, strict=True):
                assert view.gradient is not None
                view.gradient.copy_(before)
        self._runtime.queue.unwritten.clear()
        self._runtime.queue.unwritten.update(own.unwritten)

    @contextmanager
    def _as_elsewhere(self, place: RunPlace, described: dict[str, Any]) -> Iterator[None]:
        """Context in which layers see the row numbers and document ids of another rank's micro-batch."""
        dropout, stage = self._runtime.dropout, self._runtime.pipeline.stages[place.stage]
        rows, sequences = dropout.rows, stage.sequences
        if rows:
            dropout.rows = _with(rows, place.microbatch, range(*described["rows"]))
        if described["documents"] is not None:
            length, *bounds = described["documents"]
            documents = DocumentBounds(length, *(tuple(map(tuple, one)) for one in bounds))
            here = self._runtime.context_parallelism.sequence(length, documents)
            stage.sequences = _with(sequences, place.microbatch, here)
        try:
            yield
        finally:
            dropout.rows, stage.sequences = rows, sequences


def snapshot(runtime: Runtime, stage: Stage, first: int, last: int) -> GradientSnapshot:
    """Return copies of the present gradient buffers of layers `first` to `last` of a stage."""
    views = stage_views(runtime, stage, first, last)
    ids = {id(parameter) for view in views for parameter in view.parameters.values()}
    flat = [view.gradient.clone() for view in views if view.gradient is not None]
    return GradientSnapshot(flat, frozenset(ids & runtime.queue.unwritten))


def units_of(runtime: Runtime, stage: Stage, first: int, last: int) -> list[Unit]:
    """Return the units (parameters gathered together) that layers `first` to `last` of a stage use."""
    layers = stage.layers[first : last + 1]
    held = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    return [
        unit
        for unit in runtime.units.values()
        if stage.number in unit.stages
        and any(id(parameter) in held for parameter in unit.parameters_of(stage.number).values())
    ]


def stage_views(runtime: Runtime, stage: Stage, first: int, last: int) -> list[StageView]:
    """Return this stage's views of the flat gradient buffers of its layers `first` to `last`."""
    return [
        buffer.stage_views[unit.stages.index(stage.number)]
        for unit in units_of(runtime, stage, first, last)
        for buffer in unit.trainable
    ]


def _gradients(views: Sequence[StageView], flat: Sequence[Tensor], own: GradientSnapshot) -> Results:
    """Return parameters' gradients in copies of the flat buffers, without those not written yet."""
    found: Results = []
    for view, copied in zip(views, flat, strict=True):
        assert view.gradient is not None
        first = int(view.gradient.storage_offset())
        for name, gradient in view.gradients.items():
            if id(view.parameters[name]) not in own.unwritten:
                start = int(gradient.storage_offset()) - first
                found.append((f"the gradient of {name}", copied[start : start + gradient.numel()]))
    return found


@contextmanager
def _gathered(units: Sequence[Unit], gatherer: Gatherer) -> Iterator[None]:
    """Context in which the units' parameters are gathered; afterwards they are freed if the plan says so."""
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
    """Context in which layers may add to their gradient buffers, whose contents are restored afterwards."""
    kept: list[tuple[Tensor, Tensor | None]] = []
    for view in views:
        if view.gradient is not None and view.gradient.untyped_storage().nbytes():
            kept.append((view.gradient, view.gradient.clone()))
        elif view.gradient is not None:
            allocate_storage(view.gradient)
            kept.append((view.gradient, None))
    parameters = [(view.gradients[name], one) for view in views for name, one in view.parameters.items()]
    before = [one.grad for _, one in parameters]
    for gradient, parameter in parameters:
        parameter.grad = gradient
    try:
        yield
    finally:
        for (_, parameter), earlier in zip(parameters, before, strict=True):
            parameter.grad = earlier
        with torch.no_grad():
            for flat, values in kept:
                free_storage(flat) if values is None else flat.copy_(values)


def _with(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    return [value if number == place else one for number, one in enumerate(values)]
