"""The figures at the top of a report: name, text and an explanation."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from plait.pictures.report.run_record import RunRecord
from plait.quantities import bytes_text, duration_text, number_text, seconds_text


class Figure(NamedTuple):
    """A number of a run, as text with its unit."""

    name: str
    text: str
    about: str = ""


def figures_of(run: RunRecord) -> Iterator[Figure]:
    """Yield the figures of a run; those that it does not have are left out."""
    metrics = run.metrics
    loss, validation = metrics.at_last("loss"), metrics.at_last("validation_loss")
    if loss is not None:
        yield Figure("loss", number_text(loss[1]), f"training loss of step {loss[0]:,}")
    if validation is not None:
        yield Figure("validation loss", number_text(validation[1]), f"after step {validation[0]:,}")
        best = min(metrics.numbers("validation_loss"))
        if best < validation[1]:
            yield Figure("best validation loss", number_text(best))
    for key, name, about in (
        ("tokens_per_second", f"{run.counted}/s", "median over steps, of all ranks together"),
        ("step_seconds", "time of a step", "median over steps, wall time on rank 0"),
        ("mfu", "MFU", "median over steps: model FLOPs utilisation"),
    ):
        if values := metrics.numbers(key):
            middle = median(values)
            text = {"mfu": f"{middle:.1%}", "step_seconds": seconds_text(middle)}.get(
                key, number_text(middle)
            )
            yield Figure(name, text, about)
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
