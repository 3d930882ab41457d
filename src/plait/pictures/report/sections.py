"""The sections of a report below its charts, as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from plait.pictures.colours import USES
from plait.pictures.html_elements import bar, legend, section, table, wrappable
from plait.pictures.quantities import bytes_text, microbatches_text, seconds_text
from plait.pictures.report.expert_loads import ExpertLoads
from plait.pictures.report.plan_pictures import layers_picture, ranks_picture, tensor_picture, tensor_text
from plait.pictures.report.run_json import PredictedRank, RunDescription
from plait.pictures.report.run_record import RunRecord
from plait.pictures.report.step_json import RecordedStep
from plait.pictures.report.warnings import warnings_of
from plait.pictures.timelines.html import timeline_markup

_MOST_RANKS = 16
"""Ranks that have a row in a table; of more, those with the extreme values do."""
MOST_SAMPLES = 24
"""Samples that are shown; of more, evenly spaced ones with the first and the last."""


def warning_section(run: RunRecord, named: bool) -> str:
    """Return the warnings about a run as HTML, or "" without any; `named`: with the run's name."""
    warnings = list(warnings_of(run))
    title = f"Warnings of {run.name}" if named else "Warnings"
    items = "".join(f"<li>{escape(text)}</li>" for text in warnings)
    return f'<section class="warnings"><h2>{escape(title)}</h2><ul>{items}</ul></section>' if warnings else ""


def sections_of(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield as HTML each section of the report for which the runs have written the files."""
    for number, run in enumerate(runs):
        of = f" of {run.name}" if len(runs) > 1 else ""
        if run.ranks is not None and run.ranks.world > 1:
            yield section(
                f"Ranks{of}", f'<div class="rank-map" id="ranks-{number}"></div>', name=f"ranks-of-{number}"
            )
        if run.experts is not None:
            yield _experts(run.experts, of, number)
        if any(event.kind == "sample" for event in run.events):
            yield samples_section(run, of, number)
        if run.step is not None:
            yield _timeline(run.step, of, number)
        if run.description is not None:
            yield _plan(run.description, of, number)
            yield _memory(run, run.description, of, number)
        if run.step is not None and any(rank.traffic for rank in run.step.ranks):
            yield _traffic(run.step, of, number)
    if any(run.config for run in runs):
        yield _configuration(runs)
    if any(run.description for run in runs):
        yield _environment(runs)


def notes_section(runs: Sequence[RunRecord]) -> str:
    """Return the notes that users wrote about their runs as HTML, or "" without notes."""
    noted = [(run.name, run.description.notes) for run in runs if run.description and run.description.notes]
    texts = "".join(
        f"{f'<h3>{escape(name)}</h3>' * (len(runs) > 1)}<p class=notes>{escape(text)}</p>"
        for name, text in noted
    )
    return section("Notes", texts) if noted else ""


def _experts(loads: ExpertLoads, of: str, number: int) -> str:
    """Return maps of the load of each expert over the steps, and the tokens that each rank sent."""
    shown, routers = len(loads.shown), len(loads.loads)
    part = f" {shown} of {routers} routers are shown." if shown < routers else ""
    forced = " Routing was forced to be balanced, for timings." if loads.forced else ""
    about = (
        f"Tokens of each expert in steps {loads.steps[0]:,} to {loads.steps[-1]:,}, a row each: dark none, "
        f"grey the mean of its layer, light twice the mean or more.{part}{forced}"
    )
    content = f"<div class=scroll>{loads.draw()}</div>{_tokens_sent(loads)}"
    return section(f"Experts{of}", content, about=about, name=f"experts-of-{number}")


def _tokens_sent(loads: ExpertLoads) -> str:
    """Return a table of the tokens that each rank sent to experts of other ranks, or "" where none did."""
    if not any(loads.sent):
        return ""
    numbers = list(enumerate(zip(loads.sent, loads.received, strict=False)))
    most = sorted(sorted(numbers, key=lambda one: -sum(one[1]))[:_MOST_RANKS])
    rows = [[str(rank), f"{sent:,.0f}", f"{received:,.0f}"] for rank, (sent, received) in most]
    left = f" The {len(rows)} of {len(numbers)} ranks with most." if len(rows) < len(numbers) else ""
    about = f"<p>Tokens between ranks in a step, over all layers, the mean of the steps.{left}</p>"
    return about + table(["rank", "sent", "received"], rows, numbers=1)


def samples_section(run: RunRecord, of: str, number: int) -> str:
    """Return a run's generated samples as HTML, one per step; `of`: " of NAME" for the title, or ""."""
    # The latest of a step.
    by_step = {event.step: event.text for event in run.events if event.kind == "sample"}
    steps = sorted(by_step)
    shown = steps
    if len(steps) > MOST_SAMPLES:
        gaps = MOST_SAMPLES - 1
        shown = [steps[place * (len(steps) - 1) // gaps] for place in range(MOST_SAMPLES)]
    rows = [[f"{step:,}", f"<pre class=sample>{escape(by_step[step])}</pre>"] for step in shown]
    left = f"{len(shown)} of {len(steps)} samples are shown." if len(shown) < len(steps) else ""
    return section(f"Samples{of}", table(["after step", "text"], rows), left, name=f"samples-of-{number}")


def _timeline(step: RecordedStep, of: str, number: int) -> str:
    shown, ranks = len(step.shown_ranks), len(step.ranks)
    part = f" {shown} of {ranks} ranks are shown: whole pipelines." if shown < ranks else ""
    lane = (
        " The thin lane below a rank's actions shows when its host was blocked in communication, also within "
        "an action: it waits for others, or for data to arrive."
        if step.axes
        else ""
    )
    first, last = step.bounds
    about = (
        f"Step {step.step:,}, as it ran: {seconds_text((last - first) / 1e9)}, schedule "
        f"{escape(step.policy)}, {microbatches_text(step.microbatches)}.{lane}{part}"
    )
    markup = timeline_markup(f"step {step.step}{of}", step.kinds, step.axes, id=f"timeline-{number}")
    return section(f"A step{of}", markup + _uses(step), about, name=f"step-of-{number}")


def _uses(step: RecordedStep) -> str:
    """Return a table of the time of each rank by use; of many ranks those that compute most and least."""
    uses = list(step.uses())
    if not uses or not step.axes:
        return ""
    names = list(uses[0][1])
    colours = ["computing", *(colour for _, colour in step.axes), "track"]
    if len(uses) > _MOST_RANKS:
        ordered = sorted(uses, key=lambda one: -one[1]["computing"])
        uses = [*ordered[: _MOST_RANKS // 2], *ordered[-_MOST_RANKS // 2 :]]
    rows = []
    for rank, seconds in uses:
        whole = sum(seconds.values())
        parts = [
            (f"{name}: {seconds_text(seconds[name])}", seconds[name], colour)
            for name, colour in zip(names, colours, strict=True)
        ]
        rows.append([f"rank {rank}", bar(parts, whole), *(_share(seconds[name], whole) for name in names)])
    heads = (name if name in ("computing", "other") else f"blocked, {name}" for name in names)
    return table(["", "time by use", *heads], rows, numbers=2)


def _share(seconds: float, whole: float) -> str:
    return f"{seconds_text(seconds)} <small>{seconds / whole:.0%}</small>" if seconds > 0 else "–"


def _plan(about: RunDescription, of: str, number: int) -> str:
    degrees = " × ".join(f"{axis} {size}" for axis, size in about.mesh.items() if size > 1) or "one rank"
    told = (
        f"{about.world} ranks: {degrees}. Strategy {escape(about.strategy)}. Point at a rank to see which "
        "shards it holds, click to keep it."
    )
    tensors = "\n".join(
        f"<figure class=tensor>{tensor_picture(one, about.mesh)}<figcaption><b>{wrappable(one.name)}</b> "
        f"<span>{escape(tensor_text(one, about))}</span></figcaption></figure>"
        for one in about.tensors
    )
    body = (
        f"<h3>Layers, in their order, by rank of pp</h3><div class=scroll>{layers_picture(about)}</div>"
        f"<h3>Ranks</h3><div class=scroll>{ranks_picture(about)}</div><output class=place></output>"
        f"<h3>Shards of parameters{_state_text(about)}</h3><div class=tensors>{tensors}</div>"
    )
    return section(f"Plan{of}", f"<div class=holding>{body}</div>", told, name=f"plan-of-{number}")


def _state_text(about: RunDescription) -> str:
    """Return which tensors the intervals of `shard` and `cp` divide, as text."""
    return {
        "optimizer": ": lines divide what each rank updates; along dp parameters are whole",
        "gradients": ": lines divide what each rank updates, with gradients and optimizer state",
        "full": ": lines divide what each rank holds while its layer does not run",
    }.get(about.strategy, "")


def _memory(run: RunRecord, about: RunDescription, of: str, number: int) -> str:
    measured = run.ranks.peaks if run.ranks is not None and run.ranks.world == about.world else ()
    each = about.world // about.mesh["pp"]
    largest = max((sum(one.at_peak.values()) for one in about.memory), default=1)
    rows = [
        [
            f"pp {one.rank}",
            _memory_bar(one, largest),
            bytes_text(one.most),
            bytes_text(one.at_rest),
            bytes_text(max(measured[one.rank * each : (one.rank + 1) * each])) if measured else "–",
        ]
        for one in about.memory
    ]
    what = (
        "tensors on the device, as the allocator counts them"
        if about.accelerated
        else "the resident set of the process, with Python, torch and what it has read"
    )
    told = (
        "Predicted: tensors of a rank, at the peak of a step and between steps. Measured: the most on a "
        f"rank of that stage, {what}."
    )
    used = {use for one in about.memory for use in one.at_peak}
    marks = legend((use, f"use-{use}") for use in USES if use in used)
    heads = ["", "predicted at the peak, by use", "predicted", "at rest", "measured"]
    return section(f"Memory{of}", marks + table(heads, rows, numbers=2), told, name=f"memory-of-{number}")


def _memory_bar(rank: PredictedRank, largest: float) -> str:
    parts = [
        (f"{use}: {bytes_text(rank.at_peak[use])}", rank.at_peak[use], f"use-{use}")
        for use in USES
        if use in rank.at_peak
    ]
    return bar(parts, largest)


def _traffic(step: RecordedStep, of: str, number: int) -> str:
    found = list(step.traffic())
    largest = max(total for *_, total in found)
    rows = [
        [
            escape(axis.replace("_", " × ")),
            escape(kind.replace("_", "-")),
            bar([(f"{bytes_text(total)}", total, "bar")], largest),
            bytes_text(total),
            f"{calls:,}",
            bytes_text(most),
        ]
        for axis, kind, calls, most, total in found
    ]
    told = f"Payload that ranks passed to communication in step {step.step:,}; of a rank: the one with most."
    heads = ["axis", "operation", "", "all ranks", "calls of a rank", "bytes of a rank"]
    return section(f"Traffic{of}", table(heads, rows, numbers=3), told, name=f"traffic-of-{number}")


def _configuration(runs: Sequence[RunRecord]) -> str:
    """Return the fields of the configurations as a table, those that differ between the runs marked."""
    fields = [dict(run.settings()) for run in runs]
    names = list(dict.fromkeys(name for one in fields for name in one))
    values = [
        [json.dumps(one[name], ensure_ascii=False) if name in one else "–" for one in fields]
        for name in names
    ]
    differ = [row for row, texts in enumerate(values) if len(set(texts)) > 1]
    heads = ["field", *(run.name for run in runs)]
    rows = [[escape(text) for text in (name, *texts)] for name, texts in zip(names, values, strict=True)]
    if len(runs) > 1:
        changed = table(heads, [rows[row] for row in differ]) if differ else "<p>They are the same.</p>"
        whole = f"<details><summary>All fields</summary>{table(heads, rows, marked=differ)}</details>"
        return section("Configuration", changed + whole, "Fields that differ.")
    whole = f"<div class=columns>{table(['field', 'value'], rows)}</div>"
    about = runs[0].description
    if about is None:
        return section("Configuration", whole)
    differing = {
        name for name in names for field in about.changed_fields if f"{name}.".startswith(f"{field}.")
    }
    shown = [row for row, name in zip(rows, names, strict=True) if name in differing]
    body = f"{table(['field', 'value'], shown)}<details><summary>All fields</summary>{whole}</details>"
    return section("Configuration", body, "Fields that differ from their default.")


def _environment(runs: Sequence[RunRecord]) -> str:
    told = [run.description for run in runs if run.description is not None]
    names = list(dict.fromkeys(name for one in told for name in one.environment))
    rows = [["run", *(escape(one.id or "–") for one in told)]]
    rows += [["started", *(escape(one.started) for one in told)]]
    rows += [[escape(name), *(escape(one.environment.get(name, "–")) for one in told)] for name in names]
    lines = ""
    for one in told:
        lines += f"<h3>{escape(one.title)}</h3>" if len(told) > 1 else ""
        lines += "".join(f"<p>{escape(line)}</p>" for line in one.lines)
    heads = ["", *(run.name for run in runs if run.description is not None)]
    return section("Environment", f"<div class=printed>{lines}</div>{table(heads, rows)}")
