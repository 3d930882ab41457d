"""`watch`: serves the report of runs on this machine only, made anew when their files have changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

from plait.errors import ConfigError, PlaitError
from plait.pictures.report.page import draw_report
from plait.pictures.report.writing import read_runs

HOST = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


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
        """Return a text that is another one after a file of the runs has changed."""
        folders = {path if path.is_dir() else path.parent for path in self.paths}
        files = sorted(file for folder in folders for file in folder.glob("*.json*"))
        return " ".join(f"{stat.st_mtime_ns}.{stat.st_size}" for stat in map(Path.stat, files))

    def page(self) -> str:
        """Return the report, or why there is none at present, with the script that loads it again."""
        version = self.version()
        if version != self._drawn[0]:
            try:
                page = draw_report(read_runs(self.paths), policy=_POLICY)
            except (PlaitError, OSError) as error:
                page = f"<!doctype html><title>plait report</title><body><p>{escape(str(error))}</p></body>"
            script = (resources.files("plait.pictures.report") / "page" / "watch.js").read_text(
                encoding="utf-8"
            )
            self._drawn = version, page.replace("</body>", f"<script>{script}</script></body>")
        return self._drawn[1]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer a request."""
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
