from __future__ import annotations

import torch
from torch import nn

from plait.comm.mesh import Mesh
from plait.schedules.program import Finish, ReduceGradient
from plait.sharding.reducer import Reducer
from plait.sharding.unit import Unit, build_unit


def reducer_of(*widths: int) -> Reducer:
    """Alone: every group has one rank."""
    units: dict[str, Unit] = {}
    for number, width in enumerate(widths):
        parameters = dict(nn.Linear(width, 1).named_parameters())
        units[str(number)] = build_unit(
            str(number),
            parameters,
            lambda name, values=parameters: values[name].detach(),
            torch.device("cpu"),
            None,
            dict.fromkeys(parameters, Mesh().group("dp")),
        )
    return Reducer(units)


def add_to_all(reducer: Reducer, value: float) -> None:
    for unit in reducer.units.values():
        for parameter in unit.parameters.values():
            parameter.grad.add_(value)


def step(reducer: Reducer, value: float) -> None:
    handlers = reducer.handlers()
    reducer.begin()
    add_to_all(reducer, value)
    for name in reducer.units:
        handlers[ReduceGradient](ReduceGradient(name))
    handlers[Finish](Finish())


def values_of(reducer: Reducer) -> set[float]:
    return {
        value
        for unit in reducer.units.values()
        for parameter in unit.parameters.values()
        for value in parameter.grad.flatten().tolist()
    }


def test_steps_add_up_until_gradients_are_set_to_none() -> None:
    reducer = reducer_of(2, 3)
    step(reducer, 1.0)
    step(reducer, 2.0)
    step(reducer, 4.0)
    assert values_of(reducer) == {7.0}
    for unit in reducer.units.values():
        for parameter in unit.parameters.values():
            parameter.grad = None
    step(reducer, 8.0)
    assert values_of(reducer) == {8.0}


def test_what_is_carried_is_not_reduced_again() -> None:
    reducer = reducer_of(2)
    step(reducer, 1.0)
    reducer.begin()
    assert values_of(reducer) == {0.0}, "only this step's own gradients go into the sum"
    add_to_all(reducer, 2.0)
    reducer.finish()
    assert values_of(reducer) == {3.0}


def test_after_an_exception_nothing_is_carried_into_the_next_step() -> None:
    reducer = reducer_of(2)
    step(reducer, 1.0)
    reducer.begin()
    add_to_all(reducer, 100.0)
    reducer.clear()
    for parameter in reducer.units["0"].parameters.values():
        parameter.grad = None
    step(reducer, 2.0)
    assert values_of(reducer) == {2.0}
