"""Deadlocks under NCCL's rules: programs by hand, every policy, and against a simulation in random order."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import BRIEF, UNHURRIED, legal_schedules

from parity.mesh_calls import SHARDINGS, WORDS, deadlock_in, mesh_of_schedule
from parity.pairs import in_quick
from plait.engine.blueprint import StepPrograms
from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.check_programs import channel_itself, check_programs, stream_calls
from plait.schedules.lowering.expert_exchanges import exchange_calls
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.messages import Channel, channels_of
from plait.schedules.lowering.program import (
    AwaitReceive,
    ExpertExchanges,
    Finish,
    LayerIndex,
    LoweringSpec,
    PostReceive,
    Program,
    ReduceGradient,
    RunLayer,
)
from plait.schedules.lowering.stream_replay import (
    Awaited,
    Call,
    Operation,
    Queued,
    Read,
    deadlock_of,
    first_uses,
)
from plait.schedules.named_schedules import POLICIES, forward_only, policy_schedule
from plait.schedules.schedule import Schedule

PAIR = (0, 1)
UP, DOWN = Operation("a", PAIR, "up"), Operation("a", PAIR, "down")
Communicators = Callable[[Channel], Hashable]
IN_EACH_FIRST_LAYER = ExpertExchanges({LayerIndex(stage, 0) for stage in range(64)})


def on(communicator: str, operation: Operation) -> Operation:
    return operation._replace(communicator=communicator)


def test_receives_that_are_posted_first_hold_up_the_sends_behind_them() -> None:
    """Of one communicator; each rank receives what the other sends next."""
    first = [Queued(DOWN), Queued(UP), Awaited(DOWN)]
    last = [Queued(UP), Queued(DOWN), Awaited(UP)]
    assert deadlock_of([first, last]) == (
        "rank 1 has down behind up on one communicator; rank 0 has up behind down on one communicator"
    )
    other = on("b", DOWN)
    assert deadlock_of([[Queued(other), Queued(UP)], [Queued(UP), Queued(other), Awaited(UP)]]) is None


def test_a_stream_wait_delays_later_operations_and_not_the_host() -> None:
    down = on("b", DOWN)
    first: list[Call] = [Queued(down), Awaited(down), Queued(UP)]
    assert deadlock_of([first, [Queued(UP), Queued(down)]]) is None
    assert deadlock_of([first, [Queued(UP), Awaited(UP), Queued(down)]]) == (
        "rank 1 starts down after its wait for up; rank 0 starts up after its wait for down"
    )


def test_a_collective_that_a_rank_never_starts_is_named() -> None:
    assert deadlock_of([[Queued(UP), Awaited(UP)], []]) == "rank 1 never starts up"


def test_collectives_of_several_ranks_in_two_orders_deadlock() -> None:
    ranks = (0, 1, 2)
    one, two = Operation("x", ranks, "one"), Operation("x", ranks, "two")
    right = [Queued(one), Queued(two)]
    assert deadlock_of([right, right, right]) is None
    assert deadlock_of([right, right, right[::-1]]) == (
        "rank 2 has one behind two on one communicator; rank 0 has two behind one on one communicator"
    )
    assert deadlock_of([right, right, [Queued(on("y", two)), Queued(one)]]) is not None


def test_hosts_block_at_the_first_use_of_a_communicator() -> None:
    """In a circle, although all operations would complete."""
    down = on("b", DOWN)
    calls: list[list[Call]] = [[Queued(UP), Queued(down)], [Queued(down), Queued(UP)]]
    assert deadlock_of(calls) is None
    assert deadlock_of(first_uses(calls)) == (
        "rank 1 starts the connection of a after its wait for the connection of b; "
        "rank 0 starts the connection of b after its wait for the connection of a"
    )
    assert deadlock_of(first_uses(calls, {"a"})) is None


# ── programs ──


def of_a_pair(channel: Channel) -> Hashable:
    """The communicator that torch makes by itself: for both directions between two ranks."""
    sender, receiver, kind = channel
    return kind, min(sender, receiver), max(sender, receiver)


def of_a_group(channel: Channel) -> Hashable:
    """The one that torch takes where `init_process_group` was given a `device_id`."""
    return channel[2]


def programs_of(policy: str, pp: int, *, late: bool = False) -> list[list[tuple[Program, ...]]]:
    """The programs that train, evaluate, and generate a token; `late`: posted one action ahead."""
    made = policy_schedule(policy, pp, 2 * pp)
    spec = LoweringSpec((1,) * made.stages, {}, posts_late=late)
    forwards = forward_only(made.rank_of, ranks=pp, microbatches=2 * pp)
    one = forward_only(made.rank_of, ranks=pp, microbatches=1)
    return [lower(made, spec), lower(forwards, spec), lower(one, spec, "output")]


DEADLOCKS = Path(__file__).parents[4] / "benchmarks" / "schedules" / "deadlocks.py"
"""The script of the table which policies hung, with fewer communicators than channels."""


@pytest.mark.parametrize("policy", in_quick(POLICIES, "1f1b"))
def test_the_benchmarks_readme_names_the_policies_that_deadlock(policy: str) -> None:
    """As the script finds; today none does."""
    table = runpy.run_path(str(DEADLOCKS))["table"]
    told = DEADLOCKS.with_name("README.md").read_text().splitlines()
    rows = list(table([policy]))
    assert rows == [
        line for line in told if line.startswith(f"| {policy} | ") and ("ok" in line or "HANG" in line)
    ]
    assert all(row.endswith("| ok | ok | ok |") for row in rows)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_communicator_for_each_channel_is_enough(policy: str) -> None:
    """With late receives; those posted early are checked above, when they are lowered."""
    for pp in range(2, 9):
        for programs in programs_of(policy, pp, late=True):
            assert deadlock_of(stream_calls(programs, channel_itself)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_late_receives_wait_for_one_action(policy: str) -> None:
    """On NCCL a posted receive occupies its GPU: at most one action runs before the one that takes it."""
    for programs in programs_of(policy, 4, late=True):
        for program in programs:
            since: dict[Action, set[tuple[int, int, bool]]] = {}
            for instruction in program:
                match instruction:
                    case PostReceive(action):
                        since[action] = set()
                    case AwaitReceive(action):
                        assert len(since.pop(action)) <= 1
                    case RunLayer(action):
                        for ran in since.values():
                            ran.add((action.stage, action.microbatch, action.kind is Kind.F))
            assert not since


def test_programs_would_hang_with_one_communicator_for_a_pair_of_ranks() -> None:
    (programs, *_) = programs_of("zb-v", 4)
    check_programs(programs)
    told = deadlock_of(stream_calls(programs, of_a_pair))
    assert told is not None
    assert told.startswith("rank 0 has 1F0 behind 7F0 on one")


def test_the_check_refuses_tied_units_that_are_reduced_in_two_orders() -> None:
    """Their communicators are connected then: the hosts would wait for each other."""
    one, other = ReduceGradient("one"), ReduceGradient("other")
    check_programs([(one, other, Finish()), (one, other, Finish()), (other, Finish())])
    with pytest.raises(ScheduleError, match=r"rank 1 starts the connection of \(0, 1\) after its wait for"):
        check_programs([(one, other, Finish()), (other, one, Finish()), (other, Finish())])


@pytest.mark.parametrize("policy", POLICIES)
def test_channels_are_those_that_programs_use(policy: str) -> None:
    made = policy_schedule(policy, 4, 4)
    calls = stream_calls(lower(made, LoweringSpec((1,) * made.stages, {})), channel_itself)
    used = {call.operation.communicator for row in calls for call in row if isinstance(call, Queued)}
    assert set(channels_of(made)) == used


def test_a_host_that_reads_queues_nothing_more_until_it_has_read() -> None:
    """The result that it reads comes after a message, which the other rank sends when it has another one."""
    counts, down = Operation("experts", (0,), "counts"), on("b", DOWN)
    asks: list[Call] = [Queued(down), Awaited(down), Queued(counts)]
    other: list[Call] = [Queued(UP), Awaited(UP), Queued(down)]
    assert deadlock_of([[Queued(UP), *asks, Read(counts)], other]) is None
    assert deadlock_of([[Queued(counts), Read(counts), Queued(UP), *asks[:2]], other]) is None
    assert deadlock_of([[*asks, Read(counts), Queued(UP)], other]) == (
        "rank 1 starts down after its wait for up; rank 0 starts up after its wait for down"
    )


# ── against a simulation ──


def completes(calls: Sequence[Sequence[Call]], random: Random) -> bool:
    """Whether all calls complete, with hosts and streams of all ranks in random order."""
    hosts = [list(row) for row in calls]
    computes: list[list[Operation | None]] = [[] for _ in calls]  # None: the end of a wait's place
    streams: dict[tuple[int, Hashable], list[tuple[Operation, int]]] = {}
    queued, passed, over = [0] * len(calls), [0] * len(calls), set[Operation]()
    reading = [0] * len(calls)

    def may_start(rank: int, one: Operation) -> bool:
        queue = streams.get((rank, one.communicator), [])
        return bool(queue) and queue[0][0] == one and queue[0][1] <= passed[rank]

    def moves() -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for rank, host in enumerate(hosts):
            if host and passed[rank] >= reading[rank]:
                found.append(lambda rank=rank: step(rank))
            if computes[rank] and computes[rank][0] in over:
                found.append(lambda rank=rank: ended(rank))
        for (rank, _), queue in streams.items():
            if (
                queue
                and rank == queue[0][0].ranks[0]
                and all(may_start(each, queue[0][0]) for each in queue[0][0].ranks)
            ):
                found.append(lambda one=queue[0][0]: complete(one))
        return found

    def step(rank: int) -> None:
        call = hosts[rank].pop(0)
        if isinstance(call, Read):
            reading[rank] = queued[rank] + 1
        if isinstance(call, Queued):
            streams.setdefault((rank, call.operation.communicator), []).append((call.operation, queued[rank]))
        else:
            computes[rank].append(call.operation)
            queued[rank] += 1

    def ended(rank: int) -> None:
        computes[rank].pop(0)
        passed[rank] += 1

    def complete(one: Operation) -> None:
        over.add(one)
        for rank in one.ranks:
            streams[rank, one.communicator].pop(0)

    while found := moves():
        random.choice(found)()
    return not any(hosts) and not any(computes) and not any(streams.values())


@UNHURRIED
@given(
    legal_schedules(),
    st.sampled_from([channel_itself, of_a_pair, of_a_group]),
    st.randoms(use_true_random=False),
)
def test_stream_replay_agrees_with_a_simulation_in_random_order(
    made: Schedule, communicator_of: Communicators, random: Random
) -> None:
    programs = lower(made, LoweringSpec((1,) * made.stages, {}))
    for exchanges in (ExpertExchanges(), IN_EACH_FIRST_LAYER):
        collectives = partial(exchange_calls, exchanges=exchanges)
        calls = stream_calls(programs, communicator_of, collectives)
        assert (deadlock_of(calls) is None) == completes(calls, random)


@UNHURRIED
@given(legal_schedules())
def test_every_legal_schedule_runs_with_channels_of_their_own(made: Schedule) -> None:
    steps = StepPrograms(made, LoweringSpec((1,) * made.stages, {}, exchanges=IN_EACH_FIRST_LAYER))
    collectives = partial(exchange_calls, exchanges=IN_EACH_FIRST_LAYER)
    for programs in (steps.train, steps.posting_late().train):
        assert deadlock_of(stream_calls(programs, channel_itself)) is None
        assert deadlock_of(stream_calls(programs, channel_itself, collectives)) is None


@BRIEF
@given(
    legal_schedules(),
    *(st.integers(1, 2) for _ in range(3)),
    st.sampled_from([*SHARDINGS]),
    st.sampled_from([*WORDS]),
)
def test_every_legal_schedule_runs_on_every_mesh(
    made: Schedule, tp: int, shard: int, replicate: int, sharding: str, words: str
) -> None:
    """With the collectives of all axes, through training, evaluation and generation."""
    mesh = mesh_of_schedule(made, tp=tp, shard=shard, replicate=replicate, sharding=sharding, words=words)
    assert deadlock_in(mesh) is None
