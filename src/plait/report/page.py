"""`draw_report`: the page of one run, or of several side by side, as one HTML document.

The folder `page` has the document, its style and scripts, and the plotting library uPlot with its licence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from string import Template
from typing import Any

from plait.report.charts import Chart, charts_of
from plait.report.figures import Figure, figures_of
from plait.report.record import RunRecord
from plait.schedules.simulation.colours import page_colours

MOST_STEPS = 10_000
"""Steps of a run that are drawn; of a longer run some are left out."""


def draw_report(runs: Sequence[RunRecord]) -> str:
    """Return the report of `runs`, which have different names, as an HTML document without external resources."""
    title = " and ".join(run.name for run in runs)
    charts = charts_of(runs)
    return Template(_file("report.html")).substitute(
        title=escape(title),
        style=page_colours() + _file("uplot/uPlot.min.css") + _file("report.css"),
        headings="\n".join(_heading(number, run, len(runs)) for number, run in enumerate(runs)),
        charts="\n".join(_chart(number, chart) for number, chart in enumerate(charts)),
        sections="\n".join(_sections(runs)),
        data=embedded({"runs": [*map(_run_data, runs)], "charts": [asdict(chart) for chart in charts]}),
        scripts="\n".join(
            f"<script>\n{_file(name)}</script>" for name in ("uplot/uPlot.iife.min.js", "charts.js")
        ),
    )


def embedded(data: object) -> str:
    """Return `data` as JSON that no text in it can end the script element of."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (resources.files("plait.report") / "page" / name).read_text(encoding="utf-8")


def _run_data(run: RunRecord) -> Mapping[str, Any]:
    metrics = run.metrics.thinned(MOST_STEPS)
    return {"name": run.name, "steps": metrics.steps, "columns": metrics.columns}


def _heading(number: int, run: RunRecord, runs: int) -> str:
    mark = f'<b class="mark" style="background: var(--series-{number})"></b>' if runs > 1 else ""
    figures = "\n".join(_figure(figure) for figure in figures_of(run))
    return (
        f"<section class=run><h2>{mark}{escape(run.name)}</h2><p class=state>{escape(run.state)}.</p>"
        f"\n<dl class=figures>\n{figures}\n</dl></section>"
    )


def _figure(figure: Figure) -> str:
    return (
        f'<div title="{escape(figure.about)}"><dt>{escape(figure.name)}</dt>'
        f"<dd>{escape(figure.text)}</dd></div>"
    )


def _chart(number: int, chart: Chart) -> str:
    button = '<button class="log" aria-pressed="false">log</button>' if chart.logarithmic else ""
    return (
        f'<figure class="chart" id="chart-{number}"><figcaption><b>{escape(chart.title)}</b> '
        f"<span>{escape(chart.unit)}</span>{button}</figcaption><div></div></figure>"
    )


def _sections(runs: Sequence[RunRecord]) -> Iterator[str]:
    if any(run.config for run in runs):
        yield section("Configuration", _configuration(runs))


def section(title: str, body: str, about: str = "") -> str:
    """Return a section of the page; `about`: a sentence below its title, as HTML."""
    told = f"<p class=about>{about}</p>" if about else ""
    return f"<section><h2>{escape(title)}</h2>{told}\n{body}</section>"


def _configuration(runs: Sequence[RunRecord]) -> str:
    """Return the fields of the configurations as a table, those that differ between the runs marked."""
    fields = [dict(run.settings()) for run in runs]
    names = dict.fromkeys(name for one in fields for name in one)
    rows = []
    for name in names:
        values = [json.dumps(one[name], ensure_ascii=False) if name in one else "–" for one in fields]
        rows.append(([name, *values], len(set(values)) > 1))
    return table(["field", *(run.name for run in runs)], rows)


def table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Return a table of texts; each row with whether it is marked."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "\n".join(
        f"<tr{' class=differs' if marked else ''}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
        for row, marked in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead>\n<tbody>{lines}</tbody></table>"
