"""Which policies hang under NCCL's rules: as plait was, and as it is.

.venv/bin/python benchmarks/schedules/deadlocks.py

One process, no GPU: the lowered programs of all ranks are replayed. The table is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import groupby

from plait.engine.blueprint import StepPrograms
from plait.schedules.lowering.check_programs import channel_itself, stream_calls
from plait.schedules.lowering.messages import Channel
from plait.schedules.lowering.program import LoweringSpec, Program
from plait.schedules.lowering.stream_replay import deadlock_of, first_uses
from plait.schedules.named_schedules import POLICIES, policy_schedule

RANKS = range(2, 9)


def of_a_pair(channel: Channel) -> Hashable:
    """What torch makes by itself: one for each two ranks of a group, one group for each direction."""
    sender, receiver, kind = channel
    return kind, min(sender, receiver), max(sender, receiver)


def of_a_group(channel: Channel) -> Hashable:
    """What torch takes where `init_process_group` was given a `device_id`: the group's own."""
    return channel[2]


def hangs(
    programs: Sequence[Program],
    communicator_of: Callable[[Channel], Hashable],
    connected: Collection[Hashable],
) -> str:
    """`HANG` where streams wait for each other, or hosts at communicators that are not connected before."""
    calls = stream_calls(programs, communicator_of)
    stuck = deadlock_of(calls) or deadlock_of(first_uses(calls, connected))
    return "HANG" if stuck else "ok"


def cells(policy: str, ranks: int) -> Iterator[str]:
    """Of training, evaluating and generating: before, before with a `device_id`, and now."""
    made = policy_schedule(policy, ranks, 2 * ranks)
    early = StepPrograms(made, LoweringSpec((1,) * made.stages, {}))
    channels = [(a, b, kind) for kind in "FI" for a in range(ranks) for b in range(ranks)]
    neighbours = {of_a_pair(channel) for channel in channels if channel[0] + 1 == channel[1]}
    for steps, communicator_of, connected in (
        (early, of_a_pair, neighbours),
        (early, of_a_group, set("FI")),
        (early.posting_late(), channel_itself, set(channels)),
    ):
        for programs in (steps.train, steps.evaluate, steps.output_of_one):
            yield hangs(programs, communicator_of, connected)


def table(policies: Iterable[str]) -> Iterator[str]:
    """Yield the rows of the table; numbers of ranks with equal cells share a row."""
    for policy in policies:
        rows = ((ranks, list(cells(policy, ranks))) for ranks in RANKS)
        for same, group in groupby(rows, lambda row: row[1]):
            numbers = [ranks for ranks, _ in group]
            span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
            yield f"| {policy} | {span} | {' | '.join(same)} |"


if __name__ == "__main__":
    heads = [
        f"{when}{mode}"
        for when in ("", "`device_id`: ", "now: ")
        for mode in ("train", "evaluate", "generate")
    ]
    print(f"| policy | pp | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 2) + "|")
    print("\n".join(table(POLICIES)))
