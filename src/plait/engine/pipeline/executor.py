"""The executor: a loop that runs the instructions of programs, for every step of every schedule.

A program runs segment by segment (`schedules/lowering/program_segments`), each in a function of the segment's
name, so that stacks show what a rank is doing: in tracebacks, `py-spy`, `faulthandler`, and Flight Recorder,
which keeps the stack of each collective and message. While a torch profiler records, each action is a range
of that name, and so is each other segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from plait.errors import CommunicationError
from plait.schedules.lowering.program import (
    ComputeLoss,
    Instruction,
    Program,
    RunLayer,
    SeedGradient,
    Segment,
    in_groups,
    joined_layers,
    segments_of,
)

Handlers = Mapping[type, Callable[[Any], None]]
"""For each type of instruction the function that carries one out."""
BindLayers = Callable[[Sequence[RunLayer]], Callable[[], None]]
"""Returns the call that runs layers of one action, in one autograd graph."""
AroundSegment = Callable[[Segment], AbstractContextManager[object]]
"""Returns the context in which a segment of a program runs."""

Calls: TypeAlias = Sequence[tuple[Callable[[], None], Instruction]]
"""Each with the instruction that it carries out."""
RunCalls: TypeAlias = Callable[[Calls], None]
"""Runs the calls of a segment."""
BindSegments = Callable[[Sequence[Segment], Sequence[RunCalls]], Sequence[RunCalls]]
"""Returns what runs the calls of each segment of a program, given what runs them one by one."""

REMEMBERED_PROGRAMS = 8
"""Programs whose calls are remembered."""


class _BoundSegment(NamedTuple):
    """A segment of a program (consecutive instructions), with the function that runs each instruction."""

    segment: Segment
    run: RunCalls
    calls: Calls


class Executor:
    """Runs programs by calling a handler for each instruction."""

    def __init__(
        self,
        *handlers: Handlers,
        bind_layers: BindLayers | None = None,
        may_join: Callable[[RunLayer], bool] | None = None,
        bind_segments: BindSegments | None = None,
    ) -> None:
        """`handlers`: functions by instruction type; if several handle a type, all are called, in order.

        `bind_layers` returns the call that runs layers, once per program; `RunLayer` handlers run after it.
        `may_join`: whether a layer may run together with its neighbours, where nothing is between them and
        `RunLayer` has no handler. None: each layer runs alone. `bind_segments` returns what runs a program's
        segments, once per program; None: each call runs.
        """
        merged: dict[type, list[Callable[[Any], None]]] = {}
        for supplier in handlers:
            for kind, handler in supplier.items():
                merged.setdefault(kind, []).append(handler)
        self._handlers = merged
        self._bind_layers = bind_layers
        self._may_join = None if RunLayer in merged else may_join
        self._bind_segments = bind_segments
        self._known: list[tuple[Program, list[_BoundSegment]]] = []

    def run(self, program: Program, around: AroundSegment | None = None) -> None:
        """Run the instructions of `program` in order. An exception gets a note that names the instruction."""
        bound, ranges = self._bound(program), profiling()
        if around is None and not ranges:
            for _, run, calls in bound:
                run(calls)
            return
        for action, parts in groupby(bound, lambda one: one.segment.within):
            with _range(str(action), shown=ranges and action is not None):
                for segment, run, calls in parts:
                    shown = ranges and segment.name != str(action)
                    with _range(segment.name, shown=shown), around(segment) if around else nullcontext():
                        run(calls)

    def _bound(self, program: Program) -> list[_BoundSegment]:
        """Return the segments of `program`, each instruction with its handler; cached for recent programs."""
        for known, bound in self._known:
            if known is program:
                return bound
        joined = joined_layers(program, self._may_join) if self._may_join else frozenset()
        segments = segments_of(program)
        runs: Sequence[RunCalls] = [_named(segment.name) for segment in segments]
        if self._bind_segments is not None:
            runs = self._bind_segments(segments, runs)
        bound = [
            _BoundSegment(
                segment,
                run,
                [call for group in in_groups(segment.instructions, joined) for call in self._calls(group)],
            )
            for segment, run in zip(segments, runs, strict=True)
        ]
        self._known = [*self._known[1 - REMEMBERED_PROGRAMS :], (program, bound)]
        return bound

    def _calls(self, group: Program) -> Calls:
        """Return the calls that carry out an instruction, or several that run layers together."""
        first = group[0]
        calls: list[Callable[[], None]] = []
        if isinstance(first, RunLayer) and self._bind_layers is not None:
            handlers = self._handlers.get(RunLayer, [])
            calls.append(self._bind_layers(cast(Sequence[RunLayer], group)))
        else:
            handlers = self._handlers[type(first)]
        calls += (partial(handler, first) for handler in handlers)
        return [(call, first) for call in calls]


def profiling() -> bool:
    """Return whether a torch profiler is recording on this thread.

    torch has no public way to ask; a range takes ten microseconds whether or not a profiler records.
    """
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def _range(name: str, *, shown: bool) -> AbstractContextManager[object]:
    return torch.profiler.record_function(name) if shown else nullcontext()


def _run(calls: Calls) -> None:
    for call, instruction in calls:
        try:
            call()
        except Exception as error:
            _explain(error, instruction)
            raise


def _explain(error: Exception, instruction: Instruction) -> None:
    """Add the instruction to an error as a note, and its action to the text of a communication error."""
    if isinstance(error, CommunicationError) and isinstance(
        instruction, RunLayer | ComputeLoss | SeedGradient
    ):
        error.args = (f"in {instruction.action}: {error}",)
    error.add_note(f"while running {instruction}")


def _named(name: str) -> RunCalls:
    """Return `_run` under another function name, for stack traces."""
    code = _run.__code__.replace(co_name=name, co_qualname=name)
    return cast(RunCalls, FunctionType(code, globals(), name))
