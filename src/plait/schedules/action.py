"""One step of a pipeline: a stage, a kind of work and a micro-batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class Action:
    """`Action(2, Kind.F, 0)`: forward of micro-batch 0 on stage 2; as text `2F0`, like PyTorch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that `text` names; ScheduleError when it names none."""
        match = re.fullmatch(r"(\d+)([FIWB])(\d+)", text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: write stage, kind (F, I, W or B) and micro-batch, as in 2F0."
            )
        return Action(int(match[1]), Kind(match[2]), int(match[3]))
