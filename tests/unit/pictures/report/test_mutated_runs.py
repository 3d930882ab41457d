"""The page of a run whose files somebody has changed: drawn of what is sound, or refused in a sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from synthetic_runs import write_experts, write_metrics, write_plan, write_ranks, write_recorded_step

from mutated_files import ALL, QUICK, Kind, outcome, outcomes
from plait.errors import PlaitError
from plait.pictures.report.page import draw_report, read_runs
from plait.pictures.report.run_record import write_event

FILES: dict[str, Kind] = {
    "run.json": "json",
    "step.json": "json",
    "config.json": "json",
    "metrics.jsonl": "json",
    "ranks.jsonl": "json",
    "experts.jsonl": "json",
    "events.jsonl": "json",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    write_ranks(folder, write_metrics(folder, 20), 4)
    write_experts(folder, 20)
    config = write_plan(folder, dp=2, pp=2)
    (folder / "config.json").write_text(config.model_dump_json())
    write_recorded_step(folder, 2, 2)
    for kind in ("start", "warning", "finished"):
        write_event(folder, kind, 20, "a text")
    return folder


def page(folder: Path) -> str:
    return draw_report(read_runs([folder]))


@pytest.mark.parametrize("number", [QUICK, pytest.param(ALL, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_of_a_run_is_drawn_or_refused(
    whole: Path, tmp_path: Path, name: str, number: int
) -> None:
    drawn = 0
    for what, found in outcomes(whole, name, FILES[name], page, number, tmp_path):
        drawn += isinstance(found, str)
        assert isinstance(found, PlaitError) or "<script>alert" not in found, what
    assert drawn > 0


EVIL = '"><script>alert(1)</script>'


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FILES)
def test_no_text_of_a_run_becomes_part_of_the_page(
    whole: Path, tmp_path: Path, name: str, every: int
) -> None:
    """Neither values nor keys, of which `data-…` attributes of ranks were made."""
    shutil.copytree(whole, tmp_path / "run")
    text, drawn = (whole / name).read_text(), 0
    texts = {match[0]: match for match in re.finditer(r'"(?:[^"\\]|\\.)*"', text)}
    for found in [*texts.values()][::every]:
        evil = text[: found.start()] + json.dumps(EVIL) + text[found.end() :]
        (tmp_path / "run" / name).write_text(evil)
        made = outcome(lambda: page(tmp_path / "run"))
        drawn += isinstance(made, str)
        assert isinstance(made, PlaitError) or "<script>alert" not in made, found[0]
    assert drawn
