"""The executor: runs programs, and nothing else. Every step of every schedule goes through `run`.

It goes through a program part by part (see `plait.schedules.segments`). Each part is run by a function
that bears its name, so that whatever looks at a stack reads what a rank is about: a traceback, `py-spy`,
`faulthandler`, and Flight Recorder, which keeps the stack of each collective and message. Where a profiler of
torch is on, each action is a range of that name, and so is each other part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from plait.pipeline.profiling import profiling
from plait.schedules.program import Instruction, Program
from plait.schedules.segments import Segment, segments_of

Handler = Callable[[Any], None]
Handlers = Mapping[type, Handler]
"""What to do for each type of instruction."""
Observer = Callable[[Instruction], None]
"""Told of each instruction after it was carried out."""
Around: TypeAlias = Callable[[Segment], AbstractContextManager[object]]
"""What is entered before a part of a program and left after it."""
Watch: TypeAlias = Callable[[Program], AbstractContextManager[Around]]
"""What is entered before a program, and says what is entered around its parts."""

_Calls: TypeAlias = Sequence[tuple[Handler, Instruction]]

REMEMBERED_PROGRAMS = 8
"""Programs whose calls are remembered."""


class _Bound(NamedTuple):
    """A part of a program, and who does what in it."""

    part: Segment
    carry_out: Callable[[_Calls], None]
    calls: _Calls


class Executor:
    """One loop. What the instructions mean is supplied from outside."""

    def __init__(self, *handlers: Handlers) -> None:
        """`handlers` of several suppliers; what two of them handle is done by both, in order."""
        merged: dict[type, list[Handler]] = {}
        for supplier in handlers:
            for kind, handler in supplier.items():
                merged.setdefault(kind, []).append(handler)
        self._handlers = merged
        self.observer: Observer | None = None
        self.watch: Watch | None = None
        self._known: list[tuple[Program, list[_Bound]]] = []

    def run(self, program: Program) -> None:
        """Carry out `program`, first instruction to last. An exception says where it happened."""
        bound = self._remembered(program) if self.observer is None else self._bind(program, [self.observer])
        ranges = profiling()
        if self.watch is None and not ranges:
            for _, carry_out, calls in bound:
                carry_out(calls)
            return
        with nullcontext(_nothing) if self.watch is None else self.watch(program) as around:
            for action, pieces in groupby(bound, lambda one: one.part.within):
                with _range(str(action), shown=ranges and action is not None):
                    for part, carry_out, calls in pieces:
                        with _range(part.name, shown=ranges and part.name != str(action)), around(part):
                            carry_out(calls)

    def _remembered(self, program: Program) -> list[_Bound]:
        for known, bound in self._known:
            if known is program:
                return bound
        bound = self._bind(program, [])
        self._known = [*self._known[1 - REMEMBERED_PROGRAMS :], (program, bound)]
        return bound

    def _bind(self, program: Program, last: Sequence[Handler]) -> list[_Bound]:
        """The parts of `program`; `last` are told of each instruction when all others have done it."""
        return [
            _Bound(
                part,
                _named(part.name),
                [
                    (handler, instruction)
                    for instruction in part.instructions
                    for handler in (*self._handlers[type(instruction)], *last)
                ],
            )
            for part in segments_of(program)
        ]


def _range(name: str, *, shown: bool) -> AbstractContextManager[object]:
    return torch.profiler.record_function(name) if shown else nullcontext()


def _nothing(part: Segment) -> AbstractContextManager[object]:
    return nullcontext()


def _carry_out(calls: _Calls) -> None:
    for handler, instruction in calls:
        try:
            handler(instruction)
        except Exception as error:
            error.add_note(f"while running {instruction}")
            raise


def _named(name: str) -> Callable[[_Calls], None]:
    """`_carry_out` under another name in stacks."""
    code = _carry_out.__code__.replace(co_name=name, co_qualname=name)
    return cast(Callable[[_Calls], None], FunctionType(code, globals(), name))
