"""The charts of a report: which metrics they show, with titles, units and lines to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.pictures.report.run_record import RunRecord

Format = Literal["number", "bytes", "seconds", "percent"]
NAMED = ("step", "tokens", "trained_tokens")
"""Columns without a chart: the axis, and counts."""


@dataclass(frozen=True)
class ChartSeries:
    """A column of the metrics in a chart."""

    key: str
    label: str = ""
    """Told apart from the chart's other series by this; "" if there is no other."""
    points: bool = False
    """Whether it has few numbers, which are marked."""


@dataclass(frozen=True)
class ChartLine:
    """A horizontal line of one run."""

    run: int
    label: str
    value: float


@dataclass(frozen=True)
class Chart:
    """A chart over the steps."""

    title: str
    unit: str
    series: tuple[ChartSeries, ...]
    format: Format = "number"
    smooth: bool = False
    """Whether a running mean is drawn where there are many steps."""
    logarithmic: bool = False
    """Whether a button offers a logarithmic axis."""
    lines: tuple[ChartLine, ...] = ()


_CHARTS = (
    Chart(
        "Loss",
        "mean over the tokens of a step",
        (ChartSeries("loss", "training"), ChartSeries("validation_loss", "validation", points=True)),
        smooth=True,
        logarithmic=True,
    ),
    Chart(
        "Gradient norm",
        "L2, before clipping",
        (ChartSeries("grad_norm"),),
        smooth=True,
        logarithmic=True,
    ),
    Chart("Learning rate", "of the step", (ChartSeries("lr"),)),
    Chart("Throughput", "tokens a second, all ranks", (ChartSeries("tokens_per_second"),), smooth=True),
    Chart(
        "Time of a step",
        "wall time on rank 0; of it waiting for data, on the slowest rank",
        (ChartSeries("step_seconds", "step"), ChartSeries("data_seconds", "data")),
        "seconds",
        smooth=True,
    ),
    Chart(
        "MFU", "model FLOPs utilisation, of the peak of all devices", (ChartSeries("mfu"),), "percent", True
    ),
    Chart(
        "Processor",
        "busy share of the host of rank 0, all processes",
        (ChartSeries("cpu_utilization"),),
        "percent",
        smooth=True,
    ),
    Chart(
        "Memory",
        "peak so far, of the rank with most",
        (ChartSeries("peak_memory_bytes", "measured"),),
        "bytes",
    ),
)


def charts_of(runs: Sequence[RunRecord]) -> tuple[Chart, ...]:
    """Return the charts for which one of the runs has numbers; other columns get a chart of their own."""
    known = {series.key for chart in _CHARTS for series in chart.series} | set(NAMED)
    others = dict.fromkeys(key for run in runs for key in run.metrics.columns if key not in known)
    counted = "/".join(dict.fromkeys(run.counted for run in runs))
    named = (replace(chart, unit=chart.unit.replace("tokens", counted)) for chart in _CHARTS)
    charts = [*named, *(Chart(key, "as logged", (ChartSeries(key),)) for key in others)]
    filled = (_with_numbers(chart, runs) for chart in charts)
    return tuple(chart for chart in filled if chart.series)


def _with_numbers(chart: Chart, runs: Sequence[RunRecord]) -> Chart:
    """Return the chart with the series of which there are numbers, and its lines."""
    series = tuple(one for one in chart.series if any(run.metrics.numbers(one.key) for run in runs))
    lines = [line for number, run in enumerate(runs) for line in _lines(chart.title, number, run)]
    return replace(chart, series=series, lines=tuple(lines))


def _lines(title: str, number: int, run: RunRecord) -> Iterator[ChartLine]:
    clip = run.config_field("train.clip")
    if title == "Gradient norm" and isinstance(clip, int | float) and clip:
        yield ChartLine(number, "clipped to", clip)
    about = run.description
    if title == "Memory" and about is not None and about.predicted_memory:
        yield ChartLine(number, "predicted, of tensors", about.predicted_memory)
    if title == "Time of a step" and about is not None and about.predicted_seconds:
        yield ChartLine(number, "predicted", about.predicted_seconds)
