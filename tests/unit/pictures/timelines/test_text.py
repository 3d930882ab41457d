"""The timeline in the terminal, as literals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from plait.pictures.timelines.text import draw_text, title
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Action
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import Cell

ONE_BY_ONE = simulate(policy_schedule("1f1b", 2, 4))


def drawn(*lines: str) -> str:
    return "\n".join(lines)


def split_backward() -> Timeline:
    rows = "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return simulate(Schedule("split", 2, (0, 1), actions))


def test_an_action_is_as_wide_as_its_time_in_the_terminal_drawing() -> None:
    assert draw_text(ONE_BY_ONE, width=60) == drawn(
        "rank 0  F0 F1 ······B0--- F2 B1--- F3 B2--- ···B3---",
        "rank 1  ···F0 B0--- F1 B1--- F2 B2--- F3 B3--- ······",
        "        0              5              10             15",
        "        F forward, B backward, · idle",
    )


def test_labels_stand_close_where_room_is_scarce() -> None:
    assert draw_text(ONE_BY_ONE, width=50).splitlines()[0] == ("rank 0  F0F1····B0- F2B1- F3B2- ··B3-")


def test_kinds_alone_remain_where_labels_do_not_fit() -> None:
    assert draw_text(ONE_BY_ONE, width=24) == drawn(
        "rank 0  FF··B-FB-FB-·B-",
        "rank 1  ·FB-FB-FB-FB-··",
        "        0         10",
        "        F forward, B backward, · idle",
    )


def test_labels_that_fit_are_drawn_where_ticks_are_finer_than_columns() -> None:
    """As in what was measured: a tick is a nanosecond, and no two actions take as long."""
    cells = tuple(
        tuple(
            Cell(action, 1000 * start + number, 1000 * end) for number, (action, start, end) in enumerate(row)
        )
        for row in ONE_BY_ONE.cells
    )
    fine = replace(ONE_BY_ONE, cells=cells, tick=ONE_BY_ONE.tick / 1000)
    assert draw_text(fine, width=70).splitlines()[0].split("·")[0] == "rank 0  F0- F1- "
    assert draw_text(fine, width=30).splitlines()[0].split("·")[0] == "rank 0  FF-"


def test_a_schedule_of_split_backwards_is_drawn_with_their_kinds() -> None:
    assert draw_text(split_backward()) == drawn(
        "rank 0  F0 F1 ···I0 W0 I1 W1",
        "rank 1  ···F0 I0 F1 I1 W0 W1",
        "        0              5",
        "        F forward, I input gradient, W weight gradient, · idle",
    )


def test_with_chunks_each_action_is_drawn_with_its_stage() -> None:
    rows = ("0F0 1F0 1B0 0B0",)
    made = Schedule("loop", 1, (0, 0), tuple(tuple(map(Action.parse, row.split())) for row in rows))
    assert draw_text(simulate(made)).splitlines()[0] == "rank 0  0F0 1F0 1B0---- 0B0----"


def test_a_v_of_two_ranks_is_drawn_as_expected() -> None:
    assert draw_text(simulate(policy_schedule("v-min", 2, 1)), width=80) == drawn(
        "rank 0  0F0 ········3F0 3I0 3W0 ····0I0 0W0",
        "rank 1  ····1F0 2F0 ········2I0 1I0 2W0 1W0",
        "        0               2               4",
        "        F forward, I input gradient, W weight gradient, · idle",
    )


@pytest.mark.parametrize("width", [1, 20, 33, 57, 100, 300])
@pytest.mark.parametrize("costs", [Costs(), Costs(18.522, 18.086, 9.337, 0.601), Costs(1e-9, 3, 0)])
def test_the_drawing_is_never_wider_than_asked(width: int, costs: Costs) -> None:
    timeline = simulate(policy_schedule("1f1b", 3, 12), costs)
    rows = draw_text(timeline, width=width).splitlines()[:3]
    assert {len(row) for row in rows} <= set(range(16, max(width, 18) + 1))
    assert all("B" in row for row in rows)


def test_the_coloured_drawing_without_colour_codes_is_the_plain_one() -> None:
    plain = draw_text(split_backward())
    coloured = draw_text(split_backward(), colour=True)
    assert "\x1b[" not in plain
    without = re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()
    assert [line.rstrip() for line in without[:3]] == plain.splitlines()[:3]
    assert coloured.count("\x1b[0m") == 12 + 2 + 3


def test_a_schedule_without_costs_is_drawn_with_empty_rows() -> None:
    timeline = simulate(policy_schedule("gpipe", 1, 1), Costs(0, 0, 0))
    assert draw_text(timeline).splitlines()[:2] == ["rank 0", "        0"]


def test_titles_of_schedules_count_ranks_and_micro_batches() -> None:
    assert title(policy_schedule("1f1b", 1, 1)) == "1f1b: 1 rank, 1 micro-batch"
    assert title(policy_schedule("gpipe", 4, 8)) == "gpipe: 4 ranks, 8 micro-batches"
