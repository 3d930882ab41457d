"""The compute-only CSV format of `torch.distributed.pipelining`: reading and writing of schedules.

0F0,0F1,,0B0,,0B1      a line per rank, a cell per action; an empty cell is an idle step
,1F0,1B0,1F1,1B1
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from plait.errors import ScheduleError
from plait.schedules.action import Action
from plait.schedules.schedule import Schedule

_BYTE_ORDER_MARK = "\ufeff"
_COMMUNICATION = re.compile(r"[0-9]+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


class _CsvPosition(NamedTuple):
    """Line and column of an action in the CSV. Both count from 1; a column is a cell, as in a spreadsheet."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


_CsvRow: TypeAlias = list[tuple[_CsvPosition, Action]]
"""The actions of a rank, in order."""


def to_csv(schedule: Schedule) -> str:
    """Return `schedule` as CSV for PyTorch's `_load_csv`: one line per rank, one cell per action.

    Idle steps are left out: an executor waits for the input of each action.
    """
    return "".join(",".join(actions) + "\n" for actions in schedule.order)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Return the schedule in CSV `text`, as PyTorch's `_dump_csv` writes it with `format="compute_only"`.

    Its policy is `name`, its ranks are the lines, in order. Empty cells are idle steps and left out. The two
    actions of a pair of DualPipeV, such as `(0F7;7B1)OVERLAP_F_B`, follow each other as written: their
    overlap is not modelled.

    Raises ScheduleError with line and column (a column is a cell; both count from 1) for a cell that is not
    an action or is one of communication, for a stage on two ranks, a gap in the numbers of stages, and a rank
    without actions. `plait.check` checks whether the schedule can run.
    """
    lines = text.removeprefix(_BYTE_ORDER_MARK).rstrip().splitlines()
    if not lines:
        raise ScheduleError(
            "the CSV is empty: write a line per rank with its actions, as in 0F0,0F1,0B0,0B1."
        )
    rows = [_row(number, line) for number, line in enumerate(lines, start=1)]
    actions = tuple(tuple(action for _, action in row) for row in rows)
    microbatches, count = 1 + max(action.microbatch for row in actions for action in row), sum(map(len, rows))
    if microbatches > count:
        raise ScheduleError(
            f"there is a micro-batch {microbatches - 1} among {count} actions; number micro-batches from 0, "
            "without gaps."
        )
    return Schedule(name, microbatches, _rank_of(rows), actions)


def _row(number: int, line: str) -> _CsvRow:
    row: _CsvRow = []
    # No cell has a comma or a line end, so quotes, which some programs write, can just be stripped.
    for column, cell in enumerate(line.split(","), start=1):
        position = _CsvPosition(number, column)
        row += ((position, action) for action in _actions(cell.strip().strip('"').strip(), position))
    if not row:
        raise ScheduleError(
            f"line {number}: rank {number - 1} has no actions; write a line per rank, each with at least one."
        )
    return row


def _actions(cell: str, position: _CsvPosition) -> list[Action]:
    if not cell:
        return []
    if _COMMUNICATION.fullmatch(cell):
        raise ScheduleError(
            f"{position}: {cell} is from a file of communication actions, which plait adds by itself; give "
            "the compute-only file, as PyTorch's _dump_csv writes it with format='compute_only'."
        )
    pair = _PAIR.fullmatch(cell)
    try:
        return [Action.parse(part) for part in (pair.groups() if pair else [cell])]
    except ScheduleError as error:
        raise ScheduleError(f"{position}: {error}") from None


def _rank_of(rows: Sequence[_CsvRow]) -> tuple[int, ...]:
    """Return the rank of each stage: the index of the CSV line that has its actions."""
    firsts: dict[int, _CsvPosition] = {}
    for row in rows:
        for position, action in row:
            first = firsts.setdefault(action.stage, position)
            if position.line != first.line:
                raise ScheduleError(
                    f"{position}: {action} is of stage {action.stage}, which has an action in {first} too; "
                    "a stage is on one rank: write its actions on one line."
                )
    for stage, (found, position) in enumerate(sorted(firsts.items())):
        if found != stage:
            raise ScheduleError(
                f"{position}: there is a stage {found} but no stage {stage}; number stages from 0, "
                "without gaps."
            )
    return tuple(firsts[stage].line - 1 for stage in range(len(firsts)))
