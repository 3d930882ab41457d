"""Which segments of a rank's training steps run as graphs: recorded after some steps, then replayed.

A micro-batch takes a slot of its stage from its first segment to its last; so there are as many as the
schedule has micro-batches in flight. The first steps of each shape run eagerly: layers are compiled,
libraries choose their kernels, recomputation learns what to keep, and the last one shows what cannot be in a
graph. In the next step each slot records its graphs, once for each shape; then it replays them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from plait.engine.cuda_graphs.address_check import FixedAddresses
from plait.engine.cuda_graphs.graph_recorder import GraphRecorder
from plait.engine.cuda_graphs.host_reads import HostReads
from plait.engine.cuda_graphs.microbatch_graphs import MicrobatchGraphs
from plait.engine.cuda_graphs.optimizer_graph import RECORDED, REPLAYED, OptimizerGraph
from plait.engine.cuda_graphs.recordable_segments import SegmentPlace, places_of
from plait.engine.cuda_graphs.replay_check import ReplayCheck
from plait.engine.pipeline.executor import Calls, RunCalls
from plait.engine.pipeline.loss_stage import LossStage
from plait.engine.pipeline.pipeline_rank import PipelineRank
from plait.schedules.lowering.program import Segment
from plait.tensor.cuda_graph_dropout_keys import MaskNotes, MaskTable
from plait.tensor.dropout import DropoutGenerator
from plait.tensor.nested_values import map_tensors

EAGER_STEPS = 2
"""Steps of a shape that run eagerly before its graphs are recorded."""
MOST_GRAPHS = 1024
"""Graphs of a rank; further shapes run eagerly."""

Shape = tuple[Any, ...]
"""What is equal for micro-batches of a stage that can take turns in the same graphs."""


@dataclass
class GraphCounts:
    """How many graphs a rank has recorded and replayed, and which segments ran eagerly."""

    recorded: int = 0
    replayed: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    """By reason, the segments that ran eagerly."""


@dataclass
class _MicrobatchRun:
    """How a micro-batch runs at a stage: its graphs, or why it runs eagerly."""

    shape: Shape
    graphs: MicrobatchGraphs | None = None
    slot: int = 0
    records: bool = False
    notes: MaskNotes | None = None
    """Of a micro-batch of the last eager step, which shows what its shape's graphs need."""
    reason: str = ""


class SegmentGraphs:
    """The graphs of the computing segments of one rank's training programs."""

    def __init__(
        self,
        recorder: GraphRecorder,
        pipeline: PipelineRank,
        dropout: DropoutGenerator,
        addresses: FixedAddresses,
        device: torch.device,
        *,
        never: str = "",
        eager_steps: int = EAGER_STEPS,
        most: int = MOST_GRAPHS,
    ) -> None:
        """`never`: why nothing can be recorded, if so. `most`: graphs; further shapes run eagerly."""
        self.counts = GraphCounts()
        self.check: ReplayCheck | None = None
        """Compares replayed segments with eager ones, while it is set."""
        self._recorder, self._pipeline, self._dropout = recorder, pipeline, dropout
        self._addresses, self._device = addresses, device
        self._optimizers = WeakKeyDictionary[torch.optim.Optimizer, OptimizerGraph]()
        self._never, self._eager_steps, self._most = never, eager_steps, most
        self._graphs: dict[tuple[Shape, int], MicrobatchGraphs] = {}
        self._pools: dict[tuple[int, int], Any] = {}
        """By stage and slot."""
        self._taken: dict[int, set[int]] = defaultdict(set)
        """By stage, the slots of micro-batches in flight."""
        self._microbatches: dict[tuple[int, int], _MicrobatchRun] = {}
        """By stage and micro-batch in flight."""
        self._steps: Counter[Shape] = Counter()
        """The eager steps of each shape that have ended."""
        self._seen: set[Shape] = set()
        """The shapes that run eagerly in this step."""
        self._masks: dict[Shape, MaskNotes] = {}
        self._reasons: dict[Shape, str] = {}
        """Why a shape cannot be recorded."""

    @property
    def recorded(self) -> list[MicrobatchGraphs]:
        """All recorded graphs: one `MicrobatchGraphs` for each shape of micro-batch and slot of a stage."""
        return list(self._graphs.values())

    def begin(self) -> None:
        """Begin a training step. Raises PlanError where a tensor that graphs use has moved."""
        self._addresses.check()
        self._pipeline.loss_stage.keep_scale_in_place()
        self._steps.update(self._seen)
        self._seen = set()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `optimizer.step()`, or replay it: see `OptimizerGraph`."""
        graph = self._optimizers.get(optimizer)
        if graph is None:
            graph = self._optimizers[optimizer] = OptimizerGraph(self._recorder)
        done = graph.step(optimizer, self.check)
        self.counts.recorded += done == RECORDED
        self.counts.replayed += done == REPLAYED
        if done not in (RECORDED, REPLAYED):
            self.counts.eager[done] += 1

    def clear(self) -> None:
        """After an exception in a step, discard micro-batches in flight, and graphs that are not complete."""
        for run in self._microbatches.values():
            if run.records:
                self._graphs.pop((run.shape, run.slot), None)
        self._microbatches.clear()
        self._taken.clear()
        self._seen.clear()
        self._dropout.table = None

    def bind(self, segments: Sequence[Segment], runs: Sequence[RunCalls]) -> list[RunCalls]:
        """Return for each segment of a program the function that runs its calls; `runs` run them eagerly."""
        return [
            run if place is None else partial(self._run, place, run)
            for place, run in zip(places_of(segments), runs, strict=True)
        ]

    def _run(self, place: SegmentPlace, run_calls: RunCalls, calls: Calls) -> None:
        """Run a segment as its micro-batch runs: by its graph, eagerly, or recording it."""
        key, compute = (place.stage, place.microbatch), partial(run_calls, calls)
        if place.number == 0:
            self._microbatches[key] = self._begin(place)
        run = self._microbatches[key]
        if run.graphs is None:
            self._run_eagerly(place, run, compute)
        elif run.records:
            self._record(place, run.graphs, compute)
        else:
            self._replay(place, run.graphs, compute)
        if place.is_last:
            del self._microbatches[key]
            self._taken[place.stage].discard(run.slot)

    def _record(self, place: SegmentPlace, graphs: MicrobatchGraphs, compute: Callable[[], None]) -> None:
        stage, loss = self._pipeline.stages[place.stage], self._loss_of(place.stage)
        self._dropout.table = graphs.masks
        try:
            graphs.record(place, stage, loss, compute, self._recorder)
        finally:
            self._dropout.table = None
        self.counts.recorded += 1

    def _replay(self, place: SegmentPlace, graphs: MicrobatchGraphs, compute: Callable[[], None]) -> None:
        stage, loss = self._pipeline.stages[place.stage], self._loss_of(place.stage)
        if self.check is None:
            graphs.replay(place, stage, loss)
        else:
            self.check.compare(place, graphs, stage, loss, compute)
        self.counts.replayed += 1

    def _begin(self, place: SegmentPlace) -> _MicrobatchRun:
        """Decide how a micro-batch runs at a stage, and take a slot if it runs in graphs."""
        shape = self._shape_of(place)
        reason = self._reason(place, shape)
        if reason:
            return _MicrobatchRun(shape, slot=-1, reason=reason)
        if self._steps[shape] < self._eager_steps:
            self._seen.add(shape)
            # Not in the first step, in which layers may be compiled.
            is_watched = self._steps[shape] + 1 == self._eager_steps
            notes = self._masks.setdefault(shape, MaskNotes()) if is_watched else None
            return _MicrobatchRun(shape, slot=-1, notes=notes, reason="the first steps of a shape")
        taken = self._taken[place.stage]
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        graphs = self._graphs.get((shape, slot))
        records = graphs is None
        if graphs is None:
            if self.counts.recorded + len(place.parts) > self._most:
                return _MicrobatchRun(shape, slot=-1, reason=f"more than {self._most} graphs")
            graphs = self._new_graphs(place.stage, shape, slot)
        taken.add(slot)
        self._dropout.fill(graphs.masks, place.microbatch)
        return _MicrobatchRun(shape, graphs, slot, records)

    def _new_graphs(self, stage: int, shape: Shape, slot: int) -> MicrobatchGraphs:
        self._addresses.note()
        if (stage, slot) not in self._pools:
            self._pools[stage, slot] = self._recorder.new_pool()
        masks = MaskTable(self._masks[shape].elements, self._device)
        made = MicrobatchGraphs(self._pools[stage, slot], masks)
        self._graphs[shape, slot] = made
        return made

    def _run_eagerly(self, place: SegmentPlace, run: _MicrobatchRun, compute: Callable[[], None]) -> None:
        self.counts.eager[run.reason] += 1
        if run.notes is None:
            compute()
            return
        self._dropout.table, reads = run.notes, HostReads()
        try:
            with reads:
                compute()
        finally:
            self._dropout.table = None
        layers = self._layers_of(place.stage)
        if reads.reads:
            self._reasons[run.shape] = f"{layers}: the host reads the result of {reads.reads[0]}"
        elif reads.draws and any(mode != "none" for mode in self._pipeline.stages[place.stage].recompute):
            self._reasons[run.shape] = f"{layers}: {reads.draws[0]} would draw anew when it is recomputed"

    def _reason(self, place: SegmentPlace, shape: Shape) -> str:
        """Return why a micro-batch cannot run in graphs; empty if it can."""
        stage = self._pipeline.stages[place.stage]
        if self._never or shape in self._reasons:
            return self._never or self._reasons[shape]
        if stage.sequences and stage.sequences[place.microbatch] is not None:
            return "documents, or a part of the sequence: the host reads where they begin"
        if stage.routing_layers:
            return f"layer {stage.routing_layers[0]!r} has a router, whose choices are counted in Python"
        infos = stage.infos[place.microbatch]
        counting = [layer.path for layer, info in zip(stage.layers, infos, strict=True) if info.counting]
        return f"layer {counting[0]!r} counts its runs in Python" if counting else ""

    def _shape_of(self, place: SegmentPlace) -> Shape:
        """Return the key of a micro-batch's graphs: its segments, and the shapes of the stage's inputs."""
        number, loss = place.microbatch, self._loss_of(place.stage)
        value = _described(self._pipeline.stages[place.stage].values[number])
        targets = _described(loss.targets[number]) if loss is not None else ""
        return place.stage, place.parts, value, targets

    def _loss_of(self, stage: int) -> LossStage | None:
        return self._pipeline.loss_stage if stage == self._pipeline.last_stage else None

    def _layers_of(self, stage: int) -> str:
        layers = self._pipeline.stages[stage].layers
        return f"layers {layers[0].path!r} to {layers[-1].path!r}"


def _described(value: Any) -> str:
    """Return the structure of `value`, with what graphs depend on in place of its tensors, as text."""

    def described(tensor: Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad

    return repr(map_tensors(described, value))
