"""One step of a pipeline: a stage, a kind of work and a micro-batch."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from plait.errors import ScheduleError


class Kind(StrEnum):
    """What an action does. `B` is `I` and `W` at once."""

    F = "F"
    """forward"""
    I = "I"  # noqa: E741 (the field's letter)
    """backward of the input: the gradient that the stage before needs"""
    W = "W"
    """backward of the weights: nobody waits for it"""
    B = "B"
    """full backward"""

    # Actions are keys of large tables; the hash that Enum defines is a Python function.
    __hash__ = str.__hash__


class Action(NamedTuple):
    """`Action(2, Kind.F, 0)`: forward of micro-batch 0 on stage 2; as text `2F0`, like PyTorch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def source(self, stages: int) -> int | None:
        """The stage whose result this starts from: before for a forward, behind for a backward, or none."""
        if self.kind is Kind.W:
            return None
        source = self.stage - 1 if self.kind is Kind.F else self.stage + 1
        return source if 0 <= source < stages else None

    def consumer(self, stages: int) -> Action | None:
        """The forward or input gradient of another stage that waits for the result of this, if one does."""
        if self.kind is Kind.F and self.stage + 1 < stages:
            return Action(self.stage + 1, Kind.F, self.microbatch)
        if self.kind in (Kind.I, Kind.B) and self.stage > 0:
            return Action(self.stage - 1, Kind.I, self.microbatch)
        return None

    @staticmethod
    def parse(text: str) -> Action:
        """The action that `text` names; ScheduleError when it names none."""
        match = re.fullmatch(r"([0-9]{1,9})([FIWB])([0-9]{1,9})", text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: write stage, kind (F, I, W or B) and micro-batch, as in 2F0."
            )
        return Action(int(match[1]), Kind(match[2]), int(match[3]))
