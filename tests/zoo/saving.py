"""Mistakes of saving and loading: another rank's shard, another tensor, what is not loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.case import Case
from plait.checkpoint import loading
from plait.checkpoint.box_reader import BoxReader
from plait.plan.layout import Layout
from plait.plan.plan import Plan
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import ONE_STEP, Named, Row

RESUMED = replace(ONE_STEP, resumes=True)
Where = Mapping[str, int]


@contextmanager
def _filled(change: Callable[[Tensor, str, Layout, Where], tuple[str, Where]]) -> Iterator[None]:
    """Each tensor that is loaded is the one, at the place, that `change` returns."""
    original = BoxReader.fill

    def fill(self: BoxReader, shard: Tensor, name: str, layout: Layout, where: Where) -> None:
        name, where = change(shard, name, layout, where)
        original(self, shard, name, layout, where)

    with patch.object(BoxReader, "fill", fill):
        yield


def _of_the_next_rank(axis: str) -> Any:
    def change(shard: Tensor, name: str, layout: Layout, where: Where) -> tuple[str, Where]:
        other = {**where, axis: 1 - where.get(axis, 0)}
        fits = layout.axis_degrees.get(axis) == 2 and layout.local_shape(other) == tuple(shard.shape)
        return name, other if fits and name.startswith("optim") else where

    return _filled(change)


def moments_of_another_rank_of_tp() -> Any:
    """A rank reads the moments of the other one's shards."""
    return _of_the_next_rank("tp")


def moments_of_another_shard() -> Any:
    """Likewise, of flat shards."""
    return _of_the_next_rank("shard")


def moments_of_another_rank_of_cp() -> Any:
    """Likewise, where parameters are sharded over cp."""
    return _of_the_next_rank("cp")


def first_moment_taken_for_the_second() -> Any:
    """Both moments are the second."""
    return _filled(lambda shard, name, layout, where: (name.replace("exp_avg_sq", "exp_avg"), where))


@contextmanager
def _afterwards(kind: str, change: Callable[[Tensor], object]) -> Iterator[None]:
    """What was loaded of a kind is changed in place."""
    original = BoxReader.fill

    def fill(self: BoxReader, shard: Tensor, name: str, *more: Any) -> None:
        original(self, shard, name, *more)
        if name.endswith(kind):
            change(shard)

    with patch.object(BoxReader, "fill", fill):
        yield


def steps_counted_anew() -> Any:
    """The optimizer's counts of steps begin at 0."""
    return _afterwards(".step", Tensor.zero_)


def moments_in_single_precision() -> Any:
    """Moments pass through float32."""
    return _afterwards("exp_avg", lambda shard: shard.copy_(shard.float()))


def passes_counted_anew() -> Any:
    """The number of steps, on which dropout depends, is not restored."""
    original = loading.applicable_run_state
    return patch.object(loading, "applicable_run_state", lambda *given: original(*given) | {"passes": 0})


def _row(
    defect: Any, parameter: str, cause: str, *, model: Case = cases.GPT2, plan: Plan, **more: Any
) -> Row:
    named = Named(phase=StepPhase.LOAD, parameter=parameter, cause=cause, step=1, ranks=(0, 1))
    return Row(defect=defect, model=model, plan=plan, named=named, options=RESUMED, **more)


MOMENT = ".*/exp_avg"
SAVING = (
    _row(
        moments_of_another_rank_of_tp,
        MOMENT,
        "what rank 1 should have",
        model=cases.EVEN,
        plan=cases.TWO_PARTS,
    ),
    _row(moments_of_another_shard, MOMENT, "what rank 1 should have", plan=cases.CUT_STATE, full=True),
    _row(
        moments_of_another_rank_of_cp,
        MOMENT,
        "what rank 1 should have",
        plan=Plan(cp=2, microbatches=2, strategy="full"),
        full=True,
    ),
    _row(
        first_moment_taken_for_the_second,
        ".*/exp_avg_sq",
        "what was saved of .*/exp_avg",
        plan=cases.TWO_STAGES,
        full=True,
    ),
    _row(steps_counted_anew, ".*/step", "it is zero", plan=cases.TWO_STAGES, full=True),
    _row(moments_in_single_precision, MOMENT, "float32", plan=cases.TWO_STAGES, full=True),
    _row(passes_counted_anew, "run state passes", "was not loaded", plan=cases.TWO_STAGES),
)
