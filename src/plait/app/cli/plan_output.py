"""What `plait plan` prints and writes: tables and notes as text, the same as JSON, and a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from plait.app.cli.arguments import aligned
from plait.app.config.config import Config
from plait.estimate.prediction.prediction import Prediction
from plait.estimate.search.plan_changes import PlanChange
from plait.estimate.search.plan_search import PlanSearchResult
from plait.estimate.time.goodput import PERIODS, Goodput
from plait.estimate.time.hardware import Hardware
from plait.pictures.quantities import memory_text, seconds_text, signed
from plait.plan.plan import Plan

SEARCHED = (
    *("pp", "tp", "cp", "dp", "replicate", "ep", "etp"),
    *("strategy", "reduce", "schedule", "chunks", "recompute", "sequence_parallel"),
)
"""Fields of `parallel` that a search of plans decides, besides `train.microbatches`."""
GIB = 2**30
_DIGITS = 4
"""Of times: plans that agree in them are of the same time."""
PLAN_COLUMNS = (
    *("step", "tokens/s", "MFU", "memory"),
    *("pp", "tp", "cp", "dp", "ep", "etp", "copies", "micro", "options", "bound by", "alike"),
)
_PREDICTED = (
    *("layers_per_stage", "step_seconds", "tokens_per_second", "mfu", "hfu"),
    *("peak_memory", "fits", "bound"),
)


def same_time(one: Prediction, other: Prediction) -> bool:
    """Return whether the printed times of two plans are the same."""
    return seconds_text(one.step_seconds, _DIGITS) == seconds_text(other.step_seconds, _DIGITS)


def groups(found: Sequence[Prediction]) -> list[list[Prediction]]:
    """Return predictions, fastest first, in groups of plans whose printed step time is the same."""
    return [[*alike] for _, alike in groupby(found, lambda one: seconds_text(one.step_seconds, _DIGITS))]


def plan_table(found: Sequence[Sequence[Prediction]]) -> str:
    """Return groups of equally fast plans as a text table: column names, then one line per group."""
    columns, *rows = plan_rows(found)
    return "\n".join(aligned([columns, *rows], left=range(columns.index("options"), len(columns))))


def plan_rows(found: Sequence[Sequence[Prediction]]) -> list[tuple[str, ...]]:
    """Return the names of a table's columns, then the cells of each group of equally fast plans.

    `ep` and `etp` have columns only where the model has experts.
    """
    rows = [PLAN_COLUMNS, *(_plan_cells(*group) for group in found)]
    if found[0][0].model.experts:
        return rows
    dense = [place for place, name in enumerate(PLAN_COLUMNS) if name not in ("ep", "etp")]
    return [tuple(row[place] for place in dense) for row in rows]


def _plan_cells(found: Prediction, *alike: Prediction) -> tuple[str, ...]:
    """Return a plan's cells in the columns `PLAN_COLUMNS`; `alike`: other plans of the same step time."""
    plan = found.plan
    words = [plan.strategy if plan.reduce == "last" else f"{plan.strategy} ({plan.reduce})"]
    if plan.pp > 1:
        words.append(plan.schedule if plan.chunks in (None, 1) else f"{plan.schedule} × {plan.chunks}")
    words += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    words += [f"sequence {plan.sequence_parallel}"] if plan.cuts_sequence else []
    return (
        seconds_text(found.step_seconds, _DIGITS),
        f"{found.tokens_per_second:,.0f}",
        f"{found.mfu:.1%}",
        memory_text(found.peak_memory),
        *(str(degree) for degree in (plan.pp, plan.tp, plan.cp, plan.dp, plan.ep, plan.etp)),
        str(plan.replicate),
        str(plan.microbatches),
        ", ".join(words),
        bound_text(found),
        f"{len(alike)} more of the same time" if alike else "",
    )


def bound_text(found: Prediction) -> str:
    """Return the part of a predicted step that takes longest, as text, with its share of the time."""
    return f"{found.bound}, {found.breakdown[found.bound] / found.step_seconds:.0%} of the step"


def notes(result: PlanSearchResult) -> list[str]:
    """Return lines of text on why other plans were left out, and on how much slower the second plan is."""
    lines = [
        f"Of {result.plans:,} plans {result.predicted:,} fit and were predicted, {result.too_large:,} need "
        f"more memory than a device has, and {result.slower:,} are not faster than those found."
    ]
    for reason, count in result.impossible.items():
        divisions = "1 division of the ranks is" if count == 1 else f"{count:,} divisions of the ranks are"
        lines.append(f"{divisions} impossible: {reason}.")
    found = groups(result.best)
    if len(found[0]) > 1:
        lines.append(f"{len(found[0])} plans are the fastest, of the same time; --json lists each plan.")
    if len(found) > 1:
        lines.append(f"The next time is {behind(result):.2%} longer than the first.")
    return [*lines, *found[0][0].model.assumptions]


def behind(result: PlanSearchResult) -> float:
    """Return by how much the next slower plan is slower than the fastest, as a fraction; 0 without one."""
    first, *others = groups(result.best)
    return others[0][0].step_seconds / first[0].step_seconds - 1 if others else 0.0


def change_lines(changes: Sequence[PlanChange], fits: bool) -> list[str]:
    """Return a heading and a line of text per changed field; `fits`: whether the unchanged plan fits."""
    if not changes:
        return [f"No change of one field makes it {'faster' if fits else 'fit'}."]
    lines = aligned([change_cells(one) for one in changes])
    return ["Changes of one field that help most:", *(f"  {line}" for line in lines)]


def change_cells(one: PlanChange) -> tuple[str, str, str, str]:
    """Return table cells: the changed field, its effect on time and memory, "fits" if only then it fits."""
    return (
        f"{_section(one.field)}.{one.field} = {'none' if one.value is None else one.value}",
        signed(seconds_text(one.seconds)),
        signed(memory_text(one.memory)),
        "" if one.after.fits == one.before.fits else "fits",
    )


def _section(field: str) -> str:
    return "train" if field == "microbatches" else "parallel"


def calibration_text(found: Hardware) -> str:
    """Return the figures of a measured machine, in two lines; it says if links were not measured."""
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in found.peak.items())
    part, link = found.efficiency, found.inside
    links = f"All-reduce: {link.latency * 1e6:.3g} µs a step, {link.bandwidth / 1e9:.3g} GB/s."
    if reason := found.fitted.partition("; links were not measured, ")[2]:
        links = f"Links were not measured, with one rank: {reason}."
    return (
        f"{found.name}, {found.devices} on the host. Matrix products in TFLOP/s: {rates}; memory "
        f"{found.memory_bandwidth / 1e9:.3g} GB/s.\nAn operation takes {part.kernel * 1e6:.3g} µs at least. "
        f"{links}"
    )


def goodput_lines(goodput: Goodput | None, found: Prediction) -> list[str]:
    """Return lines on the best interval between checkpoints and its share of useful time; none for None."""
    if goodput is None:
        return []
    steps = max(1, round(goodput.interval / found.step_seconds))
    return [
        "",
        f"Saved every {seconds_text(goodput.interval, _DIGITS)} ({steps:,} steps), {goodput.expected:.1%} of "
        f"the time is progress, {found.tokens_per_second * goodput.expected:,.0f} tokens/s; in {PERIODS:,} "
        f"simulated intervals {goodput.simulated:.1%} ± {goodput.deviation:.1%} (seed {goodput.seed}).",
    ]


def goodput_json(goodput: Goodput | None) -> dict[str, Any]:
    """Return the best interval between saves and its share of useful time as JSON; empty if not asked for."""
    return {} if goodput is None else {"goodput": asdict(goodput)}


def plan_json(found: Prediction, changes: Sequence[PlanChange]) -> dict[str, Any]:
    """Return a plan's prediction, its time by use, and the changes that help most, as JSON values."""
    best = [
        {
            "field": f"{_section(one.field)}.{one.field}",
            "value": one.value,
            "seconds": one.seconds,
            "memory": one.memory,
            "fits": one.after.fits,
        }
        for one in changes
    ]
    return _as_json(found) | {"breakdown": dict(found.breakdown), "changes": best}


def search_json(result: PlanSearchResult, most: int) -> dict[str, Any]:
    """Return the plans of a search as JSON values, and the number of plans left out for each reason."""
    return {
        "plans": result.plans,
        "predicted": result.predicted,
        "too_large": result.too_large,
        "slower": result.slower,
        "impossible_divisions": dict(result.impossible),
        "second_behind": result.best[1].step_seconds / result.best[0].step_seconds - 1
        if len(result.best) > 1
        else None,
        "best": [_as_json(found) for found in result.best[:most]],
    }


def _as_json(found: Prediction) -> dict[str, Any]:
    plan = {name: getattr(found.plan, name) for name in (*SEARCHED, "microbatches")}
    predicted = {name: getattr(found, name) for name in _PREDICTED}
    return {"plan": plan, **predicted, "assumptions": list(found.model.assumptions)}


def config_text(config: Config, plan: Plan) -> str:
    """Return a TOML file of `config` with the searched fields of `plan`; other defaults are left out."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    parallel = tree.setdefault("parallel", {})
    parallel.pop("layers_per_stage", None)
    parallel.update({name: getattr(plan, name) for name in SEARCHED})
    tree.setdefault("train", {})["microbatches"] = plan.microbatches
    return "\n".join(_lines(tree)).strip() + "\n"


def _value(value: object) -> str:
    """Return a value as TOML, which has texts, numbers, truth values and lists of them like JSON."""
    if isinstance(value, dict):
        pairs = (f"{name} = {_value(one)}" for name, one in value.items() if one is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _lines(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    sections = {name: value for name, value in tree.items() if isinstance(value, dict)}
    for name, value in tree.items():
        if name not in sections and value is not None:
            yield f"{name} = {_value(value)}"
    for name, section in sections.items():
        yield from ("", f"[{prefix}{name}]", *_lines(section, f"{prefix}{name}."))
