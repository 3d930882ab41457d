"""The page as it is written: self-contained, its figures text, its data exact."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from plait.pictures.timelines.html import draw_html
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.schedules.action import Action, Kind
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule
from plait.schedules.timed_schedule import Cell


class Reader(HTMLParser):
    """The text in each kind of element, and every attribute."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.within: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "canvas"):
            self.within.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag != "canvas":
            assert self.within.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.within:
            self.texts[self.within[-1]][-1] += data


def in_groups(numbers: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(numbers)] * size, strict=True)


def data_of(timeline: Timeline) -> dict[str, Any]:
    element = re.search(r'<script type="application/json" id="data">(.*?)</script>', draw_html(timeline))
    assert element is not None
    return dict(json.loads(element[1]))


@pytest.mark.parametrize("policy", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.1, 0.9, 0.05, until_W=0.5)])
def test_cells_and_memory_can_be_read_back(policy: str, costs: Costs) -> None:
    timeline = simulate(policy_schedule(policy, 3, 6), costs)
    data = data_of(timeline)
    kinds = [Kind(kind) for kind, _, _ in data["kinds"]]
    for row, packed in zip(timeline.cells, data["cells"], strict=True):
        time, cells = 0, []
        for stage, kind, microbatch, idle, duration in in_groups(packed, 5):
            cells.append(Cell(Action(stage, kinds[kind], microbatch), time + idle, time + idle + duration))
            time += idle + duration
        assert tuple(cells) == row
    for steps, packed in zip(timeline.memory_curve, data["memory"], strict=True):
        time, read = 0, []
        for later, held in in_groups(packed, 2):
            time += later
            read.append((time, held))
        assert tuple(read) == steps
    assert data["length"] == timeline.length
    assert data["tick"] * data["length"] == pytest.approx(timeline.makespan)
    assert tuple(data["peak"]) == timeline.peak


@pytest.mark.parametrize(
    ("policy", "ranks", "comm"), [("1f1b", 1, 0), ("1f1b", 3, 0.25), ("interleaved", 2, 0.75)]
)
def test_the_page_knows_how_long_a_hop_takes(policy: str, ranks: int, comm: float) -> None:
    data = data_of(simulate(policy_schedule(policy, ranks, 4), Costs(comm=0.75 if ranks == 1 else comm)))
    assert data["hop"] * data["tick"] == comm


def test_times_finer_than_the_page_counts_keep_their_proportions() -> None:
    data = data_of(simulate(policy_schedule("gpipe", 2, 1), Costs(1e-200, 1, 2)))
    assert data["length"] <= 2**53
    assert [row[4] * data["tick"] for row in data["cells"]] == pytest.approx([0, 0])
    assert [row[9] * data["tick"] for row in data["cells"]] == pytest.approx([3, 3])


def test_figures_and_legend_of_a_timeline_page_are_text() -> None:
    made = policy_schedule("zb-h1", 2, 4)
    read = Reader(draw_html(simulate(Schedule("zb-h1", 4, made.rank_of, made.actions, bound=12.5))))
    assert dict(zip(read.texts["dt"], read.texts["dd"], strict=True)) == {
        "policy": "zb-h1",
        "ranks": "2",
        "micro-batches": "4",
        "chunks per rank": "1",
        "makespan": "13",
        "span of the longest rank": "13",
        "bubble": "7.7%",
        "bubble of the span": "7.7%",
        "peak per rank, in micro-batches": "2 2",
        "lower bound of the search": "12.5",
    }
    assert list(zip(read.texts["b"], (text.strip() for text in read.texts["li"]), strict=True)) == [
        ("F", "forward"),
        ("I", "input gradient"),
        ("W", "weight gradient"),
    ]
    assert read.texts["title"] == read.texts["h1"] == ["zb-h1: 2 ranks, 4 micro-batches"]


def test_peaks_of_many_ranks_are_given_as_a_range() -> None:
    read = Reader(draw_html(simulate(policy_schedule("1f1b", 17, 20)), name="wide"))
    assert read.texts["dd"][-1] == "1 to 17"
    assert read.texts["h1"] == ["wide"]


def test_names_in_a_timeline_page_are_escaped() -> None:
    made = policy_schedule("gpipe", 1, 1)
    name = "</script><script>alert(\"1\")</script> & '$name'"
    timeline = simulate(Schedule(name, 1, made.rank_of, made.actions))
    read = Reader(draw_html(timeline))
    assert len(read.texts["script"]) == len(Reader(draw_html(timeline, name="plain")).texts["script"])
    assert read.texts["h1"] == [f"{name}: 1 rank, 1 micro-batch"]
    assert (
        dict(read.attributes)["aria-label"]
        == f"Timeline of {name}: 1 rank, 1 micro-batch: what each rank does over time"
    )


def test_a_timeline_page_is_self_contained_and_may_load_nothing() -> None:
    page = draw_html(simulate(policy_schedule("1f1b", 2, 2)))
    read = Reader(page)
    assert not {name for name, _ in read.attributes} & {"src", "href", "srcset", "action"}
    assert not re.search(r"https?:|url\(|@import|\bimport\(|fetch\(", page)
    assert (
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
    ) in read.attributes


def test_the_page_uses_every_file_of_its_folder() -> None:
    page = draw_html(simulate(policy_schedule("1f1b", 2, 2)))
    for file in (resources.files("plait.pictures.timelines") / "page").iterdir():
        assert file.suffix == ".html" or file.read_text(encoding="utf-8") in page
