"""The samples of a run in its report: text that the model generated, by step."""

from __future__ import annotations

from html import escape

from plait.pictures.markup import section, table
from plait.pictures.report.run_record import RunRecord

MOST_SAMPLES = 24
"""Samples that are shown; of more, evenly spaced ones with the first and the last."""


def samples_section(run: RunRecord, of: str, number: int) -> str:
    """Return the samples of a run as HTML, one of each step; `of`: the run's name after "of", or ""."""
    by_step = {
        event.step: event.text for event in run.events if event.kind == "sample"
    }  # the latest of a step
    steps = sorted(by_step)
    shown = steps
    if len(steps) > MOST_SAMPLES:
        gaps = MOST_SAMPLES - 1
        shown = [steps[place * (len(steps) - 1) // gaps] for place in range(MOST_SAMPLES)]
    rows = [[f"{step:,}", f"<pre class=sample>{escape(by_step[step])}</pre>"] for step in shown]
    left = f"{len(shown)} of {len(steps)} samples are shown." if len(shown) < len(steps) else ""
    return section(f"Samples{of}", table(["after step", "text"], rows), left, name=f"samples-of-{number}")
