"""The executor: runs programs, and nothing else. Every step of every schedule goes through `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.schedules.program import Instruction, Program

Handler = Callable[[Any], None]
Handlers = Mapping[type, Handler]
"""What to do for each type of instruction."""
Observer = Callable[[Instruction], None]
"""Told of each instruction after it was carried out."""


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

    def run(self, program: Program) -> None:
        """Carry out `program`, first instruction to last. An exception says where it happened."""
        handlers = self._handlers
        for instruction in program:
            try:
                for handler in handlers[type(instruction)]:
                    handler(instruction)
                if self.observer is not None:
                    self.observer(instruction)
            except Exception as error:
                error.add_note(f"while running {instruction}")
                raise
