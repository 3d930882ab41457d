"""Layers that run together, of programs written by hand."""

from __future__ import annotations

from plait.schedules.action import Action
from plait.schedules.lowering.program import (
    Finish,
    Program,
    ReduceGradient,
    RunLayer,
    in_groups,
    joined_layers,
)


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
