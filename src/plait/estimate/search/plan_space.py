"""The plans that a search compares: divisions of the ranks, and the options of each division."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from plait.estimate.prediction.predicted_model import PredictedModel
from plait.plan.axes import PLAN_AXES
from plait.plan.plan import Plan, Recompute, Reduce, SequenceParallel, Strategy
from plait.schedules.named_schedules import POLICIES, BlockPolicy

MOST_IN_BLOCKS = 2048
"""Micro-batches times ranks up to which `zb-v` and `v-half` are compared: of more, such a schedule, which is
fitted to its costs action by action, takes seconds or minutes to make."""


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """The values that a search tries for each field of a plan besides the degrees."""

    schedules: tuple[tuple[str, int], ...] = (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("interleaved", 4),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("v-half", 2),
    )
    """Policies with their stages on each rank; without a pipeline only the first is tried."""
    states: tuple[tuple[Strategy, Reduce], ...] = (
        ("none", "last"),
        ("optimizer", "last"),
        ("gradients", "each"),
        ("full", "last"),
        ("full", "each"),
    )
    """Strategies, and when they reduce gradients; without data-parallel ranks only the first is tried."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[SequenceParallel, ...] = ("none", "keep", "regather")
    """Without `tp` only the first is tried."""


@dataclass(frozen=True)
class RankDivision:
    """A division of the ranks over the axes, and the number of micro-batches."""

    pp: int
    dp: int
    cp: int
    tp: int
    microbatches: int
    ep: int = 1
    etp: int = 1

    def layer_options(self, choices: PlanChoices) -> Iterator[tuple[Recompute, SequenceParallel]]:
        """Yield the pairs of recomputation and sequence parallelism that plans of this division can have."""
        sequence = choices.sequence_parallel if self.tp > 1 else choices.sequence_parallel[:1]
        return product(choices.recompute, sequence)

    def states(self, choices: PlanChoices) -> Iterator[tuple[Strategy, Reduce, int]]:
        """Yield the triples of strategy, `reduce` and `replicate` that plans of this division can have.

        Experts are divided between ranks of the same copy.
        """
        for strategy, reduce in choices.states if self.dp * self.cp > 1 else choices.states[:1]:
            for copies in divisors_of(self.dp) if strategy != "none" else (1,):
                # With as many copies as ranks nothing is sharded: the same as `none`.
                sharded = strategy == "none" or not copies == self.dp > 1 == self.cp
                if sharded and self.dp // copies * self.cp * self.tp % (self.ep * self.etp) == 0:
                    yield strategy, reduce, copies

    def options(self, base: Plan, choices: PlanChoices) -> Iterator[Plan]:
        """Yield a plan for each combination of options but the schedule; other fields are those of `base`."""
        for (recompute, sequence), (strategy, reduce, copies) in product(
            self.layer_options(choices), self.states(choices)
        ):
            yield self.plan(
                base,
                recompute=recompute,
                sequence_parallel=sequence,
                strategy=strategy,
                reduce=reduce,
                replicate=copies,
            )

    def plan(self, base: Plan, **options: object) -> Plan:
        """Return `base` with the degrees and micro-batches of the division, and with `options`."""
        degrees = {axis: getattr(self, axis) for axis in (*PLAN_AXES, "ep", "etp")}
        return replace(base, **degrees, microbatches=self.microbatches, layers_per_stage=None, **options)  # type: ignore[arg-type]

    def schedules(self, layers: int, choices: PlanChoices) -> tuple[tuple[str, int], ...]:
        """Return the schedule policies possible with `layers` layers, each with its stages per rank.

        Without block policies where micro-batches times ranks are more than `MOST_IN_BLOCKS`.
        """
        if self.pp == 1:
            return choices.schedules[:1]
        long = self.pp * self.microbatches > MOST_IN_BLOCKS
        return tuple(
            (policy, chunks)
            for policy, chunks in choices.schedules
            if self.pp * chunks <= layers and not (long and isinstance(POLICIES.get(policy), BlockPolicy))
        )


@lru_cache(maxsize=1024)
def divisors_of(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return (*small, *(number // one for one in reversed(small) if one * one != number))


def divisions(
    model: PredictedModel, ranks: int, batch: int, base: Plan
) -> tuple[list[RankDivision], Counter[str]]:
    """Return the divisions of ranks over axes that model and batch allow, and counts of others by reason.

    `batch`: sequences a step. `base` has what the plans have in common. Of impossible divisions micro-batches
    are not counted. For a model with experts each division is there with each `ep`, up to the number of
    experts, and `etp` of 1 or `tp`.
    """
    possible, impossible = [], Counter[str]()
    for tp in divisors_of(ranks):
        for cp in divisors_of(ranks // tp):
            for pp in divisors_of(ranks // tp // cp):
                dp = ranks // tp // cp // pp
                for ep, etp in _expert_degrees(model.experts, dp * cp * tp, tp):
                    division = RankDivision(pp, dp, cp, tp, 1, ep, etp)
                    reason = _reason(model, division, batch, base)
                    if reason is not None:
                        impossible[reason] += 1
                        if (ep, etp) == (1, 1):  # the same for others
                            break
                        continue
                    possible += [replace(division, microbatches=count) for count in divisors_of(batch // dp)]
    return possible, impossible


def _expert_degrees(experts: int, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield `ep` and `etp` that divide the `ranks` of a stage, 1 and 1 first; without experts only those."""
    if not experts:
        yield 1, 1
        return
    for etp in dict.fromkeys((1, tp)):
        yield from ((ep, etp) for ep in divisors_of(ranks // etp) if ep <= experts)


def _reason(model: PredictedModel, division: RankDivision, batch: int, base: Plan) -> str | None:
    """Return why a division is impossible, or None."""
    degrees = {axis: getattr(division, axis) for axis in ("dp", "cp", "tp", "ep", "etp")}
    if (reason := model.undivided(replace(base, **degrees))) is not None:
        return reason
    if division.pp > len(model.kinds):
        return "pp is more than the layers"
    if batch % division.dp:
        return "dp does not divide the batch"
    return None
