"""`plait report`: write the page of a run, or of several side by side; or serve it while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.arguments import CommandParser
from plait.report.writing import write_report

_ABOUT = """\
Writes report.html: loss, rate, throughput and memory over the steps, a step's
timeline, what each rank holds, traffic, warnings, configuration, environment.
RUN is the folder of a run (run.dir), or its metrics.jsonl. Needs no torch.

examples:
  plait report runs/demo                      write runs/demo/report.html
  plait report runs/a runs/b --out both.html  two runs side by side
  plait report runs/demo --watch              serve it while the run goes on"""


def parser() -> CommandParser:
    """Return the parser of the options of `plait report`."""
    made = CommandParser("report", _ABOUT)
    add = made.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or its metrics.jsonl")
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="file of the page (default: report.html in the folder of RUN)",
    )
    return made


def run(argv: Sequence[str]) -> int:
    """Write or serve the report, and return 0. Raises `PlaitError` for errors that the user can correct."""
    if "--help" in argv or "-h" in argv:
        print(parser().format_help(), end="")
        return 0
    options = parser().parse_args(argv)
    print(f"wrote {write_report(options.runs, options.out)}")
    return 0
