"""`Stragglers`: the callback that names slow ranks, and on request moves layers away from them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from statistics import median
from typing import Any

from plait.app.loop.fastest_work_division import (
    DivisionMemory,
    StepSimulation,
    layer_costs_of,
    memory_limit_of,
    rank_costs,
    replicas_of_ranks,
    simulation_of,
)
from plait.app.loop.rank_times import RankTimes, WindowTimes
from plait.app.loop.slow_ranks import SlowRank, SlowRanks
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.loop.work_division import WorkDivision, agreed_division, why_rows_stay, work_of
from plait.errors import PlanError, listed
from plait.plan.argument_checks import require_flag, require_whole
from plait.proof.optimizer_proof import communicating_class
from plait.ranks.accelerator import is_accelerator
from plait.ranks.text_collectives import all_gather_text
from plait.schedules.action import Kind

OWN_WINDOWS, ELAPSED_WINDOWS = 3, 20
"""The fewest windows after which a rank is named: by its own times, which other processes on its host do not
change; and by those that passed, which they do."""
OF_PEERS = 0.02
"""The part of its peers' time that a kind of action takes at least to be told."""
LEAST_GAIN = 0.03
"""The part of a step that another cut or order has to save."""


class Stragglers(Callback):
    """Names ranks that compute more slowly than others, and on request moves work away from them.

    Every rank measures in all steps for how long it computes (`ActionTimes`), and every few steps all compare
    their medians. Ranks with the same stages do the same work; where there are none, the costs of layers say
    what to expect, and a rank's own first steps. A slow rank is named after three comparisons, one that only
    waits for the cores of its host after twenty. Place it before callbacks that log numbers: it adds
    `slowest_rank` and `slowness`, how many times as long as its peers that rank takes.
    Communication: every few steps an all-gather over the world of 8 bytes for each kind of action of a rank's
    stages, and 24 more; at the start the names of the hosts.
    """

    def __init__(
        self, *, every: int = 4, rebalance: bool = False, memory: DivisionMemory | None = None
    ) -> None:
        """`every`: steps between two comparisons.

        `rebalance`: when a slow rank is named, or no longer is slow, cut the model into stages anew, by
        `plait.reshard`, order actions anew, and let replicas of the model take unlike numbers of rows, where
        that makes simulated steps shorter. `memory`: what a rank holds in bytes under another division, for
        rank 0, which searches it.
        """
        require_whole("Stragglers' every", every)
        require_flag("Stragglers' rebalance", rebalance)
        self._every, self._rebalance, self._memory = every, rebalance, memory
        self._hosts: list[str] = []
        self._places: list[int] = []
        """Of each rank its index along `pp`."""
        self._times: RankTimes | None = None
        self._gathered: Callable[[], WindowTimes] | None = None
        self._own = self._elapsed = SlowRanks([], [], OWN_WINDOWS)
        self._work: WorkDivision | None = None
        """How work is divided, once it was divided anew …"""
        self._layer_costs: Sequence[float] = ()
        """… by these costs of all layers."""
        self._received = Counter[int]()
        """The tokens that each rank has received for its experts in this window."""
        self._saved: Mapping[str, Any] = {}
        self._lines: list[str] = []
        """What is to be told after the step."""
        self._changed: WindowTimes | None = None
        """The window in which slow ranks were found, or were no longer slow, until something is done."""

    @property
    def slow(self) -> Mapping[int, SlowRank]:
        """The ranks that are slow now, by their numbers."""
        return {**self._elapsed.slow, **self._own.slow}

    def begin(self, run: TrainingLoop) -> None:
        """Start to measure; restore the layers per stage of a resumed run that had been rebalanced."""
        if run.mesh.world == 1:
            return
        self._hosts = all_gather_text(socket.gethostname(), run.mesh.group("world"), run.mesh.device)
        self._places = places = [run.mesh.coordinate_of(rank)["pp"] for rank in range(run.mesh.world)]
        costs = rank_costs(layer_costs_of(run.engine).total, run.engine)
        self._own = SlowRanks(places, costs, OWN_WINDOWS)
        self._elapsed = SlowRanks(places, costs, ELAPSED_WINDOWS)
        self._times = RankTimes(run.engine, self._every)
        saved, self._saved = self._saved, {}
        stages = run.engine.schedule.stages
        if saved and saved["pp_of_ranks"] == places and len(saved["layers_per_stage"]) == stages:
            for ranks, name in ((self._own, "own"), (self._elapsed, "elapsed")):
                ranks.slow = {rank: SlowRank(rank, *rest) for rank, *rest in saved[name]}
            now, rows = work_of(run), tuple(saved["rows_of_replicas"])
            if why_rows_stay(run) or not run.may_share_rows(rows):
                rows = now.rows
            work = replace(now, cut=tuple(saved["layers_per_stage"]), rows=rows)
            self._divide_anew(run, work, saved["layer_costs"])

    def replanned(self, run: TrainingLoop) -> None:
        """Start to measure the engine that replaces the run's earlier one."""
        if self._times is not None:
            self._times, self._gathered = RankTimes(run.engine, self._every), None
            self._received.clear()

    def submitted(self, run: TrainingLoop) -> None:
        """Mark the end of the step's submitted work, for the measurement."""
        if self._times is not None:
            self._times.end_step()

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Read the times of the step; every few steps compare the times of all ranks."""
        if self._times is None:
            return
        step = int(row["step"])
        if run.numbers is not None and run.numbers.experts.received:
            self._received.update(dict(enumerate(run.numbers.experts.received)))
        if self._gathered is not None:  # on a GPU those of a window before, for which the host does not wait
            self._compare(run, row, step - 1)
        if self._times.read_step(row["step_seconds"]):
            self._gathered = self._times.gather()
            if not is_accelerator(run.mesh.device):
                self._compare(run, row, step)

    def _compare(self, run: TrainingLoop, row: dict[str, float], last: int) -> None:
        """Compare the ranks in the window that ended with the step `last`, and find which are slow."""
        assert self._gathered is not None
        times, self._gathered = self._gathered(), None
        seconds, first = times.actions, last - self._every + 1
        has_peers = all(map(self._own.peers, range(len(seconds))))
        more = list(map(mul, self._more_tokens(run.mesh.world), self._shares(run)))
        seconds = _divided(seconds, more)
        if has_peers and communicating_class(type(run.optimizer)) is None:  # all of them update as much
            seconds = [sum(both) for both in zip(seconds, times.optimizer, strict=True)]
        own, own_ended = self._own.add(first, seconds, times.step)
        elapsed, elapsed_ended = self._elapsed.add(first, _divided(times.elapsed, more), times.step)
        slowest = max(range(len(seconds)), key=self._own.ratios.__getitem__)
        row["slowest_rank"], row["slowness"] = slowest, round(self._own.ratios[slowest], 4)
        for one in own:
            self._lines.append(f"WARNING: {self._text(run, one, times, 'computes')}.")
        waits = "waits for cores of its host, which others use, and takes"
        for one in (one for one in elapsed if one.rank not in self._own.slow):
            self._lines.append(f"WARNING: {self._text(run, one, times, waits)}.")
        for rank in {*own_ended, *elapsed_ended}.difference(self.slow):
            self._lines.append(f"After step {last}: rank {rank} is no longer slower than others.")
        if self._lines:
            self._changed = times

    def _more_tokens(self, world: int) -> list[float]:
        """Return how many times as many tokens as usual each rank received for its experts, at least 1."""
        received, self._received = self._received, Counter()
        usual = median(received[rank] for rank in range(world))
        return [max(1.0, received[rank] / usual) if usual else 1.0 for rank in range(world)]

    def _text(self, run: TrainingLoop, one: SlowRank, times: WindowTimes, does: str) -> str:
        """Return a log message on a slow rank: which, its host, its slow actions, since when, the cost."""
        at = {axis: at for axis, at in run.mesh.coordinate_of(one.rank).items() if run.mesh.size(axis) > 1}
        where = ", ".join(
            [f"host {self._hosts[one.rank]}", *(f"{axis} {index}" for axis, index in at.items())]
        )
        peers = self._own.peers(one.rank)
        than = "the costs of its layers and the other ranks let expect"
        if peers:
            than = f"rank{'s' * (len(peers) > 1)} {listed([*map(str, peers)])} with the same work"
            if one.rank in self._own.slow:
                than += f" ({_ratios_of_kinds(one.rank, peers, times, self._shares(run))})"
        simulation, work = self._simulation(run, times), work_of(run)
        with_it, without = simulation.seconds(work), simulation.seconds_without_slow_ranks(work)
        return (
            f"rank {one.rank} ({where}) {does} {one.factor:.3g} times as long as {than}, since about step "
            f"{one.since}; by simulation a step's forward and backward take {_milliseconds(with_it)}, and "
            f"{_milliseconds(without)} without slow ranks"
        )

    def _simulation(self, run: TrainingLoop, times: WindowTimes) -> StepSimulation:
        shares = self._shares(run)
        actions = _divided(times.actions, shares)
        own = {rank: one.factor for rank, one in self._own.slow.items()}
        for rank in own:
            if peers := self._own.peers(rank):  # without the optimizer, which no division of work moves
                own[rank] = actions[rank] / median(actions[peer] for peer in peers)
        slow = {rank: one.factor for rank, one in self._elapsed.slow.items()} | own
        longer = [own.get(rank, 1.0) * share for rank, share in enumerate(shares)]
        return simulation_of(run.engine, times.own, longer, slow)

    def _shares(self, run: TrainingLoop) -> list[float]:
        """Return the rows of each rank's replica, divided by those of an equal share."""
        shares = work_of(run).shares
        return [shares[replica] for replica in replicas_of_ranks(run.engine)]

    def after_step(self, run: TrainingLoop) -> None:
        """Log which ranks became slow or recovered; rebalance the run, or log how much that would gain."""
        for line in self._lines:
            run.tell(line)
        self._lines.clear()
        times, self._changed = self._changed, None
        if times is None or run.is_last:
            return
        simulation, now, fixed = self._simulation(run, times), work_of(run), why_rows_stay(run)
        limit = memory_limit_of(run.engine) if self._rebalance else None
        search = partial(
            simulation.fastest, now, moves_rows=not fixed, memory_limit=limit, memory=self._memory
        )
        work = agreed_division(run, search)
        before, after = simulation.seconds(now), simulation.seconds(work)
        if before - after < LEAST_GAIN * before:
            run.tell(_nothing_helps(now, fixed, searched=self._rebalance))
            return
        gain = f"{_milliseconds(after)} in place of {_milliseconds(before)}"
        if (lost := before - simulation.seconds_without_slow_ranks(now)) > 0:
            gain += f": {min(1.0, (before - after) / lost):.0%} of what slow ranks cost"
        changes = work.changes_from(now)
        if not self._rebalance:
            run.tell(f"With {changes} a step would take {gain}, by simulation: rebalance moves them.")
            return
        try:
            self._divide_anew(run, work, simulation.costs.total)
        except PlanError as error:  # on every rank, before anything has moved
            run.tell(f"WARNING: the run was not rebalanced: {error}")
        else:
            run.tell(f"Rebalanced after step {run.done}: {changes}, by simulation {gain}.")

    def _divide_anew(self, run: TrainingLoop, work: WorkDivision, costs: Sequence[float]) -> None:
        """Go on with another division of work; compare ranks by the measured `costs` of layers."""
        cut_anew = work.cut != run.engine.blueprint.layers_per_stage
        if cut_anew:
            run.reshard(replace(run.engine.plan, layers_per_stage=work.cut))
        if work.rows != run.rows_of_replicas:
            run.share_rows(work.rows)
        ordered_anew = work.order.actions != run.engine.schedule.actions
        if ordered_anew:
            run.engine.follow(work.order)
        if ordered_anew or not cut_anew:
            run.replanned()
        self._work, self._layer_costs = work, costs
        for ranks in (self._own, self._elapsed):
            ranks.expect(rank_costs(costs, run.engine), measured=True)

    def state_dict(self) -> Mapping[str, Any]:
        """Return layers per stage, rows, costs and slow ranks of a run that was rebalanced; {} for others."""
        if self._work is None:
            return {}
        slow = {"own": self._own.slow, "elapsed": self._elapsed.slow}
        return {
            "layers_per_stage": list(self._work.cut),
            "rows_of_replicas": list(self._work.rows),
            "layer_costs": list(self._layer_costs),
            "pp_of_ranks": self._places,
            **{name: [[*vars(one).values()] for one in ranks.values()] for name, ranks in slow.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the layers per stage of a `state_dict`, to which `begin` reshards the run."""
        self._saved = state


def _ratios_of_kinds(rank: int, peers: Sequence[int], times: WindowTimes, shares: Sequence[float]) -> str:
    """Return by kind of action, and for the optimizer, a rank's seconds divided by those of its peers.

    `shares`: of each rank, the rows of its replica, divided by those of an equal share.
    """
    kinds: dict[str, Sequence[float]] = {
        str(kind): [times.of_kind(one, kind) / share for one, share in enumerate(shares)] for kind in Kind
    }
    kinds["optimizer"] = times.optimizer
    usual = {name: median(seconds[peer] for peer in peers) for name, seconds in kinds.items()}
    least = OF_PEERS * sum(usual.values())
    return ", ".join(f"{name} {kinds[name][rank] / one:.3g}" for name, one in usual.items() if one > least)


def _divided(seconds: Sequence[float], parts: Sequence[float]) -> list[float]:
    return [one / part for one, part in zip(seconds, parts, strict=True)]


def _nothing_helps(now: WorkDivision, rows_stay: str, *, searched: bool) -> str:
    """Return a log message: no other division of work is shorter. `searched`: also among other orders."""
    if now.order.ranks == 1:
        if rows_stay:
            why = f"all ranks have the same layers, and {rows_stay}"
            return f"No other division of the work can win that back: {why}."
        return "No other division of the rows makes that step shorter."
    cut = ", ".join(map(str, now.cut))
    if searched:
        return f"Stages keep {cut} layers: no other cut, and no other order, is shorter."
    return f"No other cut of the model than {cut} layers makes that step shorter."


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
