import csv
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.app.loop.loggers import COLUMNS, LoggerGroup, unwritable
from plait.app.train import run_callbacks
from plait.app.train.run_callbacks import FIELD, loggers_of
from plait.errors import ConfigError

ROWS = (
    {"step": 1, "loss": 5.5, "tokens": 2048},
    {"step": 2, "loss": 5.25, "tokens": 2048, "validation_loss": 5.0},
)


@contextmanager
def open_metrics(folder: Path, **options: bool) -> Iterator[LoggerGroup]:
    group = LoggerGroup(loggers_of(folder, **options), folder, FIELD)
    yield group
    group.close()


def write(folder: Path, *, csv_too: bool = True, tensorboard: bool = False, rows: int = 2) -> None:
    with open_metrics(folder, csv_too=csv_too, tensorboard=tensorboard) as opened:
        opened.begin(0)
        for row in ROWS[:rows]:
            opened.write(row)


def test_lines_and_table_hold_the_same(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "run")
    folder = tmp_path / "deep" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(ROWS)
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    filled = [{name: float(value) for name, value in row.items() if value} for row in table]
    assert filled == list(ROWS)


def test_a_second_run_starts_anew_and_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    write(tmp_path)
    for number in (1, 2):
        write(tmp_path, rows=1)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        assert len((tmp_path / "metrics.1.jsonl").read_text().splitlines()) == 2
        assert len((tmp_path / f"metrics.{number}.csv").read_text().splitlines()) == 4 - number


def test_a_non_finite_metric_is_written_as_null(tmp_path: Path) -> None:
    """A step in half precision whose gradients overflow: its norm is no number that JSON knows."""
    with open_metrics(tmp_path, csv_too=True, tensorboard=True) as opened:
        opened.begin(0)
        opened.write({"step": 1, "loss": 5.5, "grad_norm": float("inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "loss": 5.5, "grad_norm": None}
    assert "inf" not in (tmp_path / "metrics.csv").read_text()


def test_lines_of_metrics_are_flushed_at_once(tmp_path: Path) -> None:
    with open_metrics(tmp_path, csv_too=True, tensorboard=False) as opened:
        opened.begin(0)
        opened.write(ROWS[0])
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2


def test_tensorboard_files_have_the_written_metrics(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # the second starts anew
        write(tmp_path, tensorboard=True)
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 5.5), (2, 5.25)]
    assert [event.step for event in read.Scalars("validation_loss")] == [2]


def test_tensorboard_that_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_callbacks, "find_spec", lambda name: None)
    write(tmp_path, tensorboard=True)
    assert not (tmp_path / "tensorboard").exists()


def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the first row is written, then nothing, until there is room again."""
    with open_metrics(tmp_path, csv_too=True, tensorboard=False) as opened:
        opened.begin(0)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))
            told = [opened.write(row) for row in ROWS]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, handler)
        assert told == [f"metrics cannot be written to {tmp_path} (File too large): retried every step.", ""]
        assert (tmp_path / "metrics.jsonl").stat().st_size == 20
        assert opened.write({"step": 3}) == ""
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*ROWS, {"step": 3}]
    table = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in table] == ["step", "1", "2", "3"]


def test_a_metrics_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir = .* cannot be written to .*: choose another folder"):
        write(tmp_path / "file" / "run")
    error = IsADirectoryError(21, "it is a folder", str(tmp_path / "metrics.csv"))
    assert "metrics.csv: it is a folder)" in str(unwritable(tmp_path, error, FIELD)), "the file is named, too"


def test_without_sinks_metrics_write_no_file() -> None:
    LoggerGroup().write(ROWS[0])
