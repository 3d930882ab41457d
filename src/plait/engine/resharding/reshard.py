"""`reshard`: moves a run between steps to another plan, on more, fewer or other ranks, without files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from plait.checkpoint.compatibility import applicable_order, linears_change
from plait.checkpoint.optimizer_set import GivenOptimizers
from plait.checkpoint.optimizer_state import merge_optimizers
from plait.engine.blueprint import Blueprint, shared_blueprint
from plait.engine.engine import Engine
from plait.engine.fingerprint import fingerprint
from plait.engine.parallelize import assemble_engine, refuse_unavailable
from plait.engine.resharding.arriving_values import ArrivingValues, LeavingValues
from plait.engine.resharding.optimizer_of_new_engine import (
    OptimizerMaker,
    go_on_with,
    made_optimizer,
    members_of_groups,
    regroup,
    set_state,
)
from plait.engine.resharding.planned_transfers import Moves, PlacedBlueprint, plan_moves
from plait.engine.resharding.rank_report import RankReport
from plait.engine.resharding.reshard_arguments import ReshardArguments
from plait.engine.tensor_sources import TensorLocation, locate_tensors
from plait.errors import PlaitError, PlanError
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.argument_checks import require_instance
from plait.plan.plan import Plan
from plait.plan.rules import Rules
from plait.proof.optimizer_proof import Partitioning, require_elementwise
from plait.ranks.consistency_check import require_same_text
from plait.ranks.mesh import Mesh
from plait.ranks.text_collectives import all_gather_text, first_nonempty_text
from plait.tensor.parallel.tensor_parallelism import named
from plait.tensor.torch_losses import GivenLoss


def reshard(
    engine: Engine | nn.Module,
    optimizer: GivenOptimizers | OptimizerMaker | Sequence[OptimizerMaker],
    plan: Plan,
    mesh: Mesh,
    *,
    loss: GivenLoss | None = None,
    rules: Rules | None = None,
) -> tuple[Engine | None, Any]:
    """Move a run to another plan and mesh, and return the engine and the optimizer that go on with it.

    Called between steps on all ranks of the world, also on those that leave or join; `mesh` is that of `plan`
    and may have some of the ranks (`Mesh(plan, ranks=…)`). Parameters, gradients that there are, optimizer
    state, learning rates and other options, buffers, counters and loss scale move. The optimizer stays the
    same object, so that schedulers go on with it; the old engine can be used no more. Rank 0 prints where
    linears in float8 go on with other scales. A rank that joins gives
    the model (best on the meta device) in place of the engine, a function that makes the optimizer of a list
    of parameter groups in place of the optimizer, and `loss` and `rules` as to `parallelize`. A rank that
    leaves gets (None, None).

    Memory: the shards of both layouts, of which a unit's old ones are freed when it has moved, and what is
    sent and received, at most the largest unit. Communication over all ranks: each element that a rank needs
    and does not hold, once, in all-to-alls for each unit's parameters, gradients and entries of state; as
    text what each rank holds. Raises PlanError on every rank, before anything moves, where the plan does not
    fit the model or the optimizer, or ranks give unlike models or optimizers.
    """
    require_instance("the plan", plan, Plan, "give a plait.Plan", PlanError)
    require_instance("the mesh", mesh, Mesh, "give plait.Mesh(plan)", PlanError)
    mesh.check_plan(plan)
    refuse_unavailable(plan, mesh.device)
    own: ReshardArguments | None = None
    with _raising_on_all_ranks(mesh):
        if isinstance(engine, Engine):
            own = ReshardArguments.of_engine(engine, optimizer)  # type: ignore[arg-type]
        else:
            own = ReshardArguments.joining(engine, optimizer, mesh.device, loss, rules)
    assert own is not None
    texts = all_gather_text(own.report.to_text(), mesh.all_ranks, mesh.device)
    change = _agreed_change(own, [RankReport.from_text(text) for text in texts], plan, mesh)
    return _carried_out(change, own, mesh)


@contextmanager
def _raising_on_all_ranks(mesh: Mesh) -> Iterator[None]:
    """Context: if any rank raises a PlaitError, all raise a PlanError with the first one's text."""
    error = ""
    try:
        yield
    except PlaitError as raised:
        error = str(raised)
    if first := first_nonempty_text(error, mesh.all_ranks, mesh.device):
        raise PlanError(first)


@dataclass(frozen=True)
class _Change:
    """The change that all ranks have agreed on: the new run, and the transfers."""

    after: PlacedBlueprint
    moves: Moves
    reports: Sequence[RankReport]
    places: Mapping[str, TensorLocation]
    optimizers: Sequence[Mapping[str, Any]]
    """Each optimizer of the run: class, groups, and the group of each parameter, over all ranks."""
    numbers: Sequence[Sequence[int]]
    """For each optimizer, which of its groups this rank's are."""
    run_state: Mapping[str, Any]
    seed: int


def _agreed_change(own: ReshardArguments, reports: Sequence[RankReport], plan: Plan, mesh: Mesh) -> _Change:
    """Return the new blueprint, moves and optimizers, agreed on by all ranks. Raises PlanError on all."""
    change: _Change | None = None
    with _raising_on_all_ranks(mesh):
        old = [(rank, one) for rank, one in enumerate(reports) if one.plan is not None]
        _require_alike(old, reports)
        former = old[0][1]
        assert former.plan is not None
        members = {one.place: rank for rank, one in old if one.place is not None}
        before = PlacedBlueprint(_blueprint(own, former.plan, mesh), members)
        after = PlacedBlueprint(_blueprint(own, plan, mesh), dict(enumerate(mesh.members)))
        for one in own.optimizers:
            require_elementwise(one, Partitioning.of(plan, after.blueprint.kinds.values()))
        places = locate_tensors(named(after.blueprint.sequence.layers))
        buffers = [name for name, place in places.items() if place.is_buffer]
        described = [
            merge_optimizers([one.optimizers[k] for _, one in old]) for k in range(len(former.classes))
        ]
        index = next((at for at, (rank, _) in enumerate(old) if rank == mesh.all_ranks.index), None)
        change = _Change(
            after,
            plan_moves(before, after, reports, buffers),
            reports,
            places,
            [merged for merged, _ in described],
            [[] if index is None else numbers[index] for _, numbers in described],
            applicable_order(former.run_state, asdict(former.plan), plan),
            former.seed,
        )
    assert change is not None
    blueprint = change.after.blueprint
    text = fingerprint(
        own.model,
        sequence_of(own.model),
        plan,
        blueprint.layers_per_stage,
        blueprint.schedule,
        blueprint.module_rules,
        own.loss,
        {"device": mesh.device.type},
    )
    remedy = "give a rank that joins the model and the loss of the others"
    require_same_text(text, mesh.all_ranks, mesh.device, doing="plait.reshard", remedy=remedy)
    return change


def _require_alike(old: Sequence[tuple[int, RankReport]], reports: Sequence[RankReport]) -> None:
    """Raise PlanError where no rank has an engine, or the ranks have other plans or optimizers."""
    if not old:
        raise PlanError("plait.reshard was given no engine on any rank: give it on those that have one.")
    first, former = old[0]
    for rank, one in old:
        if one.plan != former.plan:
            raise PlanError(
                f"plait.reshard was given engines of unlike plans on ranks {first} and {rank}: give those of "
                "one run."
            )
    for rank, one in enumerate(reports):
        if list(one.classes) != list(former.classes):
            raise PlanError(
                f"plait.reshard has {' and '.join(former.classes) or 'no optimizer'} on rank {first} and "
                f"{' and '.join(one.classes) or 'none'} on rank {rank}: give the same optimizers on each."
            )


def _blueprint(own: ReshardArguments, plan: Plan, mesh: Mesh) -> Blueprint:
    if own.engine is not None and own.engine.plan == plan:
        return own.engine.blueprint
    return shared_blueprint(own.model, plan, own.rules, mesh.shared_results)


def _carried_out(change: _Change, own: ReshardArguments, mesh: Mesh) -> tuple[Engine | None, Any]:
    """Move everything, and return the new engine and its optimizers; this rank may have none."""
    leaving = None if own.engine is None else LeavingValues(own.engine, own.optimizers)
    dtypes = {key: one.dtype_of(key) for one in reversed(change.reports) for key in one.dtypes}
    options = {
        name: saved["groups"][number]
        for saved in change.optimizers
        for name, number in saved["group_of"].items()
    }
    values = ArrivingValues(change.moves, change.after, change.places, mesh, leaving, options, dtypes)
    if not mesh.has_this_rank:
        values.send_all()
        for optimizer in own.optimizers:
            optimizer.state.clear()
        return None, None
    blueprint = change.after.blueprint
    engine = assemble_engine(own.model, blueprint, mesh, own.loss, values, rules=own.rules, seed=change.seed)
    engine.run_state = change.run_state
    former = next(one.plan for one in change.reports if one.plan is not None)
    if mesh.rank == 0 and (line := linears_change(asdict(former), blueprint.plan)):
        print(line)
    if engine.runtime.balance is not None:
        choices = {path: one for report in change.reports for path, one in report.router_choices.items()}
        engine.runtime.balance.load_uncorrected_choices(choices)
    optimizers = list(own.optimizers)
    for number, saved in enumerate(change.optimizers):
        members = members_of_groups(engine, saved)
        if own.makers:
            optimizers.append(made_optimizer(own.makers[number], engine, saved, members))
        else:
            regroup(optimizers[number], saved, change.numbers[number], members)
            go_on_with(optimizers[number], engine)
        set_state(optimizers[number], engine, saved, values.state)
    return engine, optimizers if own.is_list else next(iter(optimizers), None)
