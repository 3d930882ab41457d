"""`write_step_record`: one recorded step of all ranks, with actions, waits and traffic, as `step.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.app.loop.loggers import unwritable
from plait.engine.engine import Engine
from plait.engine.recorder import Recording
from plait.pictures.report.recorded_step import (
    RecordedRank,
    RecordedStep,
    rank_as_text,
    rank_from_text,
    write_step,
)
from plait.ranks.clock_offset import clock_offset
from plait.ranks.device import is_accelerator
from plait.ranks.text_collectives import all_gather_text
from plait.ranks.traffic import Counts, Wait

_SHORTEST = 20_000
"""Nanoseconds: shorter waits are left out."""


def write_step_record(
    recording: Recording,
    waits: Sequence[Wait],
    traffic: Counts,
    engine: Engine,
    step: int,
    folder: Path,
) -> None:
    """Write the recorded actions, waits and traffic of `step`, counted from 1, of all ranks; all call it.

    On a GPU waits are left out: they do not block the host. Raises `ConfigError` when the file cannot be
    written. Communication: an all-gather of text over `world`, and what `clock_offset` sends.
    """
    mesh = engine.mesh
    world, schedule = mesh.group("world"), engine.schedule
    offset = clock_offset(world, mesh.device).nanoseconds
    long = [] if is_accelerator(mesh.device) else [wait for wait in waits if wait[2] - wait[1] >= _SHORTEST]
    own = RecordedRank(
        actions=tuple(
            (
                done.action.stage,
                str(done.action.kind),
                done.action.microbatch,
                done.start + offset,
                done.end + offset,
            )
            for done in recording.actions()
        ),
        blocked=tuple((axis, start + offset, end + offset) for axis, start, end in long),
        traffic={
            axis: {kind: (count.calls, count.bytes) for kind, count in kinds.items()}
            for axis, kinds in traffic.items()
        },
    )
    texts = all_gather_text(rank_as_text(own), world, world.device_for_text(mesh.device))
    if mesh.rank:
        return
    ranks = tuple(map(rank_from_text, texts))
    record = RecordedStep(step, schedule.policy, schedule.microbatches, tuple(schedule.rank_of), ranks)
    try:
        write_step(record, folder)
    except OSError as error:
        raise unwritable(folder, error) from None
