"""Check of lowered programs: both ranks of a channel have the same message order, and no deadlock occurs.

Neither where a send blocks its rank until the receive is posted (Gloo), nor where each communicator runs its
operations in order on a stream of the GPU (NCCL, see `stream_replay`). Exchanges of tokens between ranks with
experts count, too: the host waits for their sizes within a forward (see `expert_exchanges`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.expert_exchanges import check_exchanges, exchange_calls
from plait.schedules.lowering.messages import SENDS_IN_FLIGHT, Channel
from plait.schedules.lowering.program import (
    NO_EXCHANGES,
    AwaitReceive,
    ExpertExchanges,
    Finish,
    Instruction,
    PostReceive,
    Program,
    ReduceGradient,
    Send,
)
from plait.schedules.lowering.stream_replay import Awaited, Call, Operation, Queued, deadlock_of, first_uses

CollectiveCalls: TypeAlias = Callable[[int, Instruction], Iterable[Call]]
"""Returns what the host of a rank of `pp` queues in an instruction, besides messages."""


def channel_itself(channel: Channel) -> Hashable:
    """Return `channel` itself as the key of its communicator, so that no two channels share one."""
    return channel


def check_programs(
    programs: Sequence[Program],
    exchanges: ExpertExchanges = NO_EXCHANGES,
    *,
    rendezvous: bool = True,
) -> None:
    """Raise ScheduleError if the ranks' programs (instructions) could deadlock, with Gloo or NCCL.

    On a CPU a send is a rendezvous that blocks its rank until the receive is posted; on a GPU the operations
    of a communicator block each other. Without `rendezvous` they are for GPUs only. Each channel must post
    its receives in the order of its sends, and await each posted receive. `exchanges`: of tokens, which the
    ranks of a group have to make in one order.
    """
    channels = _check_channel_order(programs)
    check_exchanges(programs, exchanges)
    if rendezvous:
        _check_rendezvous(programs)
    calls = stream_calls(programs, collectives=_collectives(programs, exchanges))
    cycle = deadlock_of(calls) or deadlock_of(first_uses(calls, channels))  # connected with the engine
    if cycle is not None:
        raise ScheduleError(f"rule 'no deadlock on GPU streams' is broken: {cycle}.")


def stream_calls(
    programs: Sequence[Program],
    communicator_of: Callable[[Channel], Hashable] = channel_itself,
    collectives: CollectiveCalls | None = None,
    ranks: Sequence[int] | None = None,
) -> list[list[Call]]:
    """Return each `pp` rank's communication calls in order: messages, waits for them, and collectives.

    `collectives` gives the collectives, by default the reductions of tied parameters. Collectives along the
    other axes are left out: all ranks along them run the same program, and no host waits for them, but within
    exchanges of tokens. `ranks`: the rank that names each in operations, by default its index along `pp`.
    """
    collectives = _reductions_of_tied(programs) if collectives is None else collectives
    ranks = range(len(programs)) if ranks is None else ranks

    def message(channel: Channel, consumer: Action) -> Operation:
        ends = (ranks[end] for end in channel[:2])
        return Operation(communicator_of(channel), tuple(sorted(ends)), str(consumer))

    return [list(_calls_of(rank, program, message, collectives)) for rank, program in enumerate(programs)]


def tied_units(programs: Sequence[Program]) -> dict[str, tuple[int, ...]]:
    """Return the units (parameters) whose gradients several `pp` ranks all-reduce, with these ranks."""
    reducers: dict[str, list[int]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for instruction in program:
            if isinstance(instruction, ReduceGradient):
                reducers[instruction.unit].append(rank)
    return {unit: tuple(ranks) for unit, ranks in reducers.items() if len(ranks) > 1}


def _collectives(programs: Sequence[Program], exchanges: ExpertExchanges) -> CollectiveCalls:
    """Return a function from rank and instruction to the calls of reductions and exchanges."""
    reductions = _reductions_of_tied(programs)

    def calls(rank: int, instruction: Instruction) -> Iterator[Call]:
        yield from exchange_calls(rank, instruction, exchanges)
        yield from reductions(rank, instruction)

    return calls


def _reductions_of_tied(programs: Sequence[Program]) -> CollectiveCalls:
    """Return a function from rank and instruction to the calls that reduce tied units' gradients."""
    tied = tied_units(programs)
    queued: dict[int, list[Operation]] = defaultdict(list)

    def calls(rank: int, instruction: Instruction) -> Iterator[Call]:
        match instruction:
            case ReduceGradient(unit) if unit in tied:
                queued[rank].append(Operation(tied[unit], tied[unit], f"the reduction of {unit}"))
                yield Queued(queued[rank][-1])
            case Finish():
                yield from map(Awaited, queued.pop(rank, ()))

    return calls


def _calls_of(
    rank: int, program: Program, message: Callable[[Channel, Action], Operation], collectives: CollectiveCalls
) -> Iterator[Call]:
    sends: dict[Channel, deque[Operation]] = defaultdict(deque)
    for instruction in program:
        match instruction:
            case PostReceive(action, peer):
                yield Queued(message((peer, rank, action.kind), action))
            case AwaitReceive(action, peer):
                yield Awaited(message((peer, rank, action.kind), action))
            case Send(action, peer):
                in_flight = sends[rank, peer, action.kind]
                if len(in_flight) == SENDS_IN_FLIGHT:
                    yield Awaited(in_flight.popleft())
                in_flight.append(message((rank, peer, action.kind), _consumer(action)))
                yield Queued(in_flight[-1])
            case Finish():
                yield from (Awaited(one) for in_flight in sends.values() for one in in_flight)
        yield from collectives(rank, instruction)


def _check_rendezvous(programs: Sequence[Program]) -> None:
    """Run the programs, each until it blocks, until none can go on. ScheduleError if one has not ended."""
    counters = [0] * len(programs)
    posted, sent = Counter[Channel](), Counter[Channel]()
    arrived = set[tuple[int, Action]]()

    def run(rank: int, instruction: Instruction) -> bool:
        """Carry out an instruction; return False, and change nothing, where it blocks the rank."""
        match instruction:
            case PostReceive(action, peer):
                posted[peer, rank, action.kind] += 1
            case Send(action, peer):
                channel = rank, peer, action.kind
                if posted[channel] <= sent[channel]:
                    return False
                sent[channel] += 1
                arrived.add((peer, _consumer(action)))
            case AwaitReceive(action):
                return (rank, action) in arrived
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while counters[rank] < len(program) and run(rank, program[counters[rank]]):
                counters[rank] += 1
                moved = True
    rows = zip(programs, counters, strict=True)
    stuck = [f"rank {rank} at {row[at]}" for rank, (row, at) in enumerate(rows) if at < len(row)]
    if stuck:
        raise ScheduleError(f"rule 'no deadlock' is broken: {'; '.join(stuck)} wait for each other.")


def _consumer(sent: Action) -> Action:
    """Return the action that waits for the message of `Send(sent, …)`."""
    return Action(sent.stage + (1 if sent.kind is Kind.F else -1), sent.kind, sent.microbatch)


def _check_channel_order(programs: Sequence[Program]) -> list[Channel]:
    """Return all channels. ScheduleError if sends, receives and waits on a channel do not match."""
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    waiting: dict[Channel, set[Action]] = defaultdict(set)
    for rank, program in enumerate(programs):
        for instruction in program:
            match instruction:
                case Send(action, peer):
                    sends[rank, peer, action.kind].append(_consumer(action))
                case PostReceive(action, peer):
                    receives[peer, rank, action.kind].append(action)
                    waiting[peer, rank, action.kind].add(action)
                case AwaitReceive(action, peer):
                    posted = waiting[peer, rank, action.kind]
                    if action not in posted:
                        _refuse((peer, rank, action.kind), f"{action} is awaited before it is received")
                    posted.remove(action)
    channels = sorted({*sends, *receives})
    for channel in channels:
        if sends[channel] != receives[channel]:
            _refuse(channel, f"sent {_listed(sends[channel])}, received {_listed(receives[channel])}")
        if waiting[channel]:
            _refuse(channel, f"{_listed(sorted(waiting[channel]))} is received and never awaited")
    return channels


def _refuse(channel: Channel, why: str) -> None:
    raise ScheduleError(
        f"rule 'one order per channel' is broken between ranks {channel[0]} and {channel[1]}: {why}."
    )


def _listed(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions)) or "nothing"
