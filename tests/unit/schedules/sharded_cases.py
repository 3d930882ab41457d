"""What the tests of gathering and reducing share: short forms, random shapes, and what units go through."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import schedule_cases
from hypothesis import strategies as st

from plait.plan.parameter_units import UnitTiming
from plait.schedules.action import Kind
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitParameters,
    AwaitScatter,
    GatherParameters,
    Instruction,
    LayerIndex,
    LoweringSpec,
    Program,
    ReduceGradient,
    ReleaseParameters,
    RunLayer,
    ScatterGradient,
)

UNIT_WORDS: dict[type, str] = {
    GatherParameters: "gather",
    AwaitParameters: "await",
    ReleaseParameters: "release",
    AllocateGradient: "open",
    ScatterGradient: "scatter",
    AwaitScatter: "collect",
    ReduceGradient: "reduce",
}
GATHERS = UnitTiming(gathers="each use")
WAYS_TO_SCATTER: tuple[tuple[Literal["never", "last", "each"], bool], ...] = (
    ("never", False),
    ("last", False),
    ("last", True),
    ("each", True),
)
"""When, and whether gradients are opened. Those that stay open are scattered at the end."""


def shardings(*, scatters: bool = False) -> st.SearchStrategy[UnitTiming]:
    """Each way to gather with each way to scatter; or only what `scatters`."""
    return st.builds(
        lambda gathers, way: UnitTiming(gathers, *way),
        st.sampled_from(["never", "once", "each use"]),
        st.sampled_from(WAYS_TO_SCATTER[scatters:]),
    )


def words(program: Program) -> list[str]:
    """As `schedule_cases.words`; `await a` waits for parameters of unit a, `collect a` for its scatter."""
    return [
        f"{UNIT_WORDS[type(instruction)]} {instruction.unit}"
        if hasattr(instruction, "unit")
        else schedule_cases.word(instruction)
        for instruction in program
    ]


def without_units(program: Program) -> Program:
    """What is left of a program that knows nothing of units."""
    return tuple(instruction for instruction in program if not hasattr(instruction, "unit"))


EVERY_WAY, SCATTERED = shardings(), shardings(scatters=True)


@st.composite
def shapes(draw: st.DrawFn, stages: int, ways: st.SearchStrategy[UnitTiming] = EVERY_WAY) -> LoweringSpec:
    """Up to three layers a stage, some without parameters, and parameters that several layers share."""
    layers = tuple(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
    places = [LayerIndex(stage, layer) for stage, count in enumerate(layers) for layer in range(count)]
    units = {f"{place.stage}.{place.layer}": (place,) for place in places if draw(st.integers(0, 4))}
    users = st.lists(st.sampled_from(places), min_size=1, max_size=4, unique=True)
    units |= {f"tie {number}": tuple(users) for number, users in enumerate(draw(st.lists(users, max_size=3)))}
    timings = (
        {unit: draw(ways) for unit in units} if draw(st.booleans()) else dict.fromkeys(units, draw(ways))
    )
    return LoweringSpec(layers, units, draw(st.sampled_from([None, True, False])), timings)


def is_use(instruction: Instruction) -> bool:
    """Whether a layer looks at its parameters."""
    return isinstance(instruction, RunLayer) and instruction.action.kind is not Kind.W


def is_weight_work(instruction: Instruction) -> bool:
    return isinstance(instruction, RunLayer) and instruction.action.kind is Kind.W


def units_used(program: Program, shape: LoweringSpec) -> list[tuple[str, ...]]:
    """Of each instruction, the units whose parameters or gradients it needs: those of its layer."""
    found = shape.units_of_layers()
    return [
        found.get(LayerIndex(one.action.stage, one.layer), ()) if isinstance(one, RunLayer) else ()
        for one in program
    ]


@dataclass
class Parameters:
    """Where the parameters of units are while a program runs: nowhere, on their way, or there."""

    under_way: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)

    @property
    def held(self) -> set[str]:
        return self.under_way | self.there

    def follow(self, instruction: Instruction) -> None:
        match instruction:
            case GatherParameters(unit):
                assert unit not in self.held, f"{unit} is gathered twice"
                self.under_way.add(unit)
            case AwaitParameters(unit):
                self.under_way.remove(unit)
                self.there.add(unit)
            case ReleaseParameters(unit):
                self.there.remove(unit)


Sum = tuple[int, int, int]
"""What one micro-batch adds to a gradient: its number, and the stage and layer it comes from."""


@dataclass
class Gradients:
    """What becomes of the gradients of units while a program runs."""

    shape: LoweringSpec
    open: set[str] = field(default_factory=set)
    added: dict[str, list[Sum]] = field(default_factory=dict)
    """Since the last scatter of each unit."""
    under_way: dict[str, list[Sum]] = field(default_factory=dict)
    collected: dict[str, list[Sum]] = field(default_factory=dict)
    scatters: dict[str, list[list[Sum]]] = field(default_factory=dict)
    reduced: list[str] = field(default_factory=list)

    def follow(self, instruction: Instruction, units: Collection[str]) -> None:
        """One instruction; `units` are those of its layer."""
        match instruction:
            case AllocateGradient(unit):
                assert unit not in self.open, f"{unit} is opened twice"
                assert unit not in self.under_way, f"{unit} would be wiped out on its way"
                assert not self.added.get(unit), f"what was added to {unit} would be lost"
                self.open.add(unit)
            case ScatterGradient(unit):
                assert unit not in self.under_way
                self.open.discard(unit)
                self.under_way[unit] = self.added.pop(unit)
                self.scatters.setdefault(unit, []).append(self.under_way[unit])
            case AwaitScatter(unit):
                self.collected.setdefault(unit, []).extend(self.under_way.pop(unit))
            case ReduceGradient(unit):
                assert unit not in self.reduced, f"{unit} is reduced twice"
                assert unit not in self.under_way, f"{unit} is reduced before its shards have come"
                self.reduced.append(unit)
            case RunLayer(action, layer) if action.kind is not Kind.F:
                for unit in units:
                    self._add(instruction, unit, (action.microbatch, action.stage, layer))

    def _add(self, instruction: RunLayer, unit: str, sum: Sum) -> None:
        """`I` may add too, where that need not wait for `W`: it counts with `W`."""
        if instruction.action.kind is Kind.I and self.shape.adds_late:
            return
        assert unit not in self.reduced, f"{unit} was final"
        assert unit not in self.under_way, f"{unit} is on its way"
        assert unit in self.open or not self.shape.timing_of(unit).allocates, f"{unit} is not open"
        if instruction.action.kind is not Kind.I:
            self.added.setdefault(unit, []).append(sum)


def every_sum(program: Program, shape: LoweringSpec) -> Iterator[tuple[str, Sum]]:
    """What has to come together in each unit."""
    for instruction, units in zip(program, units_used(program, shape), strict=True):
        if isinstance(instruction, RunLayer) and instruction.action.kind in (Kind.W, Kind.B):
            for unit in units:
                action = instruction.action
                yield unit, (action.microbatch, action.stage, instruction.layer)
