"""`plait report`: write the page of a run, or of several side by side; or serve it while a run goes on."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plait.cli.arguments import CommandParser, count
from plait.cli.report_server import ReportServer
from plait.errors import ConfigError
from plait.pictures.report.writing import read_runs, write_report

_ABOUT = """\
Writes report.html: loss, rate, throughput and memory over the steps, a step's
timeline, what each rank holds, traffic, warnings, configuration, environment.
RUN is the folder of a run (run.dir), or its metrics.jsonl. Needs no torch."""
_EXAMPLES = (
    ("plait report runs/demo", "write runs/demo/report.html"),
    ("plait report runs/a runs/b --out both.html", "two runs side by side"),
    ("plait report runs/demo --watch", "serve it while the run goes on"),
)


def parser() -> CommandParser:
    """Return the parser of the options of `plait report`."""
    made = CommandParser("plait report", description=_ABOUT, examples=_EXAMPLES)
    add = made.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or its metrics.jsonl")
    add(
        "--out",
        metavar="FILE",
        type=Path,
        help="file of the page (default: report.html in the folder of RUN)",
    )
    add("--watch", action="store_true", help="serve the page on 127.0.0.1, anew when a file has changed")
    add("--port", metavar="N", type=_port, default=0, help="port of --watch (default: any free one)")
    return made


def _port(text: str) -> int:
    port = count(text)
    if port >= 2**16:
        raise ArgumentTypeError(f"{text} is not a port: give one below {2**16}")
    return port


def _watch(paths: Sequence[Path], port: int) -> None:
    """Serve the report until it is interrupted."""
    read_runs(paths)  # raises for paths that are no runs
    with ReportServer(paths, port) as server:
        print(f"{server.address} shows the report, until Ctrl-C.", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def run(argv: Sequence[str]) -> int:
    """Write or serve the report, and return 0. Raises `PlaitError` for errors that the user can correct."""
    made = parser()
    options = made.parse_args(argv)
    made.require_together(options, {"port": "watch"})
    if options.watch and options.out is not None:
        raise ConfigError("--out does not go with --watch, which serves the page: leave one of them out.")
    if options.watch:
        _watch(options.runs, options.port)
        return 0
    print(f"wrote {write_report(options.runs, options.out)}")
    return 0
