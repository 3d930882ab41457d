"""`write_report`: the page of runs, written to a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plait.errors import ConfigError
from plait.pictures.report.page import draw_report
from plait.pictures.report.run_record import RunRecord, read_run

REPORT_FILE = "report.html"


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of the runs at `paths` to `out`, by default into the only run's folder; return it.

    Raises `ConfigError` where a run is missing or the file cannot be written, `DataError` for damaged files.
    """
    if out is None and len(paths) > 1:
        raise ConfigError(f"{len(paths)} runs are given: name the page's file by --out FILE.")
    if out is not None and any(_is_of_run(out, path) for path in paths):
        raise ConfigError(f"{out} is a file of the run, which the page would replace: give another --out.")
    page = draw_report(read_runs(paths))
    if out is None:
        out = (paths[0] if paths[0].is_dir() else paths[0].parent) / REPORT_FILE
        if out.is_symlink():
            raise ConfigError(f"{out} is a link, which others may have made: remove it, or give --out FILE.")
    return write_page(page, out, "--out")


def _is_of_run(out: Path, run: Path) -> bool:
    """Return whether `out`, or what it links to, is a file in the folder of `run` that is no page."""
    file, folder = Path(os.path.realpath(out)), run if run.is_dir() else run.parent
    return file.is_file() and file.parent == Path(os.path.realpath(folder)) and file.suffix != ".html"


def write_page(page: str, out: Path, option: str) -> Path:
    """Write a text, such as a page, to `out`, and return `out`. Raises `ConfigError` that names `option`."""
    try:
        out.write_bytes(page.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}): give another file by {option}."
        ) from None
    return out


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Return the runs at `paths`, with names that tell them apart."""
    runs = [read_run(path) for path in paths]
    counts = Counter(run.name for run in runs)
    twice = [name for name, count in counts.items() if count > 1]
    return [
        replace(run, name=str(path)) if run.name in twice else run
        for run, path in zip(runs, paths, strict=True)
    ]
