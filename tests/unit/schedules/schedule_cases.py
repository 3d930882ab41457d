"""What the tests of schedules share: short forms of schedules and programs, and random legal schedules."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from plait.schedules.action import Action, Kind
from plait.schedules.program import (
    AwaitReceive,
    ComputeLoss,
    Finish,
    HandOver,
    Instruction,
    KeepOutput,
    PostReceive,
    Program,
    ReduceGradient,
    Release,
    RunLayer,
    SeedGradient,
    Send,
    TakeBatch,
)
from plait.schedules.schedule import Schedule

UNHURRIED = settings(deadline=None)
"""No timing is asserted."""
WORDS: dict[type, str] = {
    TakeBatch: "take",
    HandOver: "hand",
    ComputeLoss: "loss",
    KeepOutput: "keep",
    SeedGradient: "seed",
    Release: "release",
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
    """Any placement of up to two stages a rank, B or I and W, in any order that can run."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placed = [*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=ranks))]
    rank_of = draw(st.permutations(placed))
    fused = draw(st.lists(st.booleans(), min_size=len(rank_of), max_size=len(rank_of)))
    kinds = [(Kind.F, Kind.B) if one else (Kind.F, Kind.I, Kind.W) for one in fused]
    left = [
        Action(stage, kind, microbatch)
        for stage in range(len(rank_of))
        for kind in kinds[stage]
        for microbatch in range(microbatches)
    ]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    choose = draw(st.randoms(use_true_random=False))
    while left:
        action = choose.choice([action for action in left if can_run(action, done, len(rank_of))])
        left.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return Schedule("random", microbatches, tuple(rank_of), tuple(map(tuple, rows)))


def can_run(action: Action, done: set[Action], stages: int) -> bool:
    """Whether everything that an action needs is done; said a second time here, to test the rules by."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch

    def has(stage: int, *kinds: Kind, microbatch: int = microbatch) -> bool:
        return any(Action(stage, kind, microbatch) in done for kind in kinds)

    if kind is not Kind.F and microbatch > 0 and not has(stage, kind, microbatch=microbatch - 1):
        return False
    if kind is Kind.F:
        return stage == 0 or has(stage - 1, Kind.F)
    if kind is Kind.W:
        return has(stage, Kind.I)
    return has(stage, Kind.F) and (stage + 1 == stages or has(stage + 1, Kind.I, Kind.B))
