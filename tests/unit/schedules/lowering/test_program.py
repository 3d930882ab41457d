"""Programs as data: their layers and units, joined layers and segments."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharded_cases import shapes

from plait.plan.parameter_units import UnitTiming
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import (
    INSTRUCTION_TYPES,
    AwaitReceive,
    Finish,
    LayerIndex,
    LoweringSpec,
    Program,
    ReduceGradient,
    RunLayer,
    in_groups,
    joined_layers,
    segments_of,
)
from plait.schedules.named_schedules import policy_schedule


def names(rank: int, shape: LoweringSpec) -> list[str]:
    return [part.name for part in segments_of(lower(policy_schedule("1f1b", 2, 1), shape)[rank])]


def test_a_program_is_divided_into_the_named_segments() -> None:
    shape = LoweringSpec((2, 2), {"body": (LayerIndex(0, 0),), "": (LayerIndex(1, 1),)})
    assert names(0, shape) == [
        "receive 0I0",
        "take 0F0",
        "0F0",
        "send 0F0",
        "await 0I0",
        "0B0",
        "reduce body",
        "release 0B0",
        "finish",
    ]
    assert names(1, shape) == [
        "receive 1F0",
        "await 1F0",
        "1F0",
        "seed 1I0",
        "1I0",
        "send 1I0",
        "1W0",
        "reduce the model",
        "1W0",
        "release 1B0",
        "finish",
    ]


def test_gathers_between_the_parts_of_an_action_are_segments_of_their_own() -> None:
    shape = LoweringSpec(
        (2, 1),
        {"a": (LayerIndex(0, 0),), "b": (LayerIndex(0, 1),)},
        timings=dict.fromkeys("ab", UnitTiming("each use", "each", True)),
    )
    assert names(0, shape)[:10] == [
        "gather a",
        "receive 0I0",
        "take 0F0",
        "await a",
        "gather b",
        "0F0",
        "release a",
        "await b",
        "0F0",
        "send 0F0",
    ]


def test_segments_between_two_parts_of_an_action_belong_to_the_action() -> None:
    shape = LoweringSpec((2, 2), {"": (LayerIndex(1, 1),)})
    parts = segments_of(lower(policy_schedule("1f1b", 2, 1), shape)[1])
    assert [
        str(part.within) for part in parts if part.name in ("1I0", "send 1I0", "1W0", "reduce the model")
    ] == [
        "1I0",
        "None",
        "1W0",
        "1W0",
        "1W0",
    ]


@given(st.data())
def test_segments_contain_every_instruction_and_neighbours_have_different_names(data: st.DataObject) -> None:
    order = policy_schedule(data.draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v"])), 2, 3)
    for program in lower(order, data.draw(shapes(order.stages))):
        parts = segments_of(program)
        assert tuple(one for part in parts for one in part.instructions) == program
        assert all(before.name != after.name for before, after in pairwise(parts))
        for part in parts:
            layers = [one for one in part.instructions if isinstance(one, RunLayer)]
            assert {one.action for one in layers} <= {part.computes}
            assert part.within == part.computes or "seed" in part.name or part.computes is None
            assert (part.awaits is not None) == isinstance(part.instructions[0], AwaitReceive)


@pytest.mark.parametrize("kind", INSTRUCTION_TYPES, ids=lambda kind: kind.__name__)
def test_every_instruction_has_a_name(kind: type) -> None:
    values = {"action": Action(1, Kind.F, 3), "unit": "head", "peer": 0, "layer": 0}
    (part,) = segments_of((kind(**{field.name: values[field.name] for field in fields(kind)}),))
    assert part.name.endswith(("1F3", "head", "scales", "finish"))


def test_a_unit_without_a_name_is_the_model() -> None:
    assert segments_of((ReduceGradient(""),))[0].name == "reduce the model"


def program(text: str) -> Program:
    """`0F0:012 r 0B0:21` runs layers 0 to 2 forward, reduces, and runs two of them backward."""
    instructions: list[RunLayer | ReduceGradient] = []
    for word in text.split():
        action, _, layers = word.partition(":")
        if layers:
            instructions += (RunLayer(Action.parse(action), int(layer)) for layer in layers)
        else:
            instructions.append(ReduceGradient(word))
    return (*instructions, Finish())


def groups(text: str, alone: int = -1) -> list[str]:
    instructions = program(text)
    joined = joined_layers(instructions, lambda one: one.layer != alone)
    return [
        f"{group[0].action}:{''.join(str(one.layer) for one in group if isinstance(one, RunLayer))}"
        for group in in_groups(instructions, joined)
        if isinstance(group[0], RunLayer)
    ]


def test_layers_with_nothing_between_them_run_together() -> None:
    assert groups("0F0:012 0B0:210") == ["0F0:012", "0B0:210"]
    assert groups("0F0:012 0I0:210 0W0:210") == ["0F0:012", "0I0:210", "0W0:210"]


def test_an_instruction_between_two_layers_separates_them_in_every_action() -> None:
    assert groups("0F0:012 0B0:21 r 0B0:0") == ["0F0:0", "0F0:12", "0B0:21", "0B0:0"]
    assert groups("0F0:01 g 0F0:2 0B0:210") == ["0F0:01", "0F0:2", "0B0:2", "0B0:10"]
    assert groups("0F0:012 0I0:210 0W0:2 r 0W0:10") == [
        *("0F0:01", "0F0:2", "0I0:2", "0I0:10", "0W0:2", "0W0:10")
    ]


def test_micro_batches_stages_and_evaluations_are_apart() -> None:
    assert groups("0F0:01 0F1:01 1F0:01 0B0:10 0B1:1 r 0B1:0 1B0:10") == [
        *("0F0:01", "0F1:0", "0F1:1", "1F0:01", "0B0:10", "0B1:1", "0B1:0", "1B0:10")
    ]
    assert groups("0F0:01 r 0F1:01") == ["0F0:01", "0F1:01"]


def test_a_layer_may_be_excluded_from_joining() -> None:
    assert groups("0F0:0123 0B0:3210", alone=1) == ["0F0:0", "0F0:1", "0F0:23", "0B0:32", "0B0:1", "0B0:0"]


def test_layers_have_the_units_that_they_use_and_the_last_is_that_of_the_last_stage() -> None:
    first, last = LayerIndex(0, 1), LayerIndex(1, 2)
    spec = LoweringSpec((2, 3), {"table": (LayerIndex(0, 0), last), "own": (last,), "other": (first,)})
    assert spec.last_layer == last
    assert spec.units_of_layers() == {
        LayerIndex(0, 0): ("table",),
        first: ("other",),
        last: ("table", "own"),
    }
    assert (spec.overlap, spec.posts_late, spec.replicated, spec.loss_computes_logits) == (
        None,
        False,
        True,
        False,
    )
