"""`run.trace`: what really happened in one step, drawn like a schedule, and what a simulation says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.comm.mesh import Mesh
from plait.engine import Engine, Recording
from plait.schedules.simulation.pictures import write_pictures
from plait.schedules.simulation.text import title
from plait.schedules.simulation.timeline import simulate

FILES = {"trace": "trace.json", "svg": "trace.svg", "html": "trace.html"}
"""For Perfetto or chrome://tracing; a picture; a page to look around in."""


@contextmanager
def recorded(engine: Engine, *, wanted: bool) -> Iterator[Recording | None]:
    """Around a step: its recording, where it is `wanted`."""
    if not wanted:
        yield None
        return
    with engine.recording() as recording:
        yield recording


def write_trace(recording: Recording, step: int, folder: Path, mesh: Mesh) -> str:
    """Draw the recorded step, counted from 1, into `folder`, on rank 0; one line about it.

    All ranks call it. Of ranks that differ in `dp` or `tp` the files show those of rank 0's pipeline. Raises
    ConfigError when they cannot be written. Communication: two all-gathers over `pp`.
    """
    timeline, costs = recording.timeline(), recording.costs()
    if mesh.rank == 0:
        paths = {kind: folder / file for kind, file in FILES.items()}
        list(write_pictures(timeline, paths, name=f"{title(timeline.schedule)}; step {step} as it was"))
    simulated = simulate(timeline.schedule, costs)
    return (
        f"Trace of step {step}: makespan {timeline.makespan:,.1f} ms "
        f"({simulated.makespan:,.1f} simulated with its costs), "
        f"bubble {timeline.bubble:.1%} ({simulated.bubble:.1%}), in {', '.join(FILES.values())}."
    )
