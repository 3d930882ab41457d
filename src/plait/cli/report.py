"""`plait report`: write the page of a run, or of several side by side; or serve it while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.cli.arguments import CommandParser
from plait.errors import ConfigError
from plait.report.page import draw_report
from plait.report.record import read_run

_ABOUT = """\
Writes report.html: loss, rate, throughput and memory over the steps, a step's
timeline, what each rank holds, traffic, warnings, configuration, environment.
RUN is the folder of a run (run.dir), or its metrics.jsonl. Needs no torch.

examples:
  plait report runs/demo                      write runs/demo/report.html
  plait report runs/a runs/b --out both.html  two runs side by side
  plait report runs/demo --watch              serve it while the run goes on"""
REPORT_FILE = "report.html"


def parser() -> CommandParser:
    """Return the parser of the options of `plait report`."""
    made = CommandParser("report", _ABOUT)
    add = made.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or its metrics.jsonl")
    add("--out", metavar="FILE", type=Path, help="file of the page (default: report.html in the folder of RUN)")
    return made


def run(argv: Sequence[str]) -> int:
    """Write or serve the report, and return 0. Raises `PlaitError` for errors that the user can correct."""
    if "--help" in argv or "-h" in argv:
        print(parser().format_help(), end="")
        return 0
    options = parser().parse_args(argv)
    paths: list[Path] = options.runs
    out = options.out
    if out is None:
        if len(paths) > 1:
            raise ConfigError(f"{len(paths)} runs are given: name the page's file by --out FILE.")
        out = (paths[0] if paths[0].is_dir() else paths[0].parent) / REPORT_FILE
    page = draw_report([read_run(path) for path in paths])
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): give another file by --out.") from None
    print(f"wrote {out}")
    return 0
