"""Loggers of other packages, by stand-in modules: nothing is sent anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from plait.app.loop.loggers import (
    COLUMNS,
    Csv,
    JsonLines,
    Logger,
    LoggerGroup,
    MLflow,
    TensorBoard,
    WeightsAndBiases,
)
from plait.errors import ConfigError

ROWS = ({"step": 1, "loss": 2.0, "grad_norm": float("inf")}, {"step": 2, "loss": 1.0, "validation_loss": 3.0})
SENT = [({"loss": 2.0}, 1), ({"loss": 1.0, "validation_loss": 3.0}, 2)]


def written(logger: Logger) -> None:
    group = LoggerGroup([logger])
    group.begin(0)
    assert [group.write(row) for row in ROWS] == ["", ""]
    group.close()


def test_the_weights_and_biases_logger_sends_each_row_and_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    wandb = ModuleType("wandb")
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((numbers, step)), finish=lambda: calls.append("end")
    )
    wandb.init = lambda **options: (calls.append(options), run)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    written(WeightsAndBiases(project="p", mode="offline"))
    assert calls == [{"project": "p", "mode": "offline"}, *SENT, "end"]


def test_the_mlflow_logger_sends_each_row_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    mlflow = ModuleType("mlflow")
    vars(mlflow).update(
        start_run=lambda **options: calls.append(options),
        log_metrics=lambda numbers, step: calls.append((numbers, step)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    written(MLflow(run_name="r"))
    assert calls == [{"run_name": "r"}, *SENT, "end"]


@pytest.mark.parametrize("logger", [WeightsAndBiases(), MLflow(), TensorBoard("nowhere")], ids=type)
def test_a_package_that_is_not_installed_is_named(logger: Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"the logger \S+ needs the package \w+, which the extra \w+ of"):
        LoggerGroup([logger]).begin(0)
    logger.close()


def test_rows_after_a_resumption_are_dropped(tmp_path: Path) -> None:
    for logger in (JsonLines(tmp_path / "new" / "rows.jsonl"), Csv(tmp_path / "rows.csv", ("step", "loss"))):
        written(logger)
        logger.begin(1)
        logger.write({"step": 2, "loss": 9.0})
        logger.close()
    assert (tmp_path / "rows.csv").read_text() == "step,loss\n1,2.0\n2,9.0\n"
    lines = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1, "loss": 2.0, "grad_norm": null}', '{"step": 2, "loss": 9.0}']


def test_a_table_goes_on_with_the_same_columns_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    written(Csv(path, ("step", "loss")))
    for columns in (("step", "lr"), None):
        with pytest.raises(ConfigError, match=r"has the columns step, loss, and Csv is to go on with step, "):
            Csv(path, columns).begin(1)
    anew = Csv(path, ("step", "lr"))
    anew.begin(0)
    anew.close()
    assert (tmp_path / "rows.1.csv").read_text().startswith("step,loss\n1,2.0\n")


def test_a_table_gets_a_column_for_a_number_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for steps, rows in (
        (0, [{"step": 1, "loss": 2.0}, {"step": 2, "accuracy": 0.5}]),
        (2, [{"step": 3, "accuracy": 1}]),
    ):
        logger = Csv(path)
        logger.begin(steps)
        for row in rows:
            logger.write(row)
        logger.close()
    titles, *lines = [line.split(",") for line in path.read_text().splitlines()]
    assert titles == [*COLUMNS, "accuracy"]
    assert [len(line) for line in lines] == [len(titles)] * 3
    assert [(line[0], line[-1]) for line in lines] == [("1", ""), ("2", "0.5"), ("3", "1")]
