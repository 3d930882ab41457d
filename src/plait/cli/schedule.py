"""`plait schedule`: make a schedule, simulate it, print it and write its pictures."""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from typing import NoReturn

from plait.errors import ConfigError, ScheduleError
from plait.schedules.policies import POLICIES
from plait.search.schedule import schedule
from plait.simulation.costs import Costs
from plait.simulation.svg import draw_svg
from plait.simulation.text import draw_text, title
from plait.simulation.timeline import Timeline, simulate

_ABOUT = """\
Shows who does what and when in one training step, how much of the time is
bubble, and how many activations each rank holds. Needs no model and no torch."""

_LATER = ("interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "auto")


def run(argv: Sequence[str]) -> int:
    """Do what `argv` asks and return 0. Raises `PlaitError` where the user has something to mend."""
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        print(parser.format_help(), end="")
        return 0
    options = parser.parse_args(argv)
    _refuse_what_comes_later(options)
    made = schedule(options.policy, ranks=options.ranks, microbatches=options.microbatches)
    costs = Costs(options.forward, options.input, options.weight, options.comm)
    timeline = simulate(made, costs)
    _require_limit(timeline, options.limit)
    if options.svg:
        _write(options.svg, draw_svg(timeline))
    if options.csv:
        _write(options.csv, "".join(f"{','.join(rank)}\n" for rank in made.order))
    if options.json:
        print(json.dumps(figures(timeline)))
    else:
        _show(timeline, [path for path in (options.svg, options.csv) if path])
    return 0


def figures(timeline: Timeline) -> dict[str, object]:
    """The object that `--json` prints."""
    made = timeline.schedule
    return {
        "policy": made.policy,
        "ranks": made.ranks,
        "chunks": made.stages // made.ranks,
        "microbatches": made.microbatches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_span": timeline.bubble_span,
        "peak": timeline.peak,
        "order": made.order,
        "rank_of": made.rank_of,
    }


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `plait schedule --help`.")


def _parser() -> _Parser:
    parser = _Parser(
        "plait schedule",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("policy", metavar="POLICY", help=", ".join(POLICIES))
    add("--ranks", metavar="P", type=_count, required=True, help="ranks of the pipeline")
    add("--microbatches", metavar="M", type=_count, required=True, help="micro-batches of one step")
    add("--chunks", metavar="V", type=_count, default=1, help="stages on each rank (only 1 yet)")
    about = "per rank and micro-batch, or one value per stage: 1,1,1,2"
    add("--cost.F", dest="forward", metavar="TIME", type=_cost, default=1, help=f"a forward, {about}")
    add("--cost.I", dest="input", metavar="TIME", type=_cost, default=1, help="an input gradient, likewise")
    add("--cost.W", dest="weight", metavar="TIME", type=_cost, default=1, help="a weight gradient, likewise")
    add("--cost.comm", dest="comm", metavar="TIME", type=_number, default=0, help="a hop between two ranks")
    add(
        "--limit",
        metavar="UNITS",
        type=_number,
        help="most activations that a rank may hold, in micro-batches",
    )
    add("--json", action="store_true", help="print the figures and the order as JSON")
    add("--svg", metavar="FILE", type=Path, help="write the picture")
    add("--csv", metavar="FILE", type=Path, help="write the order: a line per rank, as PyTorch reads it")
    add("--html", metavar="FILE", help="not available yet")
    add("--trace", metavar="FILE", help="not available yet")
    return parser


def _number(text: str) -> float:
    try:
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise ArgumentTypeError(f"{text!r} is no number")
    return value


def _cost(text: str) -> float | tuple[float, ...]:
    values = tuple(_number(part) for part in text.split(","))
    return values if len(values) > 1 else values[0]


def _count(text: str) -> int:
    value = _number(text)
    if not isinstance(value, int) or value < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def _refuse_what_comes_later(options: Namespace) -> None:
    available = f"choose {' or '.join(POLICIES)}"
    if options.policy in _LATER and options.policy not in POLICIES:
        raise ScheduleError(f"the policy {options.policy} is not available yet: {available}.")
    if options.chunks > 1:
        raise ScheduleError(f"--chunks {options.chunks} is not available yet: set it to 1.")
    for name in ("html", "trace"):
        if getattr(options, name) is not None:
            raise ScheduleError(f"--{name} is not available yet: write an SVG with --svg FILE.")


def _require_limit(timeline: Timeline, limit: float | None) -> None:
    highest = max(timeline.peak)
    if limit is not None and highest > limit:
        raise ScheduleError(
            f"rank {timeline.peak.index(highest)} holds up to {highest:g} activations, above the limit of "
            f"{limit:g}: raise --limit, or choose another policy than {timeline.schedule.policy}."
        )


def _show(timeline: Timeline, written: Sequence[Path]) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    peaks = " ".join(f"{units:g}" for units in timeline.peak)
    print(f"{title(timeline.schedule)}\n\n{draw_text(timeline, width=width, colour=colour)}\n")
    print(f"makespan  {timeline.makespan:g} (span of the longest rank: {timeline.span:g})")
    print(f"bubble    {timeline.bubble:.1%} ({timeline.bubble_span:.1%} of the span)")
    print(f"peak      {peaks} activations per rank, in micro-batches")
    for path in written:
        print(f"wrote     {path}")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another file.") from None
