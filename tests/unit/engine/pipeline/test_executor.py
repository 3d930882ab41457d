from __future__ import annotations

import pytest

from plait.engine.pipeline.executor import Executor
from plait.schedules.action import Action
from plait.schedules.lowering.program import Finish, ReduceGradient, TakeBatch

TAKE, REDUCE = TakeBatch(Action.parse("0F0")), ReduceGradient("a")


def test_instructions_run_in_order_and_by_every_supplier() -> None:
    seen: list[tuple[str, object]] = []
    one = {TakeBatch: lambda i: seen.append(("one", i)), Finish: lambda i: seen.append(("one", i))}
    other = {ReduceGradient: lambda i: seen.append(("other", i)), Finish: lambda i: seen.append(("other", i))}
    Executor(one, other).run((TAKE, REDUCE, Finish()))
    assert seen == [("one", TAKE), ("other", REDUCE), ("one", Finish()), ("other", Finish())]


def test_an_exception_says_at_which_instruction_and_keeps_its_type() -> None:
    def fail(instruction: object) -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError) as caught:
        Executor({ReduceGradient: fail}).run((REDUCE,))
    assert caught.value.__notes__ == ["while running ReduceGradient(unit='a')"]


def test_an_instruction_that_nobody_handles_does_not_pass() -> None:
    with pytest.raises(KeyError):
        Executor({}).run((REDUCE,))
