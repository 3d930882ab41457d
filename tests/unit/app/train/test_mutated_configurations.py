"""Configurations, hardware files and schedules that somebody has changed: read, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from mutated_files import ALL, QUICK, outcomes
from plait.app.cli.schedule import run as schedule
from plait.app.config.config_parser import config_from_arguments
from plait.estimate.time.hardware import load_hardware

CONFIG = """# A small model.
[model]
name = "llama"
layers = 2
hidden = 16
[train]
lr = 1e-3
warmup = 5
[data]
mixture = ["a=3", "b=1"]
[parallel]
tp = 2
"""
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config.toml": (CONFIG, lambda path: config_from_arguments(["--config", str(path)])),
    "hardware.toml": (
        (files("plait.estimate.time") / "hardware_files" / "h100-sxm.toml").read_text(),
        load_hardware,
    ),
    "schedule.csv": (CSV, lambda path: schedule([str(path)])),
}


@pytest.mark.parametrize("number", [QUICK, pytest.param(ALL, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", READERS)
def test_a_changed_file_is_read_or_refused(tmp_path: Path, name: str, number: int) -> None:
    text, read = READERS[name]
    (source := tmp_path / "source").mkdir()
    (source / name).write_text(text)
    read(source / name)
    for _ in outcomes(source, name, "text", lambda folder: read(folder / name), number, tmp_path / "work"):
        pass
