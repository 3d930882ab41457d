"""An action: one kind of work on one micro-batch of one stage, such as `2F0`."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from plait.errors import ScheduleError


class Kind(StrEnum):
    """Kind of work of an action: forward `F`, input gradient `I`, weight gradient `W`, or both `B`."""

    F = "F"
    """forward"""
    I = "I"  # noqa: E741 (the field's letter)
    """backward of the input: the gradient that the previous stage needs"""
    W = "W"
    """backward of the weights: no other action depends on it"""
    B = "B"
    """full backward"""

    # Actions are keys of large tables; the hash that Enum defines is a Python function.
    __hash__ = str.__hash__


SPLIT_KINDS = (Kind.F, Kind.I, Kind.W)
"""The kinds of a schedule whose backwards are split."""


class Action(NamedTuple):
    """One kind of work on one micro-batch of one stage: `Action(2, Kind.F, 0)` or `2F0`, as in PyTorch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def message_key(self) -> Action:
        """This action, with `I` in place of a full backward `B`: the key by which messages are looked up."""
        return Action(self.stage, Kind.I, self.microbatch) if self.kind is Kind.B else self

    def source_stage(self, stages: int) -> int | None:
        """Return the neighbour stage whose result this action needs, or None if it needs none."""
        if self.kind is Kind.W:
            return None
        source = self.stage - 1 if self.kind is Kind.F else self.stage + 1
        return source if 0 <= source < stages else None

    def consumer(self, stages: int) -> Action | None:
        """Return the action that needs this one's result, on a neighbour stage (`F` or `I`), or None."""
        if self.kind is Kind.F and self.stage + 1 < stages:
            return Action(self.stage + 1, Kind.F, self.microbatch)
        if self.kind in (Kind.I, Kind.B) and self.stage > 0:
            return Action(self.stage - 1, Kind.I, self.microbatch)
        return None

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that `text` names, such as `2F0`. Raises ScheduleError for any other text."""
        match = re.fullmatch(r"([0-9]{1,9})([FIWB])([0-9]{1,9})", text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: write stage, kind (F, I, W or B) and micro-batch, as in 2F0."
            )
        return Action(int(match[1]), Kind(match[2]), int(match[3]))
