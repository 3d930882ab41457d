"""A rank dies in the middle of an action: the others' errors name it, and what they wait for."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.mortal import Ending, MortalRanks, Run
from plait.engine import Engine
from plait.engine.blueprint import build_blueprint
from plait.plan.plan import Plan
from plait.rules import Rules, column, row
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import Instruction, Program, RunLayer
from plait.tensor.autograd import deferred_weight_gradients

HIDDEN, MICROBATCHES = 4, 4
RULES: Rules = {"*.up": column, "*.down": row}
LIMIT = 25.0
"""Seconds for all ranks to end: far less than the patience of the groups that are not told to be hasty."""

When = Literal["before", "inside", "after"]


class Fate(NamedTuple):
    """Where a rank dies: at an instruction of its program, by a signal."""

    rank: int
    position: int
    when: When
    signal: signal.Signals = signal.SIGKILL


class Doom:
    """Strikes at its place in a step, once it is armed."""

    def __init__(self) -> None:
        self.fate: Fate | None = None
        self.position = 0
        self.is_inside = False

    def reach(self, *, when: When) -> None:
        """Before or after an instruction."""
        at = self.fate is not None and self.position == self.fate.position
        self.is_inside = at and when == "before" and self.fate.when == "inside"
        if at and self.fate.when == when:
            self.strike()
        self.position += when == "after"

    def inside(self) -> None:
        """In the middle of a layer's work."""
        if self.is_inside:
            self.strike()

    def __deepcopy__(self, memo: object) -> Doom:
        return self

    def strike(self) -> None:
        assert self.fate is not None
        os.kill(os.getpid(), self.fate.signal)


class Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, doom: Doom) -> Tensor:
        ctx.doom = doom
        doom.inside()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.doom.inside()
        return gradient, None


class Layer(nn.Module):
    """Two linears, which can be cut over tp, and a place to die between them."""

    def __init__(self, doom: Doom) -> None:
        super().__init__()
        self.up, self.down, self.doom = nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN), doom

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(Touch.apply(self.up(value), self.doom))  # type: ignore[no-untyped-call]


def build(doom: Doom) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(doom) for _ in range(8)))


class Squares:
    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> float:
        return float(targets.numel())


def make(**options: Any) -> Plan:
    return Plan(microbatches=MICROBATCHES, **options)


PLANS = {
    **{schedule: make(pp=2, schedule=schedule) for schedule in ("1f1b", "zb-h1", "zb-v")},
    **{f"{schedule}-pp4": make(pp=4, schedule=schedule) for schedule in ("1f1b", "zb-h1", "zb-v")},
    "tp": make(tp=2),
    "tp-pp": make(tp=2, pp=2, schedule="zb-h1"),
    "full": make(dp=2, strategy="full", reduce="each"),
    "full-pp": make(pp=2, dp=2, strategy="full"),
}


def engine_of(plan: Plan, doom: Doom, timeout: float) -> Engine:
    rules = RULES if plan.tp > 1 else None
    mesh = plait.Mesh(plan, timeout=timeout) if plan.world > 1 else plait.Mesh()
    return plait.parallelize(build(doom), plan, mesh, Squares(), rules=rules)


def step(engine: Engine) -> None:
    batch = torch.ones(2 * MICROBATCHES, HIDDEN)
    engine.forward_backward(batch, batch)


def warm() -> None:
    """What every rank needs is loaded once; no backward, after which a process cannot be forked."""
    batch = torch.ones(2 * MICROBATCHES, HIDDEN)
    engine_of(Plan(microbatches=MICROBATCHES), Doom(), 1.0).evaluate(batch, batch)


def kind_of(instruction: Instruction) -> str:
    """The kinds that are told apart: layers run `F`, `I`, `W` and `B`."""
    kind = type(instruction).__name__
    return f"{kind} {instruction.action.kind.value}" if isinstance(instruction, RunLayer) else kind


@cache
def programs_of(name: str) -> tuple[Program, ...]:
    plan = PLANS[name]
    blueprint = build_blueprint(build(Doom()), plan, RULES if plan.tp > 1 else None)
    return tuple(lower(blueprint.schedule, blueprint.lowering_spec))


@cache
def kinds_of(name: str, rank: int) -> dict[str, int]:
    """The kinds of instructions in a rank's program, each with the place of the one in the middle."""
    program = programs_of(name)[rank // (PLANS[name].dp * PLANS[name].tp)]
    places: dict[str, list[int]] = {}
    for place, instruction in enumerate(program):
        places.setdefault(kind_of(instruction), []).append(place)
    return {kind: found[len(found) // 2] for kind, found in places.items()}


# ── what runs in each rank ──


def fall(plan: Plan, fate: Fate, timeout: float) -> str:
    """A step that goes well, then one in which one rank dies."""
    doom = Doom()
    engine = engine_of(plan, doom, timeout)
    if engine.mesh.rank == fate.rank:
        surround(engine, doom)
    step(engine)
    if engine.mesh.rank == fate.rank:
        doom.fate, doom.position = fate, 0
    step(engine)
    return "went on"


def surround(engine: Engine, doom: Doom) -> None:
    """Let `doom` see the beginning and the end of each instruction, and of weight work."""
    executor = engine._runner._executor
    original_calls = executor._calls

    def calls(group: Program) -> list[Any]:
        before, after = (partial(doom.reach, when=when) for when in ("before", "after"))
        return [(before, group[0]), *original_calls(group), (after, group[0])]

    patch.object(executor, "_calls", calls).start()
    patch.object(executor, "_may_join", None).start()  # each instruction by itself
    original = deferred_weight_gradients.add_product

    def add_product(*arguments: Tensor) -> None:
        doom.inside()
        original(*arguments)

    patch.object(deferred_weight_gradients, "add_product", add_product).start()


# ── which rank, where ──


class Case(NamedTuple):
    plan: str
    rank: int
    kind: str
    when: When


def every_case() -> list[Case]:
    """Each kind of instruction in each plan, of each of two ranks, or of four by turns; all times."""
    found = []
    for name, plan in PLANS.items():
        kinds = sorted({kind for rank in range(plan.world) for kind in kinds_of(name, rank)})
        for number, kind in enumerate(kinds):
            able = [rank for rank in range(plan.world) if kind in kinds_of(name, rank)]
            ranks = able if plan.world == 2 else [able[number % len(able)]]
            found += [Case(name, rank, kind, when) for rank in ranks for when in times_of(kind)]
    return found


def times_of(kind: str) -> tuple[When, ...]:
    return ("before", "inside", "after") if kind.startswith("RunLayer") else ("before", "after")


def some_cases() -> list[Case]:
    """Each kind of instruction once, layers also in the middle; plans, ranks and times by turns."""
    cases, used = every_case(), Counter[Any]()
    found = []
    for kind in dict.fromkeys(case.kind for case in cases):
        for inside in (False, True) if kind.startswith("RunLayer") else (False,):
            able = [case for case in cases if case.kind == kind and (case.when == "inside") == inside]
            chosen = min(able, key=lambda case: (used[case.plan], used[case.when], used[case.rank]))
            used.update([chosen.plan, chosen.when, chosen.rank])
            found.append(chosen)
    return found


SOME = some_cases()
PAIRS = list(zip(SOME[::2], SOME[1::2], strict=True))
"""Two at once: most of a run is the half second in which nothing is heard of the rank that was killed."""
CASES = [
    pytest.param(
        pair,
        id=" and ".join("-".join(map(str, case)) for case in pair),
        marks=[pytest.mark.full] if number % 16 else [],
    )
    for number, pair in enumerate(PAIRS)
] + [
    pytest.param((case,), id="-".join(map(str, case)), marks=pytest.mark.full)
    for case in every_case()
    if case not in SOME
]
STOPPED = (Case("zb-h1-pp4", 2, "Send", "after"), Case("full", 0, "AwaitParameters", "before"))

# ── the tests ──


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[MortalRanks]:
    ranks = MortalRanks(warm)
    yield ranks
    ranks.close()


def fall_at_once(ranks: MortalRanks, cases: tuple[Case, ...], fates: list[Fate], timeout: float) -> Any:
    plans = [PLANS[case.plan] for case in cases]
    runs = [Run(fall, (plan, fate, timeout), plan.world) for plan, fate in zip(plans, fates, strict=True)]
    return ranks.run_at_once(runs, LIMIT)


@pytest.mark.parametrize("cases", CASES)
def test_other_ranks_name_a_killed_rank_at_once(mortal_ranks: MortalRanks, cases: tuple[Case, ...]) -> None:
    """At once: nobody waits for the timeout of the mesh."""
    fates = [fate_of(case) for case in cases]
    for endings, fate in zip(fall_at_once(mortal_ranks, cases, fates, 4 * LIMIT), fates, strict=True):
        check(endings, fate)


@pytest.mark.full
@pytest.mark.parametrize(
    "cases",
    [STOPPED, (Case("tp", 1, "RunLayer B", "inside"),)],
    ids=lambda cases: " and ".join(f"{case.plan}-{case.kind}" for case in cases),
)
def test_other_ranks_name_a_stopped_rank_after_the_timeout(
    mortal_ranks: MortalRanks, cases: tuple[Case, ...]
) -> None:
    """No connection is closed: only the timeout tells. `unit/ranks` has a quick test of each transport."""
    timeout = 3.0
    fates = [fate_of(case)._replace(signal=signal.SIGSTOP) for case in cases]
    for endings, fate in zip(fall_at_once(mortal_ranks, cases, fates, timeout), fates, strict=True):
        check(endings, fate)
        told = [ending.text for ending in endings if ending.text is not None]
        assert any(f"no answer within {timeout:g} s" in text for text in told), told


def fate_of(case: Case) -> Fate:
    return Fate(case.rank, kinds_of(case.plan, case.rank)[case.kind], case.when)


AWAITED = re.compile(r"\b\d+[FIWB]\d+\b|\((parameters|gradient) of \d+\)|the mean loss")
"""An action, a unit, or what comes behind the last action."""


def check(endings: list[Ending], fate: Fate) -> None:
    """Every other rank ended by itself, with an error that says whom it waited for and who was to blame."""
    blame = re.compile(
        rf"(from|to reach|with) rank {fate.rank}\b|with {fate.rank}( \([^)]*\))?: |"
        rf"\brank {fate.rank} (ended first|is doing)"
    )
    for rank, (text, seconds) in enumerate(endings):
        told = f"rank {rank} after {seconds:.1f} s: {text}"
        if rank == fate.rank:
            assert text is None, told
        else:
            assert text is not None, told
            assert text.startswith("CommunicationError: "), told
            assert f"rank {rank} waits for " in text, told
            assert AWAITED.search(text), told
            assert blame.search(text), told
