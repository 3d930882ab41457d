"""The figures of the hardware files, beside those that `benchmarks/planner/fit.py` gives."""

from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import find_modules_of

FOLDER = Path(__file__).parents[4] / "benchmarks" / "planner"


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Any:
    find_modules_of(FOLDER, monkeypatch)
    return import_module("fit")


@pytest.mark.full
@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
def test_the_files_hold_what_the_fit_gives_without_judged_rows(
    fit: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = import_module("runs")
    known = {name: {**table, "judge": []} for name, table in runs.tables().items()}
    monkeypatch.setattr(runs, "tables", lambda: known)
    # The fit does not start from the figures of the files.
    found = fit.fit(device)[0]
    assert found == fit.frozen(device)


@pytest.mark.full
def test_reserved_bytes_are_the_median_of_the_fitted_rows(fit: Any) -> None:
    assert fit.reserved() == import_module("machines").JEAN_ZAY_RESERVED


def test_clusters_of_a_device_share_its_figures(fit: Any) -> None:
    machines = import_module("machines").clusters()
    for names, figures in fit.GROUPS.values():
        for figure in figures:
            if ":" not in figure:
                own = {f"{name}:{figure}" for name in names} & {*figures}
                assert not own
                assert len({getattr(machines[name].efficiency, figure) for name in names}) == 1


def test_the_fits_method_finds_a_minimum_the_same_each_time(fit: Any) -> None:
    def valley(point: list[float]) -> float:
        return abs(point[0] - 1) + 10 * abs(point[1] + 2)

    found = fit.minimum(valley, [0.0, 0.0], 100)
    assert found == pytest.approx([1, -2], abs=1e-4)
    assert found == fit.minimum(valley, [0.0, 0.0], 100)
    assert fit.minimum(lambda point: inf, [3.0], 5)[0] >= 3


@pytest.mark.full
@pytest.mark.parametrize("part", ["judge", "fit"])
def test_the_readme_has_what_is_printed(fit: Any, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("run").main(part)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    readme = (FOLDER / "README.md").read_text().splitlines()
    assert [line for line in printed if line not in readme] == []
