"""Balanced stages, reordered schedules and traces of a run, from measured times of layers and steps."""

from __future__ import annotations

import json
from pathlib import Path

from plait.app.config.config import Config
from plait.app.data.batches import rank_rows
from plait.app.loop.tracking_services import unwritable
from plait.app.train.run_data import Data
from plait.app.train.trainer import trained_part
from plait.engine.engine import Engine
from plait.engine.recorder import Recording
from plait.estimate.measurement.measured_balance import balance
from plait.files import write_bytes
from plait.pictures.timelines.files import write_pictures
from plait.pictures.timelines.text import title
from plait.pictures.timelines.timeline import simulate
from plait.plan.plan import Plan
from plait.ranks.mesh import Mesh
from plait.schedules.costs import Costs

SCHEDULE_FILE = "schedule.json"
TRACE_FILES = {"trace": "trace.json", "svg": "trace.svg", "html": "trace.html"}
"""For Perfetto or chrome://tracing; a picture; an interactive page."""


def balanced(config: Config, plan: Plan, mesh: Mesh, data: Data) -> Plan:
    """Return the plan with stages cut by measured layer times if `parallel.balance` is "measured".

    A plan with a cut of its own (`layers_per_stage`) stays as it is.
    """
    if config.parallel.balance == "counted" or plan.layers_per_stage is not None:
        return plan
    rows = rank_rows(mesh.index("dp"), mesh.size("dp"), config.train.batch)
    inputs, targets = data.training.batch(0, rows)
    return balance(trained_part(config, data.vocab), plan, mesh, inputs, targets)


def reorder(engine: Engine, recording: Recording, step: int, folder: Path, mesh: Mesh) -> str:
    """Set a schedule that is shorter at the times measured in `step`, if one is found; return a report line.

    `step` is counted from 1. All ranks call it. Raises `ConfigError` when the file cannot be written.
    Communication: that of `Recording.costs` and `Engine.reorder`.
    """
    before, costs = engine.schedule, recording.costs()
    after = engine.reorder(costs)
    write_schedule(engine, folder, mesh, costs)
    if after.order == before.order:
        return f"Order after step {step}: {before.policy} stays, none that is shorter was found."
    was, will_be = (simulate(order.split_backward, costs).makespan for order in (before, after))
    return (
        f"Order after step {step}: {after.policy} in place of {before.policy}, {will_be:,.1f} ms a step "
        f"simulated in place of {was:,.1f}, in {SCHEDULE_FILE}."
    )


def write_schedule(engine: Engine, folder: Path, mesh: Mesh, costs: Costs | None = None) -> None:
    """Write the engine's schedule to a file in `folder`, on rank 0, in the format of `plait schedule --json`.

    `costs` are those that it was searched for; times are then in milliseconds. Raises `ConfigError` when the
    file cannot be written.
    """
    if mesh.rank != 0:
        return
    result = simulate(engine.schedule, costs).as_json()
    if costs is not None:
        result["costs"] = {name: getattr(costs, name) for name in ("F", "I", "W", "comm")}
    try:
        write_bytes(folder / SCHEDULE_FILE, f"{json.dumps(result)}\n".encode())
    except OSError as error:
        raise unwritable(folder, error) from None


def write_trace(recording: Recording, step: int, folder: Path, mesh: Mesh) -> str:
    """Write pictures of the timeline measured in `step` to `folder`, on rank 0; return a line about it.

    `step` is counted from 1. All ranks call it. Of ranks that differ in `dp` or `tp` the files show those of
    rank 0's pipeline. Raises `ConfigError` when they cannot be written. Communication: two all-gathers over
    `pp`.
    """
    timeline, costs = recording.timeline(), recording.costs()
    if mesh.rank == 0:
        paths = {kind: folder / file for kind, file in TRACE_FILES.items()}
        list(write_pictures(timeline, paths, name=f"{title(timeline.schedule)}; step {step} as it was"))
    simulated = simulate(timeline.schedule, costs)
    return (
        f"Trace of step {step}: makespan {timeline.makespan:,.1f} ms "
        f"({simulated.makespan:,.1f} simulated with its costs), "
        f"bubble {timeline.bubble:.1%} ({simulated.bubble:.1%}), in {', '.join(TRACE_FILES.values())}."
    )
