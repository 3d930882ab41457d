"""What the tests of schedules share: short forms of schedules and programs, and random legal schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from plait.schedules.action import Action, Kind
from plait.schedules.lowering.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    Instruction,
    KeepOutput,
    LocalTransfer,
    PostReceive,
    Program,
    ReduceGradient,
    ReleaseBuffers,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.schedules.schedule import Schedule

UNHURRIED = settings(deadline=None)
"""No timing is asserted."""
BRIEF = settings(UNHURRIED, max_examples=min(40, settings().max_examples))
"""Of tests that run several times, with other parameters."""
WORDS: dict[type, str] = {
    TakeBatch: "take",
    LocalTransfer: "hand",
    ComputeLoss: "loss",
    KeepOutput: "keep",
    SeedGradient: "seed",
    ReleaseBuffers: "release",
}


def written(rows: Sequence[str], rank_of: Sequence[int], microbatches: int) -> Schedule:
    """The schedule whose ranks do `rows`, as in `"0F0 0B0"`."""
    actions = tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)
    return Schedule("by hand", microbatches, tuple(rank_of), actions)


def timeline(schedule: Schedule) -> list[str]:
    """One row per rank, where each rank has one stage and its number need not be said: `"F0 F1 B0 B1"`."""
    return [" ".join(f"{action.kind}{action.microbatch}" for action in rank) for rank in schedule.actions]


def word(instruction: Instruction) -> str:
    """An instruction in a word or two: `0F1.2` runs layer 2, `await 1F0<0` waits for rank 0."""
    match instruction:
        case RunLayer(action, layer):
            return f"{action}.{layer}"
        case Send(action, peer):
            return f"send {action}>{peer}"
        case PostReceive(action, peer):
            return f"post {action}<{peer}"
        case AwaitReceive(action, peer):
            return f"await {action}<{peer}"
        case ReduceGradient(unit):
            return f"reduce {unit}"
        case Finish():
            return "finish"
    return f"{WORDS[type(instruction)]} {instruction.action}"


def words(program: Program) -> list[str]:
    return [word(instruction) for instruction in program]


def listed(text: str) -> list[str]:
    """The instructions in `text`, with `;` or line ends between them."""
    return [part.strip() for line in text.splitlines() for part in line.split(";") if part.strip()]


@st.composite
def legal_schedules(draw: st.DrawFn) -> Schedule:
    """Any placement of up to two stages a rank, with any backwards split, in any order that can run."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placed = [*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=ranks))]
    rank_of = draw(st.permutations(placed))
    choose = draw(st.randoms(use_true_random=False))
    split = draw(st.sampled_from([0, 0.5, 1]))
    left = [
        Action(stage, kind, microbatch)
        for stage in range(len(rank_of))
        for microbatch in range(microbatches)
        for kind in ((Kind.F, Kind.I, Kind.W) if choose.random() < split else (Kind.F, Kind.B))
    ]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while left:
        action = choose.choice([action for action in left if can_run(action, done, len(rank_of))])
        left.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return Schedule("random", microbatches, tuple(rank_of), tuple(map(tuple, rows)))


def can_run(action: Action, done: set[Action], stages: int) -> bool:
    """Whether everything that an action needs is done; said a second time here, to test the rules by."""
    return has_its_needs(action, done, stages) and is_due(action, done)


def has_its_needs(action: Action, done: set[Action], stages: int) -> bool:
    """Whether what it starts from is made: on its stage, before it and behind it."""
    stage, kind, microbatch = action

    def has(stage: int, *kinds: Kind) -> bool:
        return any(Action(stage, kind, microbatch) in done for kind in kinds)

    if kind is Kind.F:
        return stage == 0 or has(stage - 1, Kind.F)
    if kind is Kind.W:
        return has(stage, Kind.I)
    return has(stage, Kind.F) and (stage + 1 == stages or has(stage + 1, Kind.I, Kind.B))


def is_due(action: Action, done: set[Action]) -> bool:
    """Whether the micro-batch before had its turn, in what this adds to the sums of the stage."""
    stage, kind, microbatch = action
    sums = {Kind.F: "", Kind.I: "I", Kind.W: "W", Kind.B: "IW"}[kind]
    return microbatch == 0 or all(
        Action(stage, Kind.B, microbatch - 1) in done or Action(stage, Kind(one), microbatch - 1) in done
        for one in sums
    )


def done_by_tokens(made: Schedule) -> list[int]:
    """How many actions of each rank get to run, if each takes its turn as soon as it has what it needs."""
    done: set[Action] = set()
    counts = [0] * made.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(made.actions):
            while counts[rank] < len(row) and has_its_needs(row[counts[rank]], done, made.stages):
                done.add(row[counts[rank]])
                counts[rank] += 1
                moved = True
    return counts


def held_by_intervals(row: Sequence[Action]) -> list[int]:
    """Of each action of a rank: how many chunks of micro-batches are between F and the end of W or B."""
    first = {action[::2]: place for place, action in enumerate(row) if action.kind is Kind.F}
    last = {action[::2]: place for place, action in enumerate(row)}
    return [sum(first[one] <= place <= last[one] for one in first) for place in range(len(row))]


def with_row(made: Schedule, rank: int, row: Iterable[Action]) -> Schedule:
    """`made`, with another row on one rank."""
    return replace(made, actions=(*made.actions[:rank], tuple(row), *made.actions[rank + 1 :]))
