"""The page of `plait plan --html`: plans by step time and memory, and the chosen one with its timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from plait.app.cli.plan_output import (
    GIB,
    behind,
    bound_text,
    change_cells,
    change_lines,
    goodput_lines,
    groups,
    notes,
    plan_rows,
)
from plait.app.config.config import Config
from plait.estimate.prediction.prediction import Prediction
from plait.estimate.search.plan_changes import PlanChange
from plait.estimate.search.plan_search import PlanFrontier, PlanSearchResult
from plait.estimate.time.goodput import Goodput
from plait.pictures.html_elements import bar, legend, section, table
from plait.pictures.quantities import memory_text, microbatches_text, seconds_text
from plait.pictures.report.charts import Figure
from plait.pictures.report.page import draw_prediction
from plait.pictures.report.scatter_picture import ScatterPicture, ScatterPoint
from plait.pictures.timelines.html import simulated_data, timeline_markup
from plait.pictures.timelines.text import kinds_of
from plait.plan.plan import Plan

_COLOURS = {"none": "series-0", "optimizer": "series-1", "gradients": "series-2", "full": "series-3"}
"""Of the points, by the plan's strategy."""


def search_page(
    config: Config, result: PlanSearchResult, frontier: PlanFrontier, most: int, goodput: Goodput | None
) -> str:
    """Return the HTML page of a plan search: a plot of `frontier`, a table, the best plan's timeline.

    `most`: the most rows of the table, fastest plans first.
    """
    best = result.best[0]
    told = "" if len(result.best) == 1 else f" The next time is {behind(result):.2%} longer."
    drawn = len(frontier.plans)
    line = (
        f"{drawn:,} of {result.plans:,} plans are drawn, predicted exactly: the fastest for all the memory, "
        f"and for less and less of it. The other {result.plans - drawn:,} were only bounded or came "
        "later: they need more memory than a search allowed, or are slower than what it found. The "
        "line joins plans than which none is both faster and smaller; between two of them there can be "
        "others, no faster than the right one."
    )
    sections = [
        section("The fastest plans", _plans(groups(result.best)[:most]), f"{_bound(best)}{told}", "plans"),
        _picture(frontier.plans, {best.plan: "fastest"}, line, frontier.best),
        *_step(best),
        section("The other plans", _list(notes(result)[: 1 + len(result.impossible)]), name="others"),
    ]
    return _page(config, best, sections, goodput)


def judged_page(
    config: Config, found: Prediction, changes: Sequence[PlanChange], goodput: Goodput | None
) -> str:
    """Return the HTML page of one plan: its figures, its timeline, and changes of one field that help."""
    head, *_ = change_lines(changes, found.fits)
    rows = [[str(number), *map(escape, change_cells(one))] for number, one in enumerate(changes, 1)]
    body = table(("", "change", "step", "memory", ""), rows) if rows else ""
    names = {found.plan: "this plan"} | {one.after.plan: str(n) for n, one in enumerate(changes, 1)}
    sections = [
        section("The plan", _plans([[found]]), _bound(found), "plans"),
        section("Changes", body, escape(head)),
        _picture([found, *(one.after for one in changes)], names, "The plan, and its changes by number."),
        *_step(found),
    ]
    return _page(config, found, sections, goodput)


def _page(config: Config, found: Prediction, sections: list[str], goodput: Goodput | None) -> str:
    plan, hardware = found.plan, found.hardware
    about = (
        f"{config.model.name} of {found.model.about()}, a batch of "
        f"{config.train.batch:,} sequences a step in {plan.precision or 'fp32'}, on {plan.world:,} × "
        f"{hardware.name} with {memory_text(hardware.memory)} each, {hardware.devices} a host."
    )
    about = " ".join([about, *found.model.assumptions])
    if lines := goodput_lines(goodput, found):
        sections.append(section("Failures", _list(lines[1:])))
    timeline = simulated_data(replace(found.timeline, tick=found.timeline.tick / 10**6, unit="ms"))
    title = f"{config.model.name} on {plan.world:,} × {hardware.name}"
    return draw_prediction(title, about, _figures(found), sections, timeline)


def _figures(found: Prediction) -> Iterator[Figure]:
    yield Figure("time of a step", seconds_text(found.step_seconds), "predicted")
    yield Figure("tokens/s", f"{found.tokens_per_second:,.0f}", "of all ranks together")
    yield Figure("MFU", f"{found.mfu:.1%}", "model FLOPs utilisation")
    memory = memory_text(found.peak_memory)
    yield Figure("memory", memory if found.fits else f"{memory}: does not fit", "of the rank with most")
    plan = found.plan
    yield Figure("pp × tp × cp × dp", f"{plan.pp} × {plan.tp} × {plan.cp} × {plan.dp}")
    if found.model.experts:
        yield Figure("edp × ep × etp", f"{plan.edp} × {plan.ep} × {plan.etp}")


def _bound(found: Prediction) -> str:
    return escape(f"Bound by {bound_text(found)}.")


def _plans(found: Sequence[Sequence[Prediction]]) -> str:
    columns, *cells = plan_rows(found)
    rows = [[*map(escape, row)] for row in cells]
    return f"<div class=scroll>{table(columns, rows, marked=(0,) if len(rows) > 1 else ())}</div>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _picture(
    found: Sequence[Prediction], labels: dict[Plan, str], about: str, best: Sequence[Prediction] = ()
) -> str:
    """Return the section that draws plans by memory and step time; `best`: those joined by a line."""
    hardware = found[0].hardware
    limit = (hardware.memory - hardware.reserved) / GIB
    picture = ScatterPicture(
        "memory of the rank with most, GiB",
        "time of a step, s",
        [_point(one, labels.get(one.plan, "")) for one in found],
        [(one.peak_memory / GIB, one.step_seconds) for one in best],
        (limit, f"{memory_text(limit * GIB)} of a device for tensors"),
    )
    used = {one.plan.strategy for one in found}
    entries = [(f"strategy {name}", colour) for name, colour in _COLOURS.items() if name in used]
    drawn = f"<div class=scroll>{picture.draw('Plans by memory and time of a step')}</div>"
    return section(
        "Time and memory", legend(entries) + drawn, f"{about} Point at a plan for its axes.", "picture"
    )


def _point(found: Prediction, label: str) -> ScatterPoint:
    title = "\n".join(f"{name}: {cell}" for name, cell in zip(*plan_rows([[found]]), strict=True))
    return ScatterPoint(
        found.peak_memory / GIB, found.step_seconds, _COLOURS[found.plan.strategy], title, label
    )


def _step(found: Prediction) -> Iterator[str]:
    """Yield the breakdown of the step of a plan, and its timeline."""
    whole = found.step_seconds
    rows = [
        [escape(name), bar([(name, seconds, "bar")], whole), seconds_text(seconds), f"{seconds / whole:.1%}"]
        for name, seconds in sorted(found.breakdown.items(), key=lambda one: -one[1])
        if seconds >= 1e-6
    ]
    body = table(("", "", "time", "of the step"), rows, numbers=2)
    yield section("The step by use", body, "Of the rank that ends last.", "breakdown")
    timeline, plan = found.timeline, found.plan
    about = (
        f"The ranks of one pipeline: schedule {escape(plan.schedule)}, "
        f"{microbatches_text(plan.microbatches)}. The last sums of gradients and the optimizer's step "
        "come after it."
    )
    yield section("Timeline", timeline_markup("the step", kinds_of(timeline)), about, "simulated")
