"""Mistakes of recorded segments: what changes from step to step is read as it was when it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from parity.case import Case
from parity.cases import gpt2
from parity.dropping import DROPPING
from plait.engine.cuda_graphs import microbatch_graphs, optimizer_graph
from plait.engine.cuda_graphs.segment_graphs import SegmentGraphs
from plait.engine.pipeline.loss_stage import LossStage
from plait.engine.sharding.reducer import Reducer
from plait.plan.flat_buffer_specs import FlatSpec
from plait.plan.plan import Plan
from plait.tensor.dropout import DropoutGenerator


def masks_of_the_recorded_step() -> Any:
    """The keys of masks are written once, when a table is new."""
    original = DropoutGenerator.fill

    def fill(self: DropoutGenerator, table: Any, microbatch: int) -> None:
        if not table._values.any():
            original(self, table, microbatch)

    return patch.object(DropoutGenerator, "fill", fill)


def masks_of_the_first_micro_batch() -> Any:
    """The keys of masks are those of the batch's first rows."""
    original = DropoutGenerator.fill
    return patch.object(DropoutGenerator, "fill", lambda self, table, _: original(self, table, 0))


def loss_scale_of_the_recorded_step() -> Any:
    """The factor of the loss's gradient is written once."""
    original = LossStage.keep_scale_in_place

    def keep(self: LossStage) -> None:
        if self._scale_in_place is None:
            original(self)

    return patch.object(LossStage, "keep_scale_in_place", keep)


def input_of_the_recorded_micro_batch() -> Any:
    """What enters a stage is not copied to where its graph reads it."""
    return patch.object(microbatch_graphs, "_copy_to", lambda *_: None)


def gradient_written_by_each_micro_batch() -> Any:
    """The first micro-batch overwrites what is in the gradient, and so do all others, by its graph."""
    original = Reducer.__init__

    def init(self: Reducer, units: Any, queue: Any, **_: Any) -> None:
        original(self, units, queue, writes_first=True)

    return patch.object(Reducer, "__init__", init)


def gathered_parameters_freed() -> Any:
    """Whole parameters are freed after use, and allocated again."""
    return patch.object(FlatSpec, "freed", property(lambda self: not self.kept))


def graph_of_another_shape() -> Any:
    """The shape of a micro-batch is not asked for."""
    original = SegmentGraphs._shape_of
    return patch.object(SegmentGraphs, "_shape_of", lambda self, place: original(self, place)[:2])


@contextmanager
def rate_of_the_recorded_step() -> Iterator[None]:
    """An optimizer is recorded whose learning rate is a number, and the number is not asked for."""
    original = optimizer_graph.settings_of
    with (
        patch.object(optimizer_graph, "why_never", lambda _: ""),
        patch.object(optimizer_graph, "settings_of", lambda optimizer: original(optimizer)[1:]),  # type: ignore[index]
    ):
        yield


@dataclass(frozen=True, kw_only=True)
class ReplayRow:
    """A mistake of replayed segments, and what has to be said of the first difference, or in the error."""

    defect: Callable[[], AbstractContextManager[object]]
    case: Case = gpt2(layers=2, tied=False)  # noqa: RUF009 (frozen)
    shortens: bool = False
    """Whether the last batch has a position less."""
    plan: Plan
    segment: str
    """The first segment that differs; of an error, a part of its text."""
    what: str = ""
    """The start of the name of the first result that differs."""
    is_refused: bool = False
    """Whether it is an error, not a difference."""
    cause: str
    """A part of the text."""


ONE_STAGE = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
TWO_STAGES = Plan(pp=2, microbatches=3, precision="fp64", cuda_graphs=True)
SHARDED = Plan(dp=2, microbatches=2, strategy="full", precision="fp64", cuda_graphs=True)

REPLAYING = (
    ReplayRow(
        defect=masks_of_the_recorded_step,
        case=DROPPING,
        plan=TWO_STAGES,
        segment="0F0",
        what="output 0",
        cause="the keys of another step's or another micro-batch's dropout masks",
    ),
    ReplayRow(
        defect=masks_of_the_first_micro_batch,
        case=DROPPING,
        plan=TWO_STAGES,
        segment="0F1",
        what="output 0",
        cause="the keys of another step's or another micro-batch's dropout masks",
    ),
    ReplayRow(
        defect=loss_scale_of_the_recorded_step,
        plan=ONE_STAGE,
        segment="seed 0I0",
        what="the gradient of input 0",
        cause="it is 0.25 times the eager one, as with the loss scale of another step",
    ),
    ReplayRow(
        defect=input_of_the_recorded_micro_batch,
        plan=ONE_STAGE,
        segment="0F0",
        what="the loss",
        cause="the graph reads a number, or memory, that is not what would be read now",
    ),
    ReplayRow(
        defect=gradient_written_by_each_micro_batch,
        plan=ONE_STAGE,
        segment="0B1",
        what="the gradient of",
        cause="the graph reads a number, or memory, that is not what would be read now",
    ),
    ReplayRow(
        defect=gathered_parameters_freed,
        plan=SHARDED,
        is_refused=True,
        segment="the parameter embedding.token.weight of stage 0",
        cause="has moved from address",
    ),
    ReplayRow(
        defect=rate_of_the_recorded_step,
        plan=ONE_STAGE,
        segment="the optimizer's step",
        what="parameter 0 of group 0",
        cause="it changes by 0.5 times as much, as with the learning rate of another step",
    ),
    ReplayRow(
        defect=graph_of_another_shape,
        plan=ONE_STAGE,
        shortens=True,
        is_refused=True,
        segment="0F0 was given",
        cause="its graph was recorded for",
    ),
)
