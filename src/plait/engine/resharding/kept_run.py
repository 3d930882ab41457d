"""`reshard_kept`: go on with the run that ranks have kept in memory while their world changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import nn

from plait.engine.engine import Engine
from plait.engine.resharding.optimizer_groups import OptimizerMaker
from plait.engine.resharding.reshard import reshard
from plait.errors import PlanError, terminal_text
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.kept_run import keep_run, take_kept_run
from plait.ranks.mesh import Mesh
from plait.ranks.supervised_rank import newest_good_step, supervisor_of_rank
from plait.ranks.text_collectives import all_gather_text
from plait.tensor.torch_losses import GivenLoss


def reshard_kept(
    model: Callable[[], nn.Module],
    optimizer: OptimizerMaker,
    plan: Plan,
    mesh: Mesh,
    *,
    loss: GivenLoss,
    rules: Rules | None = None,
) -> tuple[Engine, Any] | None:
    """Return the engine and the optimizer of the run that ranks have kept, moved to a plan by `reshard`.

    None where no rank has kept one, or where those that are left do not hold all of it; then the engine is
    made as at the start. Called on all ranks of `launch(…, elastic=…)`, in place of `parallelize`: ranks keep
    the run of `Snapshots` when their world changes, if the function calls this. `Snapshots.restore` of the
    engine then returns its number of steps, and loads nothing. `model` returns the model (best on the meta
    device) and `optimizer` makes the optimizer of a list of parameter groups, on ranks that have kept nothing;
    `loss` and `rules` as to `parallelize`. Communication: a text of each rank, and that of `reshard`.
    """
    kept = take_kept_run()
    if not supervisor_of_rank():
        return None
    most = newest_good_step()
    is_good = kept is not None and (most is None or kept.step <= most)
    own = json.dumps([kept.step, kept.state]) if kept is not None and is_good else ""
    told = [json.loads(text) for text in all_gather_text(own, mesh.all_ranks, mesh.device) if text]
    if not told or any(step != told[0][0] for step, _ in told):
        return None
    try:
        engine, made = (
            reshard(model(), optimizer, plan, mesh, loss=loss, rules=rules)
            if kept is None
            else reshard(kept.engine, kept.optimizer, plan, mesh)
        )
    except PlanError as error:  # on all ranks, before anything has moved
        if mesh.rank == 0:
            print(terminal_text(f"The run goes on from where it was saved last: {error}"))
        return None
    assert engine is not None, "all ranks are in the mesh"
    keep_run(engine, made, *told[0])
    return engine, made
