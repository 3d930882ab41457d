"""The three kinds of step that an engine takes, as programs: train, evaluate, output. Made on first use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plait.schedules.check import check
from plait.schedules.check_programs import check_programs
from plait.schedules.lower import Ending, lower
from plait.schedules.policies import forward_only
from plait.schedules.program import Program
from plait.schedules.schedule import Schedule
from plait.schedules.shape import Shape


@dataclass(frozen=True)
class Steps:
    """The programs of one rank of the `pp` axis for a schedule and a model's shape, all checked."""

    schedule: Schedule
    shape: Shape
    rank: int

    @cached_property
    def train(self) -> Program:
        """Forward and backward of every micro-batch. ScheduleError when a rule is broken."""
        check(self.schedule)
        return self._lowered(self.schedule, "loss")

    @cached_property
    def evaluate(self) -> Program:
        """The loss of every micro-batch."""
        return self._lowered(self._forwards(self.schedule.microbatches), "loss")

    @cached_property
    def output(self) -> Program:
        """The model's output for every micro-batch."""
        return self._lowered(self._forwards(self.schedule.microbatches), "output")

    @cached_property
    def output_of_one(self) -> Program:
        """The model's output for a single micro-batch, whatever the schedule's number of them."""
        return self._lowered(self._forwards(1), "output")

    @property
    def last_rank(self) -> int:
        """The rank of the `pp` axis on which the last stage lives."""
        return self.schedule.rank_of[-1]

    @property
    def first_rank(self) -> int:
        """The rank of the `pp` axis on which the first stage lives."""
        return self.schedule.rank_of[0]

    def _forwards(self, microbatches: int) -> Schedule:
        return forward_only(self.schedule.rank_of, ranks=self.schedule.ranks, microbatches=microbatches)

    def _lowered(self, schedule: Schedule, ending: Ending) -> Program:
        programs = lower(schedule, self.shape, ending)
        check_programs(programs)
        return programs[self.rank]
