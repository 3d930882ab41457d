"""The options of `plait schedule`."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from math import isfinite, isnan, nan
from pathlib import Path
from typing import NoReturn, get_args

from plait.errors import ConfigError
from plait.schedules.search.api import POLICY_NAMES
from plait.schedules.search.auto import Measure

_ABOUT = """\
Shows who does what and when in one training step, how much of the time is
bubble, and how many activations each rank holds. Needs no model and no torch."""
_PER_RANK = "per rank and micro-batch, or one value per stage: 1,1,1,2"


def parser() -> ArgumentParser:
    """What `plait schedule` takes. A ConfigError says what it does not."""
    made = _Parser(
        "plait schedule",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = made.add_argument
    add("policy", metavar="POLICY", nargs="?", help=f"{', '.join(POLICY_NAMES)}, or a CSV file with an order")
    add("--ranks", metavar="P", type=_count, help="ranks of the pipeline")
    add("--microbatches", metavar="M", type=_count, help="micro-batches of one step")
    add("--chunks", metavar="V", type=_count, help="stages on each rank (default: the policy's own)")
    add("--limit", metavar="UNITS", type=_limit, help="most that a rank may hold, in micro-batches, or inf")
    add("--measure", choices=get_args(Measure), default="makespan", help="what auto makes short")
    add("--compare", metavar="P1,P2,…", type=_names, default=(), help="policies or files, as a table")
    add("--cost.F", dest="F", metavar="TIME", type=_cost, default=1, help=f"a forward, {_PER_RANK}")
    add("--cost.I", dest="I", metavar="TIME", type=_cost, default=1, help="an input gradient, likewise")
    add("--cost.W", dest="W", metavar="TIME", type=_cost, default=1, help="a weight gradient, likewise")
    add("--cost.comm", dest="comm", metavar="TIME", type=_number, default=0, help="a hop between two ranks")
    about = "what a micro-batch holds from F to I, likewise"
    add("--cost.until_I", dest="until_I", metavar="UNITS", type=_cost, default=1, help=about)
    add("--cost.until_W", dest="until_W", metavar="UNITS", type=_cost, default=1, help="from I to W")
    add("--json", action="store_true", help="print the figures and the order as JSON")
    add("--svg", metavar="FILE", type=Path, help="write the picture")
    add("--html", metavar="FILE", type=Path, help="write a page to look around in, with the memory over time")
    add("--trace", metavar="FILE", type=Path, help="write a trace for Perfetto or chrome://tracing")
    add("--csv", metavar="FILE", type=Path, help="write the order: a line per rank, as PyTorch reads it")
    return made


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `plait schedule --help`.")


def _number(text: str) -> float:
    value = _read(text)
    if not isfinite(value):
        raise ArgumentTypeError(f"{text!r} is no number")
    return value


def _limit(text: str) -> float:
    value = _read(text)
    if isnan(value):
        raise ArgumentTypeError(f"{text!r} is no number")
    return value


def _read(text: str) -> float:
    try:
        value = float(text)
        return int(text) if text.lstrip("+-").isdecimal() and isfinite(value) else value
    except (ValueError, OverflowError):
        return nan


def _cost(text: str) -> float | tuple[float, ...]:
    values = tuple(_number(part) for part in text.split(","))
    return values if len(values) > 1 else values[0]


def _count(text: str) -> int:
    value = _number(text)
    if not isinstance(value, int) or value < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
