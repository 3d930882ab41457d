from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_runs import write_metrics

from plait.errors import DataError
from plait.pictures.report.metrics import Metrics, buckets, read_metrics


def test_columns_of_metrics_have_the_numbers_of_the_rows(tmp_path: Path) -> None:
    rows = write_metrics(tmp_path, 30)
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics.steps == tuple(range(1, 31))
    for key in rows[-1]:
        assert metrics.columns[key] == tuple(row.get(key) for row in rows)
    assert metrics.tokens == 30 * 65536
    assert metrics.at_last("validation_loss") == (30, rows[-1]["validation_loss"])


def test_damaged_lines_are_counted_and_what_is_not_finite_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": NaN}\n\n[1]\n{"step": 3, "lo')
    metrics = read_metrics(file)
    assert metrics.columns == {"step": (1, 2), "loss": (3, None)}
    assert metrics.damaged == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "it is empty"), ("no\n", "no line of it is a JSON object"), (b"\xff", "not UTF-8")],
)
def test_metrics_without_a_row_are_refused(tmp_path: Path, text: str | bytes, told: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=told):
        read_metrics(file)


def test_thinning_keeps_extremes_validations_and_ends() -> None:
    count = 5000
    losses = [float(step % 97) for step in range(count)]
    losses[1234], losses[4321] = 1e6, -1e6
    validation = [1.0 if step % 500 == 7 else None for step in range(count)]
    whole = Metrics(
        {"step": tuple(range(1, count + 1)), "loss": tuple(losses), "validation_loss": tuple(validation)}
    )
    thin = whole.thinned(400)
    assert len(thin.steps) <= 420
    assert {1, 1235, 4322, count} <= set(thin.steps)
    assert len(thin.numbers("validation_loss")) == 10
    assert all(losses[step - 1] == loss for step, loss in zip(thin.steps, thin.columns["loss"], strict=True))
    assert whole.thinned(count) is whole


@pytest.mark.parametrize(("count", "most"), [(10, 3), (3, 10), (7, 7), (0, 4)])
def test_buckets_cover_all_rows_once_in_nearly_equal_sizes(count: int, most: int) -> None:
    found = list(buckets(count, most))
    assert [one for bucket in found for one in bucket] == list(range(count))
    assert len(found) == min(count, most)
    sizes = [len(bucket) for bucket in found]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_rows_of_plait_train_are_json(tmp_path: Path) -> None:
    (row,) = write_metrics(tmp_path, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row
