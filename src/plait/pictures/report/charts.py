"""The charts of a report, and the figures at its top: which metrics they show, with titles and units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

from plait.pictures.quantities import bytes_text, duration_text, number_text, seconds_text
from plait.pictures.report.run_record import RunRecord

Format = Literal["number", "bytes", "seconds", "percent"]
NAMED = ("step", "tokens", "trained_tokens", "slowest_rank")
"""Columns without a chart: the axis, counts, and the number of a rank."""


@dataclass(frozen=True)
class ChartSeries:
    """A column of `metrics.jsonl` that a chart draws over the steps."""

    key: str
    label: str = ""
    """Told apart from the chart's other series by this; "" if there is no other."""
    points: bool = False
    """Whether it has few numbers, which are marked."""


@dataclass(frozen=True)
class ChartLine:
    """A horizontal line in a chart at a constant value of a run, such as its predicted memory."""

    run: int
    label: str
    value: float


@dataclass(frozen=True)
class Chart:
    """A chart of one or several metrics over the steps: its title, unit, series and format of numbers."""

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
    Chart("Gradient norm", "L2, before clipping", (ChartSeries("grad_norm"),), smooth=True, logarithmic=True),
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
        "Slowest rank",
        "time of its own work, as a multiple of that of its peers",
        (ChartSeries("slowness", points=True),),
    ),
    Chart(
        "MFU", "model FLOPs utilisation, of the peak of all devices", (ChartSeries("mfu"),), "percent", True
    ),
    Chart("Balance loss", "of routers, without its weight", (ChartSeries("balance_loss"),), smooth=True),
    Chart("z-loss", "of routers, without its weight", (ChartSeries("z_loss"),), smooth=True),
    Chart(
        "Largest load of an expert",
        "tokens, as a multiple of the mean in its layer",
        (ChartSeries("largest_expert_load"),),
        smooth=True,
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


class Figure(NamedTuple):
    """A number of a run as text with its unit, shown at the top of the report."""

    name: str
    text: str
    about: str = ""


def figures_of(run: RunRecord) -> Iterator[Figure]:
    """Yield the numbers that the report shows at its top for a run, such as loss and throughput."""
    metrics = run.metrics
    loss, validation = metrics.at_last("loss"), metrics.at_last("validation_loss")
    if loss is not None:
        yield Figure("loss", number_text(loss[1]), f"training loss of step {loss[0]:,}")
    if validation is not None:
        yield Figure("validation loss", number_text(validation[1]), f"after step {validation[0]:,}")
        best = min(metrics.numbers("validation_loss"))
        if best < validation[1]:
            yield Figure("best validation loss", number_text(best))
    for key, name, text, about in (
        ("tokens_per_second", f"{run.counted}/s", number_text, "median over steps, of all ranks together"),
        ("step_seconds", "time of a step", seconds_text, "median over steps, wall time on rank 0"),
        ("mfu", "MFU", "{:.1%}".format, "median over steps: model FLOPs utilisation"),
    ):
        if values := metrics.numbers(key):
            yield Figure(name, text(median(values)), about)
    yield from _memory(run)
    if tokens := metrics.tokens:
        yield Figure(run.counted, f"{tokens:,}", "of all steps together")
    if times := metrics.numbers("step_seconds"):
        yield Figure("time in steps", duration_text(sum(times)), "without start, validation and checkpoints")


def _memory(run: RunRecord) -> Iterator[Figure]:
    about = run.description
    if about is not None and about.predicted_memory is not None:
        yield Figure(
            "tensors, predicted",
            bytes_text(about.predicted_memory),
            "tensors of the rank with most, at the peak of a step",
        )
    if peak := run.metrics.last("peak_memory_bytes"):
        name, what = "resident memory", "of a rank's process, with Python and torch"
        if about is not None and about.accelerated:
            name, what = "tensors, measured", "allocated on the device"
        yield Figure(name, bytes_text(peak), f"{what}; of the rank with most")
