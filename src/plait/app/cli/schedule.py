"""`plait schedule`: make or read a schedule, simulate it, print it and write its pictures."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from plait.app.cli.arguments import CommandParser, aligned, count, number, number_or_inf
from plait.errors import ConfigError, ScheduleError, terminal_text
from plait.files import read_text
from plait.pictures.timelines.text import draw_text, title
from plait.pictures.timelines.timeline import Timeline, simulate
from plait.pictures.timelines.timeline_files import FORMATS, write_pictures
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.schedule import Schedule
from plait.schedules.search.auto_search import Measure
from plait.schedules.search.schedule_by_policy import POLICY_NAMES, require_policy, schedule
from plait.schedules.torch_csv import from_csv

_MOST_ACTIONS = 2**18
"""Most actions of one kind: more would take minutes."""
_HEAD = ("policy", "chunks", "makespan", "span", "bubble", "of span", "peak", "× best")

_ABOUT = """\
Shows the actions of each rank in one training step, the idle part of the time
(bubble), and how many activations each rank holds. Needs no model and no torch."""
_USAGE = "plait schedule (POLICY | FILE.csv | --compare P1,P2,…) [options]"
_EXAMPLES = (
    ("plait schedule 1f1b --ranks 4 --microbatches 8", ""),
    ("plait schedule auto --ranks 4 --microbatches 8 --limit 3", "best in memory"),
    ("plait schedule --compare 1f1b,zb-h1 --ranks 4 --microbatches 8", ""),
)
_PER_RANK = "per rank and micro-batch (default: 1), or one value per stage: 1,1,1,2"
_COSTS = (
    ("F", "TIME", "a forward"),
    ("I", "TIME", "an input gradient"),
    ("W", "TIME", "a weight gradient"),
    ("until_I", "UNITS", "memory from F to I"),
    ("until_W", "UNITS", "memory from I to W"),
)
"""Fields of `Costs` as options: name, unit, description."""


def parser() -> CommandParser:
    """Return the parser of the options of `plait schedule`."""
    made = CommandParser("plait schedule", usage=_USAGE, description=_ABOUT, examples=_EXAMPLES)
    add = made.add_argument
    add("policy", metavar="POLICY", nargs="?", help=f"{', '.join(POLICY_NAMES)}, or a CSV file with an order")
    add("--ranks", metavar="P", type=count, help="ranks of the pipeline")
    add("--microbatches", metavar="M", type=count, help="micro-batches of one step")
    add("--chunks", metavar="V", type=count, help="stages on each rank (default: the policy's own)")
    about = "most that a rank may hold, in micro-batches, or inf"
    add("--limit", metavar="UNITS", type=number_or_inf, help=about)
    add("--measure", choices=get_args(Measure), default="makespan", help="what auto minimises")
    add("--compare", metavar="P1,P2,…", type=_names, default=(), help="policies or files, as a table")
    add = made.add_argument_group("costs", _PER_RANK).add_argument
    for name, unit, about in _COSTS:
        add(f"--cost.{name}", dest=name, metavar=unit, type=_cost, default=1, help=about)
    about = "a message between two ranks, one value (default: 0)"
    add("--cost.comm", dest="comm", metavar="TIME", type=number, default=0, help=about)
    add = made.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print the figures and the order as JSON")
    add("--svg", metavar="FILE", type=Path, help="write the picture")
    add("--html", metavar="FILE", type=Path, help="write an interactive page, with memory over time")
    add("--trace", metavar="FILE", type=Path, help="write a trace for Perfetto or chrome://tracing")
    add("--csv", metavar="FILE", type=Path, help="write the order: a line per rank, as PyTorch reads it")
    return made


def _cost(text: str) -> float | tuple[float, ...]:
    values = tuple(number(part) for part in text.split(","))
    return values if len(values) > 1 else values[0]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(argv: Sequence[str]) -> int:
    """Make or read schedules, print and draw them as `argv` says, and return 0. Raises PlaitError."""
    options = parser().parse_args(argv)
    costs = Costs(**{name: getattr(options, name) for name in ("F", "I", "W", "comm", "until_I", "until_W")})
    if options.compare:
        _compare(options, costs)
        return 0
    if options.policy is None:
        raise ConfigError("plait schedule needs a POLICY or a CSV file; see `plait schedule --help`.")
    timeline = simulate(_schedule_of(options.policy, options, costs), costs)
    paths = {kind: getattr(options, kind) for kind in FORMATS if getattr(options, kind) is not None}
    written = list(write_pictures(timeline, paths))
    if options.json:
        print(json.dumps(timeline.as_json()))
    else:
        _show(timeline, options.measure, written)
    return 0


def _schedule_of(policy: str, options: Namespace, costs: Costs) -> Schedule:
    """Return the schedule that the policy named `policy` makes, or that the CSV file of this name holds."""
    if _is_file(policy):
        return _read(Path(policy), options, costs)
    require_policy(policy)
    missing = [f"--{name}" for name in ("ranks", "microbatches") if getattr(options, name) is None]
    if missing:
        raise ConfigError(
            f"the following arguments are required: {', '.join(missing)}; see `plait schedule --help`."
        )
    cells = options.ranks * options.microbatches * (options.chunks or 1)
    if cells > _MOST_ACTIONS:
        raise ConfigError(
            f"--ranks, --microbatches and --chunks make {cells:,} forwards, and plait schedule takes "
            f"{_MOST_ACTIONS:,} at most: give fewer micro-batches, whose pattern repeats."
        )
    return schedule(
        policy,
        ranks=options.ranks,
        microbatches=options.microbatches,
        chunks=options.chunks,
        costs=costs,
        limit=options.limit,
        measure=options.measure,
    )


def _is_file(policy: str) -> bool:
    """Return whether the argument POLICY names a file, not a policy."""
    return policy not in POLICY_NAMES and (
        policy.endswith(".csv") or os.sep in policy or Path(policy).is_file()
    )


def _read(path: Path, options: Namespace, costs: Costs) -> Schedule:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file: give a CSV file, or a policy.")
    try:
        text = read_text(path).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read ({why}): give a CSV file, or a policy.") from None
    try:
        made = from_csv(text, str(path))
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    counts = {"ranks": made.ranks, "microbatches": made.microbatches, "chunks": made.stages // made.ranks}
    for name, value in counts.items():
        if getattr(options, name) not in (None, value):
            raise ScheduleError(
                f"{path} has {name} = {value}, but --{name} is {getattr(options, name)}: leave it out."
            )
    check(made, options.limit, costs.memory(made.ranks, made.stages))
    return made


def _show(timeline: Timeline, measure: str, written: Sequence[Path]) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    peaks = " ".join(f"{units:g}" for units in timeline.peak)
    print(f"{terminal_text(title(timeline.schedule))}\n\n{draw_text(timeline, width=width, colour=colour)}\n")
    print(f"makespan  {timeline.makespan:g} (span of the longest rank: {timeline.span:g})")
    if timeline.schedule.bound is not None:
        print(f"bound     {_bound_text(timeline.schedule.bound, getattr(timeline, measure), measure)}")
    print(f"bubble    {timeline.bubble:.1%} ({timeline.bubble_span:.1%} of the span)")
    print(f"peak      {peaks} activations per rank, in micro-batches")
    for path in written:
        print(f"wrote     {path}")


def _bound_text(bound: float, reached: float, measure: str) -> str:
    if reached <= bound * (1 + 1e-9):
        return f"{bound:g}: no {measure} within the limit is shorter"
    above = reached / bound - 1 if bound else 0.0
    return f"{bound:g}: no {measure} within the limit is below it; this one is {above:.2%} above"


def _compare(options: Namespace, costs: Costs) -> None:
    """Print several schedules as a table or as JSON; one that cannot be made is listed with its error."""
    if any(getattr(options, kind) for kind in FORMATS):
        raise ConfigError("--compare writes no files: name one policy, and leave --compare out.")
    names = ([] if options.policy is None else [options.policy]) + list(options.compare)
    results: dict[str, Timeline | ScheduleError] = {}
    for name in names:
        if not _is_file(name):
            require_policy(name)  # a misspelt name is an error of the command, not a row
        try:
            results[name] = simulate(_schedule_of(name, options, costs), costs)
        except ScheduleError as error:
            results[name] = error
    failures = [result for result in results.values() if isinstance(result, ScheduleError)]
    if len(failures) == len(results):
        raise failures[0]
    if options.json:
        entries = [
            {"policy": name, "error": str(result)} if isinstance(result, ScheduleError) else result.as_json()
            for name, result in results.items()
        ]
        print(json.dumps(entries))
    else:
        print(_comparison(results, options.measure))


def _comparison(results: Mapping[str, Timeline | ScheduleError], measure: str) -> str:
    """Return the table of `--compare`, a row per schedule, then notes on lower bounds and failed schedules.

    policy              chunks  makespan  span  bubble  of span  peak  × best
    1f1b                     1        33    33   27.3%    27.3%     4    1.29
    auto (v, 2 chunks)       2      25.5  25.5    5.9%     5.9%     4    1.00
    """
    made = {name: result for name, result in results.items() if isinstance(result, Timeline)}
    best = min(getattr(timeline, measure) for timeline in made.values())
    lines = aligned([_HEAD, *(_table_row(timeline, measure, best) for timeline in made.values())])
    notes = []
    for name, result in results.items():
        if isinstance(result, ScheduleError):
            notes.append(f"{name}: {str(result).splitlines()[0]}")
        elif result.schedule.bound is not None:
            notes.append(f"{name}: no {measure} within its limit is below {result.schedule.bound:g}.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _table_row(timeline: Timeline, measure: str, best: float) -> tuple[str, ...]:
    made = timeline.schedule
    return (
        made.policy,
        f"{made.stages // made.ranks}",
        f"{timeline.makespan:g}",
        f"{timeline.span:g}",
        f"{timeline.bubble:.1%}",
        f"{timeline.bubble_span:.1%}",
        f"{max(timeline.peak):g}",
        f"{getattr(timeline, measure) / best:.2f}" if best else "1.00",
    )
