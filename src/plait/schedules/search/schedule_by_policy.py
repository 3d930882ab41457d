"""`plait.schedule`: returns the schedule of a named policy, or the shortest one within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import get_args

from plait.errors import ScheduleError
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, BlockPolicy, policy_schedule, require_positive
from plait.schedules.schedule import Schedule
from plait.schedules.search.auto_search import Measure, chunk_counts, search_schedule
from plait.schedules.search.local_search import fit_block_policy

AUTO = "auto"
POLICY_NAMES = (*POLICIES, AUTO)
"""The policies that `schedule` takes, by name."""


def schedule(
    policy: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    limit: float | None = None,
    measure: Measure = "makespan",
    rank_of: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule of `policy` for a pipeline of `ranks` ranks.

    `gpipe`, `1f1b`, `interleaved`, `zb-h1` and `zb-h2` are orders, the same for any costs (see
    `plait.schedules.named_schedules` for their sources). `zb-v`, `v-half` and `v-min` are building blocks,
    scheduled for `costs` to the shortest span that their memory allows. `auto` is the schedule with the least
    `measure` that is found for `costs` within `limit`.

    `chunks`: stages per rank; by default 1, for `interleaved` and the building blocks 2, for `auto` the best
    of 1 to 4. `costs`: by default 1 for each of F, I and W, and 0 for a message. `limit`: largest memory of a
    rank, in units of one rank's micro-batch; by default none, for `auto` that of 1f1b: `ranks`. `rank_of`:
    for `auto` only, the required rank of each stage; by default the best placement. Raises ScheduleError for
    an unknown policy, counts below one, chunks that the policy does not allow, and a limit that it exceeds.
    """
    require_policy(policy)
    if measure not in get_args(Measure):
        raise ScheduleError(f"measure is {measure!r}: choose one of {', '.join(get_args(Measure))}.")
    require_positive(ranks=ranks, microbatches=microbatches, **({} if chunks is None else {"chunks": chunks}))
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise ScheduleError(f"costs is {costs!r}: give plait.Costs(F=…, I=…, W=…, comm=…), or None.")
    if rank_of is not None:
        _require_ranks(policy, rank_of)
    if policy == AUTO:
        if rank_of is not None:
            chunks = len(rank_of) // ranks
        counts = chunk_counts(ranks) if chunks is None else (chunks,)
        return search_schedule(
            ranks, microbatches, costs, ranks if limit is None else limit, counts, measure, rank_of
        )
    made = policy_schedule(policy, ranks, microbatches, chunks)
    kind = POLICIES[policy]
    if isinstance(kind, BlockPolicy):
        made = fit_block_policy(made, kind, costs)
    if limit is not None:
        check(made, limit, costs.memory(made.ranks, made.stages))
    return made


def _require_ranks(policy: str, rank_of: Sequence[int]) -> None:
    """Raise ScheduleError unless `rank_of` lists the ranks of stages, and the policy is `auto`."""
    is_list = isinstance(rank_of, Sequence) and not isinstance(rank_of, str)
    if not is_list or not rank_of or not all(type(one) is int and one >= 0 for one in rank_of):
        raise ScheduleError(f"rank_of is {rank_of!r}: give the rank of each stage, such as (0, 1, 1, 0).")
    if policy != AUTO:
        raise ScheduleError(
            f"rank_of = {[*rank_of]} is given for the policy {policy}, which places stages itself: "
            "leave it out, or choose auto."
        )


def default_chunks(policy: str, *, ranks: int, stages: int) -> int:
    """Return the default number of stages per rank; for `auto`, the number that gives `stages` in total."""
    require_policy(policy)
    return max(1, stages // ranks) if policy == AUTO else POLICIES[policy].chunks


def require_policy(policy: str) -> None:
    """Raise ScheduleError for an unknown policy, with the most similar known name."""
    if policy not in POLICY_NAMES:
        near = get_close_matches(str(policy).lower(), POLICY_NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(POLICY_NAMES)}."
        raise ScheduleError(f"there is no schedule policy {policy!r}: {hint}")
