"""`reshard_kept`: continues the run that ranks have kept in memory while their world changed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from plait.checkpoint.optimizer_set import OptimizerSet
from plait.engine.engine import Engine
from plait.engine.resharding.optimizer_of_new_engine import OptimizerMaker
from plait.engine.resharding.planned_transfers import PlacedBlueprint, lost_parameter
from plait.engine.resharding.reshard import reshard
from plait.errors import CorruptionError, PlanError
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.ranks.exchange_with_supervisor import newest_good_step, supervisor_of_rank
from plait.ranks.mesh import Mesh
from plait.ranks.run_kept_in_memory import KeptRun, keep_run, take_kept_run
from plait.ranks.text_collectives import all_gather_text
from plait.tensor.torch_losses import GivenLoss

_WRONG = "wrong bits"


def reshard_kept(
    model: Callable[[], nn.Module],
    optimizer: OptimizerMaker,
    plan: Plan,
    mesh: Mesh,
    *,
    loss: GivenLoss,
    rules: Rules | None = None,
) -> tuple[Engine, Any] | None:
    """Return engine and optimizer of the run in the ranks' memory, resharded to a plan; None without one.

    None where no rank has kept one, or where those that are left do not hold all of it; then the engine is
    made as at the start. Called on all ranks of `launch(…, elastic=…)`, in place of `parallelize`: ranks keep
    the run of `Snapshots` when their world changes, if the function calls this. `Snapshots.restore` of the
    engine then returns its number of steps, and loads nothing. `model` returns the model (best on the meta
    device) and `optimizer` makes the optimizer of a list of parameter groups, on ranks that have kept
    nothing; `loss` and `rules` as to `parallelize`. Raises CorruptionError on a rank whose memory
    `CorruptionChecks` find changed: it does not move. Communication: two texts of each rank, and that of
    `reshard`.
    """
    kept = take_kept_run()
    if not supervisor_of_rank():
        return None
    moved = _moved(kept, model, optimizer, plan, mesh, loss, rules)
    if moved is None and kept is not None:
        del kept
        gc.collect()  # layers refer to each other: else the engine would take memory beside the next one
    return moved


def _moved(
    kept: KeptRun | None,
    model: Callable[[], nn.Module],
    optimizer: OptimizerMaker,
    plan: Plan,
    mesh: Mesh,
    loss: GivenLoss,
    rules: Rules | None,
) -> tuple[Engine, Any] | None:
    """Return the engine and optimizer of the run that ranks have kept, moved; None as `reshard_kept`."""
    own = ""
    if newest_good_step() is not None:  # wrong bits may be in memory; not each host may know
        own = _WRONG
    elif kept is not None:
        _go_back(kept)
        _compare_memory(kept.engine, mesh)  # that of the new engine counts as right
        own = json.dumps([kept.step, kept.state, kept.engine.mesh.rank])
    texts = all_gather_text(own, mesh.all_ranks, mesh.device)
    if _WRONG in texts:
        return None
    told = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    states = {step: state for step, state, _ in told.values()}
    for step in sorted(states, reverse=True):  # of replicas, some may have ended a step that others have not
        members = {place: rank for rank, (at, _, place) in told.items() if at == step}
        if not _is_whole(kept if kept is not None and kept.step == step else None, members, mesh):
            continue
        try:
            if kept is None or kept.step != step:
                moved = reshard(model(), optimizer, plan, mesh, loss=loss, rules=rules)
            else:
                moved = reshard(kept.engine, kept.optimizer, plan, mesh)
        except PlanError:  # on all ranks, before anything has moved: the optimizer's state cannot be moved
            return None
        engine, made = moved
        assert engine is not None, "all ranks are in the mesh"
        keep_run(KeptRun(engine, made, step, states[step], engine.run_state))
        return engine, made
    return None


def _compare_memory(engine: Engine, mesh: Mesh) -> None:
    """Raise CorruptionError where the engine's memory has changed by itself, as that of a rank of `mesh`."""
    try:
        engine.compare_memory()
    except CorruptionError as error:
        rank = mesh.all_ranks.index  # which may have had another number when the engine was made
        text = f"rank {rank} of {mesh.world} cannot go on with the run that it has kept: {error}"
        raise CorruptionError(text, error.last_good_step, [rank]) from None


def _is_whole(kept: KeptRun | None, members: Mapping[int, int], mesh: Mesh) -> bool:
    """Return on all ranks whether the ranks that kept the run hold all of its parameters together."""
    found = ""
    if kept is not None:
        lost = lost_parameter(PlacedBlueprint(kept.engine.blueprint, members))
        found = "" if lost else "whole"
    return any(all_gather_text(found, mesh.all_ranks, mesh.device))


def _go_back(kept: KeptRun) -> None:
    """Undo the step that an engine had begun: drop its gradients, and reset the counter of dropout."""
    optimizers = OptimizerSet.of(kept.optimizer)
    for one in () if optimizers is None else optimizers.members:
        one.zero_grad()
    kept.engine.run_state = kept.run_state
