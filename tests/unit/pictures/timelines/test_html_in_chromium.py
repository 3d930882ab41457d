"""The page, alive in a headless Chromium: what it draws, says and shows. Skipped where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chromium import CHROMIUM, run_page

from plait.pictures.colours import shade
from plait.pictures.timelines.html import draw_html
from plait.pictures.timelines.timeline import simulate
from plait.schedules.action import Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

HOPS = draw_html(simulate(policy_schedule("1f1b", 2, 2), Costs(comm=0.5)))
"""rank 0: F0 0-1, F1 1-2, B0 5-7, B1 8-10; rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5."""

PLACES = """
const at = (time) => xOf(time / timeline.tick);
const row = (rank) => rowTop(rank) + layout.rowHeight / 2, strip = (rank) => stripTop(rank) + 5;
"""


def test_pointer_wheel_and_keys_select_and_zoom_actions_of_the_timeline(tmp_path: Path) -> None:
    script = """
    const colours = (context, places) => places.map(([time, rank]) => pixel(context, at(time), row(rank)));
    const told = {all: shown(), colours: colours(base, [[0.2, 0], [3, 1], [8.3, 0]])};
    await pointAt(at(5.3), row(0));
    told.action = card();
    told.same = colours(glass, [[5.3, 0], [0.2, 0], [3, 1]]);
    told.veiled = pixel(glass, at(8.3), row(0)) !== pixel(base, at(8.3), row(0));
    const x = at(5.3);
    await turn(x, row(0), -400);
    [told.zoomed, told.still, told.stays] = [shown(), Math.abs(at(5.3) - x) < 1, card() === told.action];
    await press('0');
    told.again = shown();
    await pointAt(at(3), row(0));
    told.idle = card();
    await pointAt(at(6), strip(0));
    told.memory = card();
    await press('Escape');
    told.nothing = card();
    for (const key of ['ArrowRight', 'ArrowRight', 'ArrowDown']) await press(key);
    told.chosen = card();
    await pause(400);
    told.address = location.hash;
    return told;
    """
    told = run_page(HOPS, PLACES + script, tmp_path)
    assert told.pop("faults") == []
    start, end = map(float, re.findall(r"[0-9.]+", told.pop("zoomed"))[:2])
    assert end - start == pytest.approx(4.493, abs=0.002)  # e ** -0.8 of it
    assert start == pytest.approx(5.3 * (1 - 0.4493), abs=0.02)
    assert told == {
        "all": "shown: 0 to 10 of 10",
        "colours": [shade(Kind.F, 0), shade(Kind.B, 0), shade(Kind.B, 1)],
        "action": "0B0  backward; stage 0, on rank 0; micro-batch 0; start 5; end 7; duration 2; "
        "waited for 1B0 of rank 1, arrived at 5; idle before 3; held 2 of at most 2",
        "same": [shade(Kind.B, 0), shade(Kind.F, 0), shade(Kind.B, 0)],
        "veiled": True,
        "still": True,
        "stays": True,
        "again": "shown: 0 to 10 of 10",
        "idle": "rank 0 is idle; from 2; to 5; duration 3; until 0B0",
        "memory": "rank 0 holds 2 of at most 2; at 6",
        "nothing": "",
        "chosen": "1F0  forward; stage 1, on rank 1; micro-batch 0; start 1.5; end 2.5; duration 1; "
        "waited for 0F0 of rank 0, arrived at 1.5; idle before 1.5; held 1 of at most 1",
        "address": "",
    }


def test_cells_narrower_than_a_pixel_are_blended_with_what_is_idle(tmp_path: Path) -> None:
    timeline = simulate(policy_schedule("1f1b", 4, 2000), Costs(1, 1, 1, comm=1.5))
    script = """
    const {data} = blend.getImageData(0, 0, blend.canvas.width, 1);
    const mean = [0, 0, 0, 0];  // red, green, blue and how much is covered
    data.forEach((value, at) => { mean[at % 4] += value * 4 / data.length; });
    return {mean};
    """
    told = run_page(draw_html(timeline), script, tmp_path)
    forward, backward = (bytes.fromhex(shade(kind, 0.5)[1:]) for kind in (Kind.F, Kind.B))
    mixed = [(one + 2 * two) / 3 for one, two in zip(forward, backward, strict=True)]  # they take 1 and 2
    assert told == {"faults": [], "mean": pytest.approx([*mixed, 255 * 6000 / 10515], abs=4)}


def test_each_stage_of_a_rank_has_a_lane(tmp_path: Path) -> None:
    page = draw_html(simulate(policy_schedule("interleaved", 2, 2, 2), Costs()))  # rank 0: 0F0 0F1 2F0 …
    script = """
    const lane = (number) => rowTop(0) + (number + 0.5) * layout.cellHeight;
    const places = [[0.1, 0], [0.1, 1], [1.1, 0], [1.1, 1]];
    return {cells: places.map(([time, number]) => pixel(base, at(time), lane(number)))};
    """
    told = run_page(page, PLACES + script, tmp_path)
    assert told["faults"] == []
    assert [cell == shade(Kind.F, 0) for cell in told["cells"]] == [True, False, False, True]


def test_the_pages_address_holds_the_shown_time_range(tmp_path: Path) -> None:
    script = """
    const told = {shown: [shown()]};
    await press('ArrowRight');
    chart.parentElement.style.width = '600px';
    dispatchEvent(new Event('resize'));  // may come at any time; what is chosen stays
    told.card = card().slice(0, 3);
    location.hash = '#from=0.5&to=1';
    await pause(40);
    told.shown.push(shown());
    told.without = card();
    location.hash = '#from=5&to=3';
    await pause(40);
    told.shown.push(shown());
    return told;
    """
    page = draw_html(simulate(policy_schedule("1f1b", 2, 2), Costs(0.25, 0.25, 0.25)))
    told = run_page(page, script, tmp_path, "#from=1&to=1.5")
    assert told == {
        "faults": [],
        "card": "0B0",
        "without": "",
        "shown": [f"shown: {part} of 2.25" for part in ("1 to 1.5", "0.5 to 1", "0 to 2.25")],
    }


@pytest.mark.parametrize(
    ("costs", "card"),
    [
        (Costs(0, 0, 0), "0B1  backward; stage 0, on rank 0; micro-batch 1; start 0; end 0; "),
        (Costs(1e-200, 1e-199, 0), "0F0  forward; stage 0, on rank 0; micro-batch 0; start 0; end 1e-200; "),
    ],
)
def test_times_of_any_size_can_be_shown(costs: Costs, card: str, tmp_path: Path) -> None:
    script = """
    await pointAt(200, 10);
    await turn(200, 10, -300);
    for (const key of ['Escape', '0', 'ArrowRight', '+']) await press(key);
    return {card: card()};
    """
    told = run_page(draw_html(simulate(policy_schedule("gpipe", 2, 2), costs)), script, tmp_path)
    assert told["faults"] == []
    assert told["card"].startswith(card)
