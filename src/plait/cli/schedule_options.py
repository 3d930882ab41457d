"""The options of `plait schedule`."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import get_args

from plait.cli.arguments import CommandParser, count, number, number_or_inf
from plait.schedules.search.api import POLICY_NAMES
from plait.schedules.search.auto import Measure

_ABOUT = """\
Shows the actions of each rank in one training step, the idle part of the time
(bubble), and how many activations each rank holds. Needs no model and no torch."""
_PER_RANK = "per rank and micro-batch, or one value per stage: 1,1,1,2"


def parser() -> ArgumentParser:
    """Return the parser of the options of `plait schedule`."""
    made = CommandParser("schedule", _ABOUT)
    add = made.add_argument
    add("policy", metavar="POLICY", nargs="?", help=f"{', '.join(POLICY_NAMES)}, or a CSV file with an order")
    add("--ranks", metavar="P", type=count, help="ranks of the pipeline")
    add("--microbatches", metavar="M", type=count, help="micro-batches of one step")
    add("--chunks", metavar="V", type=count, help="stages on each rank (default: the policy's own)")
    add(
        "--limit",
        metavar="UNITS",
        type=number_or_inf,
        help="most that a rank may hold, in micro-batches, or inf",
    )
    add("--measure", choices=get_args(Measure), default="makespan", help="what auto minimises")
    add("--compare", metavar="P1,P2,…", type=_names, default=(), help="policies or files, as a table")
    add("--cost.F", dest="F", metavar="TIME", type=_cost, default=1, help=f"a forward, {_PER_RANK}")
    add("--cost.I", dest="I", metavar="TIME", type=_cost, default=1, help=f"an input gradient, {_PER_RANK}")
    add("--cost.W", dest="W", metavar="TIME", type=_cost, default=1, help=f"a weight gradient, {_PER_RANK}")
    add(
        "--cost.comm", dest="comm", metavar="TIME", type=number, default=0, help="a message between two ranks"
    )
    about = f"memory from F to I, {_PER_RANK}"
    add("--cost.until_I", dest="until_I", metavar="UNITS", type=_cost, default=1, help=about)
    add(
        "--cost.until_W",
        dest="until_W",
        metavar="UNITS",
        type=_cost,
        default=1,
        help=f"memory from I to W, {_PER_RANK}",
    )
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
