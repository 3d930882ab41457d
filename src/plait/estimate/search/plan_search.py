"""`plait.plans`, `search`: the fastest plans of a number of ranks that fit; the trade of time for memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import floor
from pathlib import Path
from typing import Unpack

from plait.errors import PlanError
from plait.estimate.prediction.prediction import Prediction, RunDetails, predicted_model
from plait.estimate.search.plan_space import PlanChoices, RankDivision, divisions
from plait.estimate.search.plan_times_and_bounds import ROUNDING, Bounds, PlanSteps
from plait.estimate.time.hardware import Hardware, load_hardware
from plait.estimate.time.step_times import NANOSECOND, step_seconds
from plait.plan.argument_checks import require_instance, require_whole
from plait.plan.axes import PLAN_AXES
from plait.plan.parameter_units import kind_of, timing_of
from plait.plan.plan import Plan, Recompute, Reduce, SequenceParallel, Strategy

ALL = PlanChoices()


@dataclass(frozen=True)
class PlanSearchResult:
    """The fastest plans that fit, and the numbers of plans left out by reason."""

    best: tuple[Prediction, ...]
    """In the order of `plan_sort_key`; their plans leave the cut to `parallelize`, which makes the same."""
    plans: int
    """Plans of the space whose divisions are possible."""
    predicted: int
    """Plans that fit and whose step time was computed."""
    too_large: int
    """Plans that need more memory than a device has."""
    slower: int
    """Plans that a lower bound of their step time rules out; whether they fit was not computed."""
    impossible: Mapping[str, int]
    """Divisions of the ranks that model or batch do not allow, by reason."""


def plan_sort_key(seconds: float, memory: float, plan: Plan) -> tuple[int, int, int]:
    """Return the key by which plans are ordered: step time in nanoseconds, then memory, then used axes.

    `memory`: the most bytes that a rank allocates.
    """
    axes = sum(getattr(plan, axis) > 1 for axis in (*PLAN_AXES, "ep", "etp"))
    return round(seconds / NANOSECOND), round(memory), axes


def plans(
    model: object,
    hardware: Hardware | str | Path,
    *,
    ranks: int,
    batch: int,
    base: Plan | None = None,
    most: int = 10,
    **about: Unpack[RunDetails],
) -> tuple[Prediction, ...]:
    """Return the predictions of the `most` fastest plans of `ranks` ranks that fit the memory, best first.

    `batch`: sequences of a step over all ranks. `base`: a plan with what is not searched, such as the
    precisions, `loss_rows`, `overlap` and `offload`; degrees, micro-batches, strategy, schedule,
    recomputation and sequence parallelism are chosen. `model`, `hardware` and the other arguments are those
    of `plait.predict`. Each result has its `plan`, its `rows` for a data-parallel rank, and the figures that
    `plait.predict` gives for them. No plan that is not returned is faster; of equal times, plans that need
    less memory come first. Empty where none fits.

    There is no communication. Raises PlanError where the ranks cannot be divided, and
    ModelError or ConfigError as `plait.predict` does.
    """
    for name, number in (("ranks", ranks), ("batch", batch), ("most", most)):
        require_whole(name, number, PlanError, least=1)
    if base is not None:
        require_instance("base", base, Plan, "give a plait.Plan", PlanError)
        if base.memory_limit is not None:
            raise PlanError(
                f"base has memory_limit = {base.memory_limit!r}, which a search of plans does not know: "
                "leave it out."
            )
    base = base or Plan()
    known = predicted_model(model, base, about)
    return search(known, load_hardware(hardware), ranks, batch, base=base, most=most).best


def search(
    model: object,
    hardware: Hardware,
    ranks: int,
    batch: int,
    *,
    base: Plan | None = None,
    choices: PlanChoices = ALL,
    most: int = 10,
    alike: Callable[[Prediction, Prediction], bool] | None = None,
) -> PlanSearchResult:
    """Return the `most` fastest plans of `ranks` ranks for `batch` sequences a step over all of them.

    Plans that are `alike`, such as in time, count once: at most ten times `most` are returned then. `base`
    has what is not searched, such as the precisions. A plan is left out only where a lower bound of
    its time is above the times of all that are returned, or a lower bound of its memory above the device's:
    the result is that of predicting every plan. Raises PlanError where the ranks cannot be divided.
    """
    base = base or Plan()
    choices = replace(choices, states=tuple(one for one in choices.states if _is_allowed(base, *one)))
    known = predicted_model(model, base, {})
    found, impossible = divisions(known, ranks, batch, base)
    if not found:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in impossible.most_common())
        raise PlanError(
            f"{ranks} ranks cannot be divided for this model and a batch of {batch}; change the ranks, the "
            f"batch or the sizes. Why, with the number of divisions: {reasons}."
        )
    bounds = Bounds(known, hardware, batch)
    queue = _PlanQueue(bounds, PlanSteps(bounds), base, choices)
    with _collection_paused():
        for division in found:
            queue.add(division)
        best: list[Plan] = []
        unlike, limit = 0, most if alike is None else 10 * most
        while queue.entries and unlike <= most and len(best) < limit:
            plan = queue.next()
            if plan is None:
                continue
            if not best or alike is None or not alike(*map(queue.steps.prediction, (best[-1], plan))):
                unlike += 1
            best.append(plan)
        queue.entries.clear()  # they refer to the queue
    return PlanSearchResult(
        tuple(queue.steps.prediction(plan) for plan in best),
        queue.plans,
        queue.fits,
        queue.too_large,
        queue.plans - queue.too_large - queue.fits,
        impossible,
    )


def _is_allowed(base: Plan, strategy: Strategy, reduce: Reduce) -> bool:
    """Return whether plans like `base` may have this strategy, and reduce gradients at this time."""
    if strategy == "none":
        return base.offload == "none"  # what is offloaded is sharded
    plan = replace(base, dp=2, replicate=1, ep=1, etp=1, strategy=strategy, reduce=reduce)
    return timing_of(plan).scatters != "each" or not kind_of(plan).adds_up_in_less


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause the collection of reference cycles: a search makes millions of objects, and breaks its cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Key = tuple[int, int, int, int, int]
"""Nanoseconds; after all equal bounds 1 for a plan whose time is known, 2 for one whose memory is known too;
the rest of `plan_sort_key`; a number."""


@dataclass
class _PlanQueue:
    """Queue of plans, and of parts of the space of plans, by lower bounds of their step time, least first.

    A part is split when it comes first: a division of the ranks by recomputation and sequence parallelism,
    then by the strategies of state, then by schedule; a plan gets a better bound when its cut is known, and
    then its time. A plan whose time is known and that comes first cannot be beaten by what is left.
    """

    bounds: Bounds
    steps: PlanSteps
    base: Plan
    choices: PlanChoices
    entries: list[tuple[_Key, Callable[[], None] | Plan]] = field(default_factory=list)
    plans: int = 0
    fits: int = 0
    too_large: int = 0
    _numbers: Iterator[int] = field(default_factory=count)

    def next(self) -> Plan | None:
        """Take the most promising entry: return a plan whose time is known, else split the entry (None)."""
        _, entry = heappop(self.entries)
        if isinstance(entry, Plan):
            return entry
        entry()
        return None

    def add(self, division: RankDivision) -> None:
        """Add all plans of a division of the ranks over the axes."""
        schedules = len(division.schedules(len(self.bounds.model.kinds), self.choices))
        states = sum(1 for _ in division.states(self.choices))
        options = [*division.layer_options(self.choices)]
        self.plans += len(options) * states * schedules
        # Recomputation only adds time, and so do gathers of what `keep` keeps; in float8 they may be smaller.
        sequences = {sequence for _, sequence in options}
        if "keep" in sequences and self.base.linears is None:
            sequences.discard("regather")
        quickest = {(min(self.choices.recompute, key=_RECOMPUTE.index), sequence) for sequence in sequences}
        least = min(self._least(self._plan(division, *one)) for one in quickest)
        self._push(least, partial(self._split_division, division, states * schedules))

    def _split_division(self, division: RankDivision, plans: int) -> None:
        """Split by recomputation and sequence parallelism, and drop what no strategy of state makes fit."""
        strategies = {(strategy, reduce) for strategy, reduce, _ in division.states(self.choices)}
        for recompute, sequence in division.layer_options(self.choices):
            plan = self._plan(division, recompute, sequence)
            least = min(
                self.bounds.memory(self._stored(plan, strategy=strategy, reduce=reduce), gathered=False)
                for strategy, reduce in strategies
            )
            if least > self.bounds.hardware.memory:
                self.too_large += plans
            else:
                self._push(self._least(plan), partial(self._split_states, division, plan))

    def _split_states(self, division: RankDivision, plan: Plan) -> None:
        schedules = division.schedules(len(self.bounds.model.kinds), self.choices)
        for strategy, reduce, copies in division.states(self.choices):
            one = self._stored(plan, strategy=strategy, reduce=reduce, replicate=copies)
            if self.bounds.memory(one) > self.bounds.hardware.memory:
                self.too_large += len(schedules)
            else:
                self._push(self.bounds.step_seconds(one), partial(self._split_schedules, one, schedules))

    def _split_schedules(self, plan: Plan, schedules: tuple[tuple[str, int], ...]) -> None:
        for policy, chunks in schedules:
            if self.bounds.memory(plan, policy) > self.bounds.hardware.memory:
                self.too_large += 1
            else:
                least = self.bounds.step_seconds(plan, policy, chunks)
                self._push(least, partial(self._cut, plan, policy, chunks))

    def _cut(self, plan: Plan, policy: str, chunks: int) -> None:
        """Put a plan that fits back with the bound that its cut into stages gives."""
        plan, hardware = replace(plan, schedule=policy, chunks=chunks), self.bounds.hardware
        if self.steps.least_memory(plan) + hardware.reserved > hardware.memory:
            self.too_large += 1
            return
        least = self.steps.step(plan).least
        seconds = step_seconds(self.bounds.timer(plan), least) * ROUNDING + self.bounds.owner_seconds(plan)
        self._push(seconds, partial(self._predict, plan))

    def _predict(self, plan: Plan) -> None:
        """Put a plan back with its step time."""
        seconds = step_seconds(self.bounds.timer(plan), self.steps.step(plan).latest)
        seconds += self.steps.owner_seconds(plan)
        known = self.steps.memory_at_once(plan)
        if known is None:
            self._push(seconds, partial(self._weigh, plan, seconds), known=1)
        else:
            self._add_known(plan, seconds, known)

    def _weigh(self, plan: Plan, seconds: float) -> None:
        """Compute the memory of a plan whose time is known; put it back if it fits."""
        memory, hardware = self.steps.memory(plan), self.bounds.hardware
        if memory + hardware.reserved > hardware.memory:
            self.too_large += 1
        else:
            self._add_known(plan, seconds, memory)

    def _add_known(self, plan: Plan, seconds: float, memory: float) -> None:
        nanoseconds, nbytes, axes = plan_sort_key(seconds, memory, plan)
        self.fits += 1
        heappush(self.entries, ((nanoseconds, 2, nbytes, axes, next(self._numbers)), plan))

    def _plan(self, division: RankDivision, recompute: Recompute, sequence: SequenceParallel) -> Plan:
        """Return a plan of a division with strategy `none`, from which `_stored` makes the others."""
        layers = {"recompute": recompute, "sequence_parallel": sequence}
        return division.plan(self.base, **layers, strategy="none", replicate=1, offload="none")

    def _stored(self, plan: Plan, **state: object) -> Plan:
        """Return `plan` with another strategy and the like, and with the offloading of `base`."""
        return replace(plan, offload=self.base.offload, **state)  # type: ignore[arg-type]

    def _least(self, plan: Plan) -> float:
        """Return a bound for all strategies of state: as if nothing were summed, gathered or updated."""
        return self.bounds.step_seconds(plan, state=False)

    def _push(self, bound: float, split: Callable[[], None], *, known: int = 0) -> None:
        least = round(bound / NANOSECOND) if known else floor(bound / NANOSECOND)
        heappush(self.entries, ((least, known, 0, 0, next(self._numbers)), split))


_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the least time to the most."""


SEARCHES = 8
"""The most searches for less memory."""
STEP = 0.8
"""Of the memory of the fastest plan that was found, what the next search allows."""
OTHERS = 5
"""Plans that each search for less memory finds."""


@dataclass(frozen=True)
class PlanFrontier:
    """The Pareto frontier of step time and peak memory, and the other plans that the searches found."""

    plans: tuple[Prediction, ...]
    """All that were found, each once, in the order of `plan_sort_key`."""
    best: tuple[Prediction, ...]
    """Those for which every plan that was searched is slower or needs more memory, by rising time."""


def search_frontier(first: PlanSearchResult, batch: int, *, base: Plan | None = None) -> PlanFrontier:
    """Return the fastest plans for each of several memory limits, every limit below the one before.

    `first`: a search of all choices for the same `batch` and `base` that found a plan. The next
    search allows `STEP` of the memory that its fastest plan needs, and so on, until no plan fits or
    `SEARCHES` are done. A plan that is faster and smaller than one that a search found would be found before
    it, so that `best` needs only the plans that were found; between two of them there can be others.
    """
    fastest, found = first.best[0], {one.plan: one for one in first.best}
    hardware, model, ranks = fastest.hardware, fastest.model, fastest.plan.world
    for _ in range(SEARCHES):
        less = replace(hardware, memory=hardware.reserved + STEP * fastest.peak_memory)
        result = search(model, less, ranks, batch, base=base, most=OTHERS)
        if not result.best:
            break
        fastest = result.best[0]
        for one in result.best:
            found.setdefault(one.plan, replace(one, hardware=hardware))
    plans = sorted(found.values(), key=lambda one: plan_sort_key(one.step_seconds, one.peak_memory, one.plan))
    best: list[Prediction] = []
    for one in plans:
        if not best or one.peak_memory < best[-1].peak_memory:
            best.append(one)
    return PlanFrontier(tuple(plans), tuple(best))
