"""`plait report`: write the page of a run, or of several side by side; or serve it while a run goes on."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from plait.app.cli.arguments import CommandParser, count
from plait.errors import ConfigError, PlaitError
from plait.pictures.html_elements import POLICY, page_file
from plait.pictures.report.page import draw_report, read_runs, write_report

_ABOUT = """\
Writes report.html: loss, rate, throughput and memory over the steps, a step's
timeline, what each rank holds, traffic, warnings, configuration, environment.
RUN is the folder of a run (run.dir), or its metrics.jsonl. Needs no torch."""
_EXAMPLES = (
    ("plait report runs/demo", "write runs/demo/report.html"),
    ("plait report runs/a runs/b --out both.html", "two runs side by side"),
    ("plait report runs/demo --watch", "serve it while the run goes on"),
)
HOST = "127.0.0.1"
_POLICY = f"{POLICY}; connect-src 'self'"


def parser() -> CommandParser:
    """Return the parser of the options of `plait report`."""
    made = CommandParser("plait report", description=_ABOUT, examples=_EXAMPLES)
    add = made.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or its metrics.jsonl")
    about = "file of the page (default: report.html in the folder of RUN)"
    add("--out", metavar="FILE", type=Path, help=about)
    add("--watch", action="store_true", help="serve the page on 127.0.0.1, anew when a file has changed")
    add("--port", metavar="N", type=_port, default=0, help="port of --watch (default: any free one)")
    return made


def _port(text: str) -> int:
    port = count(text)
    if port >= 2**16:
        raise ArgumentTypeError(f"{text} is not a port: give one below {2**16}")
    return port


def run(argv: Sequence[str]) -> int:
    """Write or serve the report, and return 0. Raises `PlaitError` for errors that the user can correct."""
    made = parser()
    options = made.parse_args(argv)
    made.require_together(options, {"port": "watch"})
    if options.watch and options.out is not None:
        raise ConfigError("--out does not go with --watch, which serves the page: leave one of them out.")
    if options.watch:
        read_runs(options.runs)  # raises for paths that are no runs
        with ReportServer(options.runs, options.port) as server, suppress(KeyboardInterrupt):
            print(f"{server.address} shows the report, until Ctrl-C.", flush=True)
            server.serve_forever()
        return 0
    print(f"wrote {write_report(options.runs, options.out)}")
    return 0


class ReportServer(ThreadingHTTPServer):
    """An HTTP server of one page: `/` is the report, `/version` a text that changes with its files."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        """Listen on `port` of 127.0.0.1; 0: any free one. Raises `ConfigError` where that is impossible."""
        self.paths = tuple(paths)
        self._drawn = ("", "")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be opened ({error.strerror}): give another one by --port."
            ) from None

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def version(self) -> str:
        """Return a text that changes whenever a file of the runs changes."""
        folders = {path if path.is_dir() else path.parent for path in self.paths}
        files = sorted(file for folder in folders for file in folder.glob("*.json*"))
        return " ".join(f"{stat.st_mtime_ns}.{stat.st_size}" for stat in map(Path.stat, files))

    def page(self) -> str:
        """Return the report page as HTML that reloads itself, or a page that says why there is none."""
        version = self.version()
        if version != self._drawn[0]:
            try:
                page = draw_report(read_runs(self.paths), policy=_POLICY)
            except (PlaitError, OSError) as error:
                page = f"<!doctype html><title>plait report</title><body><p>{escape(str(error))}</p></body>"
            script = page_file("report/page/watch.js")
            self._drawn = version, page.replace("</body>", f"<script>{script}</script></body>")
        return self._drawn[1]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer a GET request: `/` by the report page, `/version` by a text that changes with it."""
        answers: dict[str, Callable[[], str]] = {"/": self.server.page, "/version": self.server.version}
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost") or self.path not in answers:
            self.send_error(404)
            return
        body = answers[self.path]().encode(errors="backslashreplace")
        self.send_response(200)
        kind = "text/html" if self.path == "/" else "text/plain"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for each request."""
