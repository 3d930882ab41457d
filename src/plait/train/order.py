"""`parallel.balance` and `parallel.reorder`: stages cut, and actions ordered, by what they really take."""

from __future__ import annotations

import json
from pathlib import Path

from plait.comm.mesh import Mesh
from plait.engine import Engine, Recording
from plait.errors import ConfigError
from plait.footprint.timing import balance
from plait.plan import Plan
from plait.schedules.simulation.costs import Costs
from plait.schedules.simulation.figures import figures
from plait.schedules.simulation.timeline import simulate
from plait.schedules.stage_cuts.cut import split_backward
from plait.train.batches import rows_of
from plait.train.config import Config
from plait.train.data import Data
from plait.train.model import build_model

FILE = "schedule.json"


def balanced(config: Config, plan: Plan, mesh: Mesh, data: Data) -> Plan:
    """The plan with stages cut by what layers take here, where that is wanted. See `balance`."""
    if config.parallel.balance == "counted" or plan.layers_per_stage is not None:
        return plan
    rows = rows_of(mesh.index("dp"), mesh.size("dp"), config.train.batch)
    inputs, targets = data.training.batch(0, rows)
    return balance(build_model(config.model, data.vocab), plan, mesh, inputs, targets)


def reordered(engine: Engine, recording: Recording, step: int, folder: Path, mesh: Mesh) -> str:
    """Search the order anew from the costs of the recorded step, counted from 1; one line about it.

    All ranks call it. Raises ConfigError when the file cannot be written. Communication: that of
    `Recording.costs` and `Engine.reorder`.
    """
    before, costs = engine.schedule, recording.costs()
    after = engine.reorder(costs)
    write_order(engine, folder, mesh, costs)
    if after.order == before.order:
        return f"Order after step {step}: {before.policy} stays, none that is shorter was found."
    was, will_be = (simulate(split_backward(order), costs).makespan for order in (before, after))
    return (
        f"Order after step {step}: {after.policy} in place of {before.policy}, {will_be:,.1f} ms a step "
        f"simulated in place of {was:,.1f}, in {FILE}."
    )


def write_order(engine: Engine, folder: Path, mesh: Mesh, costs: Costs | None = None) -> None:
    """Write the order of the next steps, as `plait schedule --json` prints one, on rank 0.

    With the `costs` that it was searched for; times are then milliseconds. ConfigError as above.
    """
    if mesh.rank != 0:
        return
    told = figures(simulate(engine.schedule, costs))
    if costs is not None:
        told["costs"] = {name: getattr(costs, name) for name in ("F", "I", "W", "comm")}
    try:
        (folder / FILE).write_text(json.dumps(told) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {str(folder)!r} cannot be written to ({error.strerror}): choose another folder."
        ) from None
