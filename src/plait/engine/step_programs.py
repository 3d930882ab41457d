"""The checked programs of an engine's steps: train, evaluate and output. Lowered on first use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from plait.errors import ScheduleError
from plait.schedules.check import check
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import Ending, lower
from plait.schedules.lowering.lowering_spec import LoweringSpec
from plait.schedules.lowering.program import Program
from plait.schedules.named_schedules import forward_only
from plait.schedules.schedule import Schedule


@dataclass(frozen=True)
class StepPrograms:
    """The programs (instructions) of all ranks of `pp` for training, evaluation and generation."""

    schedule: Schedule
    spec: LoweringSpec

    @cached_property
    def train(self) -> Sequence[Program]:
        """The training programs: forward and backward of all micro-batches.

        Raises ScheduleError for an illegal schedule.
        """
        check(self.schedule)
        return self._lower(self.schedule, "loss")

    @cached_property
    def evaluate(self) -> Sequence[Program]:
        """The programs that compute the loss of every micro-batch, without a backward."""
        return self._lower_forward(self.schedule.microbatches, "loss")

    @cached_property
    def output(self) -> Sequence[Program]:
        """The programs that compute the model's output for every micro-batch."""
        return self._lower_forward(self.schedule.microbatches, "output")

    @cached_property
    def output_of_one(self) -> Sequence[Program]:
        """The programs that compute the model's output for a batch of one micro-batch."""
        return self._lower_forward(1, "output")

    def posting_late(self) -> StepPrograms:
        """Return programs for NCCL: each receive is posted only one action before the action that uses it.

        They are posted as early as on a CPU where that would deadlock, as for some searched orders: a rank
        waits for a send before it sends more than `SENDS_IN_FLIGHT` others.
        """
        return replace(self, spec=replace(self.spec, posts_late=True))

    def _lower_forward(self, microbatches: int, ending: Ending) -> Sequence[Program]:
        made = forward_only(self.schedule.rank_of, ranks=self.schedule.ranks, microbatches=microbatches)
        return self._lower(made, ending)

    def _lower(self, schedule: Schedule, ending: Ending) -> Sequence[Program]:
        if self.spec.posts_late:
            with suppress(ScheduleError):
                late = lower(schedule, self.spec, ending)
                check_programs(late, rendezvous=False)
                return late
        programs = lower(schedule, replace(self.spec, posts_late=False), ending)
        check_programs(programs)
        return programs
