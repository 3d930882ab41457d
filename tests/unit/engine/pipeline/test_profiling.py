"""What looks at a rank from outside reads the names of actions: stacks, and torch's profiler."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from plait.engine.pipeline.executor import REMEMBERED_PROGRAMS, Executor, profiling
from plait.schedules.action import Action
from plait.schedules.lowering.program import (
    Finish,
    Program,
    ReduceGradient,
    RunLayer,
    Segment,
    Send,
    segments_of,
)

FORWARD = Action.parse("1F3")
PROGRAM: Program = (
    RunLayer(FORWARD, 0),
    RunLayer(FORWARD, 1),
    Send(FORWARD, 0),
    ReduceGradient("a"),
    Finish(),
)
NAMES = ["1F3", "send 1F3", "reduce a", "finish"]


def caller() -> tuple[str, str]:
    """Of the function that called this one's caller: its name, short and long."""
    code = sys._getframe(2).f_code
    return code.co_name, code.co_qualname


def test_the_python_stack_names_the_running_instruction() -> None:
    seen: list[tuple[str, str]] = []

    def handler(instruction: object) -> None:
        seen.append(caller())

    Executor(dict.fromkeys([RunLayer, Send, ReduceGradient, Finish], handler)).run(PROGRAM)
    assert seen == [(name, name) for name in ["1F3", *NAMES]]


def test_a_traceback_names_the_action() -> None:
    def fail(instruction: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        Executor({RunLayer: fail}).run(PROGRAM[:1])
    assert "in 1F3\n" in "".join(traceback.format_exception(caught.value))


def test_a_layer_is_bound_once_and_handlers_follow_it() -> None:
    seen: list[str] = []

    def bind(instructions: Sequence[RunLayer]) -> Callable[[], None]:
        seen.append("bound")
        return lambda: seen.append(f"layer {instructions[0].layer}")

    executor = Executor({RunLayer: lambda i: seen.append("handler")}, bind_layers=bind)
    executor.run(PROGRAM[:1])
    executor.run(program := PROGRAM[:1])
    executor.run(program)
    assert seen == ["bound", "layer 0", "handler"] * 2 + ["layer 0", "handler"]


def test_programs_are_not_mixed_up_and_not_remembered_for_ever() -> None:
    seen: list[object] = []
    executor = Executor({ReduceGradient: seen.append})
    programs: list[Program] = [(ReduceGradient(str(number)),) for number in range(REMEMBERED_PROGRAMS + 3)]
    for program in [*programs, *programs]:
        executor.run(program)
    assert seen == [program[0] for program in [*programs, *programs]]
    assert len(executor._known) == REMEMBERED_PROGRAMS


def test_the_executor_enters_a_given_context_around_each_segment() -> None:
    seen: list[str] = []

    @contextmanager
    def around(part: Segment) -> Iterator[None]:
        seen.append(f"before {part.name}")
        yield
        seen.append(f"after {part.name}")

    executor = Executor(dict.fromkeys([RunLayer, Send, ReduceGradient, Finish], lambda i: seen.append("run")))
    executor.run(PROGRAM, around)
    assert seen[:4] == ["before 1F3", "run", "run", "after 1F3"]
    assert [line for line in seen if "before" in line] == [
        f"before {part.name}" for part in segments_of(PROGRAM)
    ]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 warns always
def test_segments_are_profiler_ranges_while_a_profiler_is_on() -> None:
    executor = Executor(dict.fromkeys([RunLayer, Send, ReduceGradient, Finish], lambda i: torch.zeros(1)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.run(PROGRAM)
    events = profile.events()
    assert events is not None
    assert [event.name for event in events if not event.name.startswith("aten::")] == NAMES
    inside = [event.cpu_parent.name for event in events if event.name == "aten::zeros" and event.cpu_parent]
    assert inside == ["1F3", *NAMES]


def test_an_action_of_several_segments_is_one_profiler_range() -> None:
    parts: Program = (RunLayer(FORWARD, 0), ReduceGradient("a"), RunLayer(FORWARD, 1), Send(FORWARD, 0))
    executor = Executor(dict.fromkeys([RunLayer, Send, ReduceGradient], lambda i: None))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.run(parts)
    events = {event.name: event for event in profile.events() or ()}
    assert len(profile.events() or ()) == len(events) == 3
    assert {name: event.cpu_parent and event.cpu_parent.name for name, event in events.items()} == {
        "1F3": None,
        "reduce a": "1F3",
        "send 1F3": None,
    }


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.profiler, "record_function")
    Executor(dict.fromkeys([RunLayer, Send, ReduceGradient, Finish], lambda i: None)).run(PROGRAM)


def test_torch_tells_whether_a_profiler_is_on() -> None:
    assert not profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiling()
    with torch.autograd.profiler.profile(use_cpu=True):
        assert profiling()
    assert not profiling()
