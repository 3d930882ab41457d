"""`draw_report`: the page of one run, or of several side by side, as one HTML document; of a prediction.

The folder `page` has the document, its style and scripts, and the plotting library uPlot with its licence.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.pictures.colours import page_colours
from plait.pictures.html_elements import POLICY, document, figure, filled_template, page_file
from plait.pictures.report.charts import Chart, Figure, charts_of, figures_of
from plait.pictures.report.metrics import means_of_stretches
from plait.pictures.report.run_record import RunRecord, read_run
from plait.pictures.report.sections import notes_section, sections_of, warning_section
from plait.pictures.timelines.html import script_of_one_timeline, timeline_script

MOST_STEPS = 10_000
"""Steps of a run that are drawn; of a longer run some are left out."""
_MOST_RESUMPTIONS = 6
"""Resumptions that are listed."""
MOST_STRETCHES = 300
_DIGITS = 4
REPORT_FILE = "report.html"

_STYLES = "timelines/page/timeline.css", "report/page/report.css"
_SCRIPTS = "uplot/uPlot.iife.min.js", "charts.js", "ranks.js", "plan.js"


def draw_report(runs: Sequence[RunRecord], policy: str = POLICY) -> str:
    """Return the report of `runs` as a self-contained HTML document.

    `policy`: the content security policy of the page.
    """
    title = " and ".join(run.name for run in runs)
    charts = charts_of(runs)
    body = filled_template(
        "report/page/report.html",
        title=escape(title),
        headings="\n".join(_heading(number, run, len(runs)) for number, run in enumerate(runs)),
        charts="\n".join(_chart(number, chart) for number, chart in enumerate(charts)),
        warnings="\n".join(warning_section(run, len(runs) > 1) for run in runs),
        sections="\n".join([notes_section(runs), *sections_of(runs)]),
    )
    styles = "report/page/uplot/uPlot.min.css", *_STYLES
    return document(
        title,
        body,
        style=page_colours(len(runs)) + "".join(map(page_file, styles)),
        data={"runs": [*map(_run_data, runs)], "charts": [asdict(chart) for chart in charts]},
        scripts=[timeline_script(), *(page_file(f"report/page/{name}") for name in _SCRIPTS)],
        policy=policy,
    )


def draw_prediction(
    title: str, about: str, figures: Iterable[Figure], sections: Iterable[str], timeline: Mapping[str, object]
) -> str:
    """Return the page of a predicted plan as a self-contained HTML document.

    `about`: sentences below the title. `sections`: as HTML; one has the element `timeline`, in which
    `timeline` is drawn.
    """
    body = filled_template(
        "report/page/prediction.html",
        title=escape(title),
        about=escape(about),
        figures="\n".join(figure(*one) for one in figures),
        sections="\n".join(sections),
    )
    return document(
        title,
        body,
        style=page_colours() + "".join(map(page_file, _STYLES)),
        data=timeline,
        scripts=[script_of_one_timeline(keeps_address=False)],
    )


def _run_data(run: RunRecord) -> Mapping[str, Any]:
    metrics = run.metrics.thinned(MOST_STEPS)
    return {
        "name": run.name,
        "steps": metrics.steps,
        "columns": metrics.columns,
        "resumed": run.resumptions,
        "ranks": rank_map(run),
        "timeline": None if run.step is None else run.step.timeline(),
    }


def _heading(number: int, run: RunRecord, runs: int) -> str:
    mark = f'<b class="mark" style="background: var(--series-{number})"></b>' if runs > 1 else ""
    figures = "\n".join(figure(*one) for one in figures_of(run))
    return (
        f"<section class=run><h2>{mark}{escape(run.name)}</h2>"
        f"<p class=state>{escape(run.state)}.{_resumptions(run)}</p>"
        f"\n<dl class=figures>\n{figures}\n</dl></section>"
    )


def _resumptions(run: RunRecord) -> str:
    """Return a sentence on the steps after which the run was resumed; "" where it never was."""
    steps = [f"{step:,}" for step in run.resumptions]
    last = [] if len(steps) <= _MOST_RESUMPTIONS else [f"and {len(steps) - _MOST_RESUMPTIONS} times more"]
    plural = "s" if len(steps) > 1 else ""
    return f" Resumed after step{plural} {', '.join([*steps[:_MOST_RESUMPTIONS], *last])}." if steps else ""


def _chart(number: int, chart: Chart) -> str:
    button = '<button class="log" aria-pressed="false">log</button>' if chart.logarithmic else ""
    return (
        f'<figure class="chart" id="chart-{number}"><figcaption><b>{escape(chart.title)}</b> '
        f"<span>{escape(chart.unit)}</span>{button}</figcaption><div></div></figure>"
    )


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


def rank_map(run: RunRecord) -> dict[str, Any] | None:
    """Return the data of the report's heat map of ranks and steps; None for fewer than two ranks.

    `values` has a list for each rank; `what` they are is the time in which a rank was not blocked, where that
    was measured, else its peak memory.
    """
    series = run.ranks
    if series is None or series.world == 1:
        return None
    seconds = dict(zip(run.metrics.steps, run.metrics.columns.get("step_seconds", ()), strict=False))
    busy = series.busy([seconds.get(step) for step in series.steps])
    first, values = means_of_stretches(series.memory if busy is None else busy, MOST_STRETCHES)
    return {
        "what": "peak memory so far" if busy is None else "busy time of a step",
        "format": "bytes" if busy is None else "seconds",
        "steps": [series.steps[row] for row in first] + [series.steps[-1] + 1],
        "values": [[float(f"{value:.{_DIGITS}g}") for value in row] for row in values],
    }
