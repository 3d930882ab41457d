from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_metrics, write_plan, write_ranks, write_recorded_step

from plait.pictures.quantities import bytes_text
from plait.pictures.report.page import draw_report, read_runs
from plait.pictures.report.run_json import PredictedRank, write_description
from plait.pictures.report.run_record import read_run, write_event


def data_of(page: str) -> dict[str, Any]:
    element = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert element is not None
    return dict(json.loads(element[1]))


def whole_run(folder: Path, **parallel: Any) -> list[dict[str, Any]]:
    world = write_plan(folder, **parallel).plan().world
    rows = write_metrics(folder, 40)
    write_ranks(folder, rows, world)
    write_recorded_step(folder, parallel["pp"], world // parallel["pp"])
    return rows


def test_the_numbers_of_a_report_page_are_those_of_the_metrics(tmp_path: Path) -> None:
    rows = whole_run(tmp_path, pp=2, tp=2)
    (run,) = data_of(draw_report([read_run(tmp_path)]))["runs"]
    assert run["steps"] == [row["step"] for row in rows]
    for key, values in run["columns"].items():
        assert values == [row.get(key) for row in rows], key
    assert run["ranks"]["what"] == "busy time of a step"
    assert [len(values) for values in run["ranks"]["values"]] == [40] * 4
    assert run["timeline"]["labels"] == ["rank 0", "rank 2", "rank 1", "rank 3"]


def test_the_figures_of_a_report_page_are_those_of_the_run(tmp_path: Path) -> None:
    rows = whole_run(tmp_path, pp=2, tp=2)
    page = draw_report([read_run(tmp_path)])
    figures = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert float(figures["loss"]) == pytest.approx(rows[-1]["loss"], rel=1e-3)
    assert figures["tokens"] == f"{40 * 65536:,}"
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert float(figures["validation loss"]) == pytest.approx(losses[-1], rel=1e-3)
    assert ("best validation loss" in figures) is (min(losses) < losses[-1])
    assert re.findall(r"<h2>(.*?)</h2>", page)[1:] == [
        "Over the steps", "Ranks", "A step", "Plan", "Memory", "Traffic", "Configuration", "Environment",
    ]  # fmt: skip
    assert "<td>parallel.tp</td><td>2</td>" in page


def table_of(page: str, name: str) -> list[list[str]]:
    """The texts of the cells of a section's tables, row by row."""
    (section,) = re.findall(rf'id="?{name}"?.*?</section>', page, re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(<td.*?)</tr>", section)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows]


def test_tables_hold_the_numbers_of_each_rank_and_axis(tmp_path: Path) -> None:
    whole_run(tmp_path, pp=2, tp=2)
    about = read_run(tmp_path).description
    assert about is not None
    each = [
        PredictedRank(rank, (5 + rank) * 2**20, (3 + rank) * 2**20, {"weights": 2**20}) for rank in range(2)
    ]
    write_description(replace(about, memory=tuple(each)), tmp_path)
    peaks = [10 * 2**20, 12 * 2**20, 16 * 2**20, 14 * 2**20]
    ranks = {"step": 1, "blocked_seconds": [0.1, 0.2, 0.3, 0.4], "peak_memory_bytes": peaks}
    (tmp_path / "ranks.jsonl").write_text(json.dumps(ranks) + "\n")
    page = draw_report([read_run(tmp_path)])
    assert [row[:1] + row[2:] for row in table_of(page, "memory-of-0")] == [
        ["pp 0", bytes_text(5 * 2**20), bytes_text(3 * 2**20), bytes_text(12 * 2**20)],
        ["pp 1", bytes_text(6 * 2**20), bytes_text(4 * 2**20), bytes_text(16 * 2**20)],
    ]
    # Each of 4 ranks runs 16 actions, each with a wait of 0.2 ms.
    (traffic,) = table_of(page, "traffic-of-0")
    assert traffic[:2] + traffic[3:] == ["tp", "all-reduce", bytes_text(64_000), "16", bytes_text(16_000)]
    uses = table_of(page, "step-of-0")
    assert uses == [[f"rank {rank}", "", "20.8 ms 77%", "3.2 ms 12%", "3 ms 11%"] for rank in range(4)]


def test_a_report_page_says_after_which_steps_the_run_was_resumed(tmp_path: Path) -> None:
    whole_run(tmp_path, pp=1)
    for kind, step in (("start", 0), ("stopped", 10), ("start", 10), ("start", 20), ("finished", 40)):
        write_event(tmp_path, kind, step, "")
    page = draw_report([read_run(tmp_path)])
    assert re.search(r"Finished after step 40 of \d+\. Resumed after steps 10, 20\.</p>", page)
    assert data_of(page)["runs"][0]["resumed"] == [10, 20]


def test_a_page_of_two_runs_marks_what_differs(tmp_path: Path) -> None:
    for name, parallel in (("a", {"pp": 2, "tp": 1}), ("b", {"pp": 1, "tp": 2})):
        whole_run(tmp_path / name, **parallel)
    page = draw_report(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert [run["name"] for run in data_of(page)["runs"]] == ["a", "b"]
    differ = re.findall(r"<tr class=differs><td>(.*?)</td>", page)
    assert differ == ["parallel.pp", "parallel.tp", "run.dir"]
    assert "A step of a" in page
    assert "Plan of b" in page


def test_a_report_page_loads_nothing_and_escapes_all_text(tmp_path: Path) -> None:
    folder = tmp_path / "a<script>&'$name'"
    whole_run(folder, pp=1)
    (folder / "events.jsonl").write_text(
        '{"kind":"warning","step":1,"text":"</script><script>alert(1)</script>","time":""}\n'
    )
    page = draw_report([read_run(folder)])
    assert not re.search(r"\b(src|href|srcset)=|url\(|@import|\bimport\(|fetch\(", page)
    assert "alert(1)</script>" not in page
    assert page.count("<script") == page.count("</script>") == 6


def test_the_page_uses_every_file_of_its_folder_with_the_licence_of_the_library(tmp_path: Path) -> None:
    whole_run(tmp_path, pp=1)
    page = draw_report([read_run(tmp_path)])
    folder = resources.files("plait.pictures.report") / "page"
    for file in (*folder.iterdir(), *(folder / "uplot").iterdir()):
        if file.is_file() and file.name not in ("report.html", "prediction.html", "watch.js", "LICENSE"):
            assert file.read_text(encoding="utf-8") in page, file.name
    assert "MIT License" in (folder / "uplot" / "LICENSE").read_text()


def test_other_columns_of_metrics_get_a_chart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "my_metric": 2.0}\n')
    charts = data_of(draw_report([read_run(tmp_path)]))["charts"]
    assert [chart["title"] for chart in charts] == ["Loss", "my_metric"]
    assert [series["key"] for series in charts[0]["series"]] == ["loss"]


@pytest.mark.full
def test_a_long_run_of_many_ranks_stays_small(tmp_path: Path) -> None:
    write_plan(tmp_path, layers=16, pp=4, tp=4, dp=4, strategy="full")
    write_ranks(tmp_path, write_metrics(tmp_path, 10_000), 64)
    write_recorded_step(tmp_path, 4, 16)
    page = draw_report([read_run(tmp_path)])
    assert len(page) < 5_000_000
    assert len(data_of(page)["runs"][0]["steps"]) == 10_000
