"""The picture: well formed, whole, inside its frame, and nothing overlaps."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from plait.pictures.colours import LEGEND_SHADE, shade
from plait.pictures.timelines.svg import draw_svg
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

SVG = "{http://www.w3.org/2000/svg}"


def picture(timeline: Timeline, width: int = 800) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(timeline, width=width))


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


def cells(svg: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """Of each cell: its row, left and right edge, and what pointing at it shows."""
    found = []
    for rect in svg.iter(f"{SVG}rect"):
        if (tip := rect.find(f"{SVG}title")) is not None:
            left = float(rect.attrib["x"])
            found.append((float(rect.attrib["y"]), left, left + float(rect.attrib["width"]), tip.text or ""))
    return found


@pytest.mark.parametrize("width", [300, 800])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 2, 3, 0.25), Costs(1e-200, 1, 1), Costs(0, 0, 0)])
def test_every_action_has_a_cell_and_none_overlap(costs: Costs, width: int) -> None:
    found = cells(picture(simulate(policy_schedule("1f1b", 3, 5), costs), width))
    assert len(found) == 3 * 5 * 2
    assert all(70 <= left <= right <= width - 12 for _, left, right, _ in found)
    for (row, _, right, _), (next_row, left, _, _) in pairwise(found):
        assert row < next_row or right <= left + 0.011


def test_cells_of_the_svg_name_their_action_and_times() -> None:
    svg = picture(simulate(policy_schedule("gpipe", 2, 2), Costs(1, 1, 0.5)))
    assert [tip for *_, tip in cells(svg)][:4] == [
        "0F0: 0 to 1",
        "0F1: 1 to 2",
        "0B0: 4.5 to 6",
        "0B1: 6 to 7.5",
    ]


def test_the_svg_has_a_title_measures_and_a_legend_of_used_kinds() -> None:
    shown = texts(picture(simulate(policy_schedule("1f1b", 2, 4))))
    assert shown[0] == "1f1b: 2 ranks, 4 micro-batches"
    assert shown[1] == "makespan 15 · bubble 20.0% · peak activations per rank: 2 1"
    assert {"forward", "backward", "rank 0", "rank 1", "F0", "B3", "14"} <= set(shown)
    assert "input gradient" not in shown


def test_many_ranks_show_the_highest_peak_only() -> None:
    shown = texts(picture(simulate(policy_schedule("1f1b", 17, 20))))
    assert shown[1].endswith("peak activations per rank: up to 17")


@pytest.mark.parametrize(
    ("width", "written"),
    [
        (800, ["F0", "F1", "B0", "B1"]),
        (290, ["0", "1", "B0", "B1"]),
        (220, ["B0", "B1"]),
        (90, []),
    ],
)
def test_cells_of_a_kind_hold_as_much_text_as_fits_all_of_them(width: int, written: list[str]) -> None:
    timeline = simulate(policy_schedule("gpipe", 1, 2), Costs(1, 8, 0))
    shown = [text.text for text in picture(timeline, width).iter(f"{SVG}text") if text.get("class") == "cell"]
    assert shown == ["F", "B", *written]  # the legend comes first


def test_a_split_backward_shows_its_kinds_and_chunks_their_stage() -> None:
    svg = picture(simulate(policy_schedule("v-min", 2, 2)), width=1200)
    shown = texts(svg)
    assert {"forward", "input gradient", "weight gradient", "F0", "I1", "W1", "stage", "0", "3"} <= set(shown)
    assert "backward" not in shown
    fills = {rect.attrib["fill"] for rect in svg.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None}
    assert fills == {shade(kind, part) for kind in (Kind.F, Kind.I, Kind.W) for part in (0, 1)}


def test_colours_differ_by_kind_and_grow_lighter() -> None:
    assert len({shade(kind, part) for kind in Kind for part in (0, 0.5, 1)}) == 12
    for kind in Kind:
        first, last = (sum(bytes.fromhex(shade(kind, part)[1:])) for part in (0, 1))
        assert first < last


def test_the_svg_takes_given_rows_and_a_given_name() -> None:
    timeline = simulate(policy_schedule("gpipe", 2, 1))
    rows = [("pp 0, dp 0", 0), ("pp 0, dp 1", 0), ("pp 1 & more", 1)]
    svg = ElementTree.fromstring(draw_svg(timeline, name="a mesh", rows=rows))
    shown = texts(svg)
    assert shown[0] == "a mesh"
    assert [text for text in shown if text.startswith("pp")] == ["pp 0, dp 0", "pp 0, dp 1", "pp 1 & more"]
    assert [tip.partition(":")[0] for *_, tip in cells(svg)] == ["0F0", "0B0", "0F0", "0B0", "1F0", "1B0"]


def test_names_in_the_svg_are_escaped() -> None:
    made = policy_schedule("gpipe", 1, 1)
    named = Schedule("<a & b>", 1, made.rank_of, made.actions)
    assert texts(picture(simulate(named)))[0] == "<a & b>: 1 rank, 1 micro-batch"


def test_the_svg_refers_to_nothing_outside() -> None:
    document = draw_svg(simulate(policy_schedule("1f1b", 2, 2)))
    assert "href" not in document
    assert "url(" not in document
    assert document.count("http") == 1  # the name space


@pytest.mark.parametrize("width", [300, 800])
@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "v-half"])
@pytest.mark.parametrize("name", ["short", "1f1b: 2 ranks, 4 micro-batches; step 5 as it was, " * 3])
def test_no_text_of_the_svg_overlaps_another_or_leaves_the_picture(
    policy: str, name: str, width: int
) -> None:
    timeline = replace(simulate(policy_schedule(policy, 4, 8)), unit="ms")
    svg = ElementTree.fromstring(draw_svg(timeline, name=name, width=width))
    lines: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for text in svg.iter(f"{SVG}text"):
        style = text.get("class") or ""
        wide = (8 if style == "title" else 5.5 if "small" in style or style == "stage" else 6.5) * len(
            text.text or ""
        )
        x = float(text.attrib["x"])
        left = x - wide if style == "stage" else x - wide / 2 if style[:4] in ("cell", "time") else x
        assert 0 <= left <= left + wide <= width + 1, text.text
        lines[float(text.attrib["y"])].append((left, left + wide))
    for line in lines.values():
        for (_, right), (left, _) in pairwise(sorted(line)):
            assert right <= left + 0.5


def test_each_stage_of_a_rank_has_a_lane() -> None:
    """The rows of cells say which stage it is, so a cell needs no more than the number of its micro-batch."""
    made = policy_schedule("interleaved", 2, 4, chunks=4)
    svg = picture(simulate(made), width=900)
    lanes = defaultdict(set)
    for y, _, _, tip in cells(svg):
        lanes[y].add(int(tip.partition("F")[0].partition("B")[0]))
    assert [lanes[y] for y in sorted(lanes)] == [{stage} for stage in (0, 2, 4, 6, 1, 3, 5, 7)]
    labels = [text.text for text in svg.iter(f"{SVG}text") if text.get("class") == "stage"]
    assert labels == ["stage", "0", "2", "4", "6", "1", "3", "5", "7"]


def test_the_svg_of_a_measured_timeline_names_its_unit() -> None:
    simulated = simulate(policy_schedule("1f1b", 2, 2))
    measured = replace(simulated, unit="ms")
    assert {"makespan 9 ms · bubble 33.3% · peak activations per rank: 2 1", "ms"} <= set(
        texts(picture(measured))
    )
    assert {"makespan 9 · bubble 33.3% · peak activations per rank: 2 1", "time"} <= set(
        texts(picture(simulated))
    )
    assert cells(picture(measured))[0][3] == "0F0: 0 to 1 ms"


def test_too_many_actions_are_bands_of_what_ranks_spend_their_time_on() -> None:
    timeline = simulate(policy_schedule("zb-h1", 16, 256))
    document = draw_svg(timeline)
    assert len(document) < 150_000
    svg = ElementTree.fromstring(document)
    assert not cells(svg)
    rows = list(svg.iter(f"{SVG}g"))
    assert len(rows) == 16
    for rank, row in enumerate(rows):
        track = row.find(f"{SVG}rect")
        assert track is not None
        whole = float(track.attrib["width"]) * float(track.attrib["height"])
        for path in row.iter(f"{SVG}path"):
            kind = next(kind for kind in Kind if path.attrib["fill"] == shade(kind, LEGEND_SHADE))
            busy = sum(end - start for action, start, end in timeline.cells[rank] if action.kind is kind)
            steps = re.findall(r"v(-[0-9.]+)h([0-9.]+)V", path.attrib["d"])
            drawn = sum(-float(high) * float(wide) for high, wide in steps) / whole
            assert drawn == pytest.approx(busy / timeline.length, abs=0.01)
    assert rows[0].find(f"{SVG}title").text == "rank 0: 768 actions, idle 15, holds up to 16"  # type: ignore[union-attr]
    assert {"rank 0", "rank 15", "height: share of the time; empty: idle"} <= set(texts(svg))


def test_many_rows_of_bands_have_labels_now_and_then() -> None:
    shown = texts(picture(simulate(policy_schedule("1f1b", 80, 300))))
    ranks = [text for text in shown if text.startswith("rank ")]
    assert ranks[:3] == ["rank 0", "rank 2", "rank 4"]
