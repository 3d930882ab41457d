"""Pictures as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.pictures.timelines.files import FORMATS, picture, write_pictures
from plait.pictures.timelines.timeline import simulate
from plait.schedules.named_schedules import policy_schedule

TIMELINE = simulate(policy_schedule("1f1b", 2, 2))


def test_each_format_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    paths = {kind: tmp_path / "new" / f"a.{kind}" for kind in FORMATS}
    assert list(write_pictures(TIMELINE, paths)) == list(paths.values())
    texts = {kind: path.read_text() for kind, path in paths.items()}
    assert texts == {kind: picture(TIMELINE, kind) for kind in FORMATS}
    assert texts["svg"].startswith("<svg")
    assert "<html" in texts["html"]
    assert len(json.loads(texts["trace"])["traceEvents"]) > 8
    assert texts["csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("kind", ["svg", "html", "trace"])
def test_a_given_name_replaces_the_schedules_in_a_picture(kind: str) -> None:
    assert "a name" in picture(TIMELINE, kind, name="a name")
    assert "1f1b: 2 ranks, 2 micro-batches" in picture(TIMELINE, kind)
    assert "1f1b: 2 ranks, 2 micro-batches" not in picture(TIMELINE, kind, name="a name")


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.x\.svg cannot be written .*: give another file"):
        list(write_pictures(TIMELINE, {"svg": tmp_path / "file" / "x.svg"}))
