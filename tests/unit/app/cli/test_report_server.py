from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from synthetic_runs import write_metrics

from plait.app.cli.report import HOST, ReportServer
from plait.errors import ConfigError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    write_metrics(tmp_path, 3)
    with ReportServer([tmp_path], 0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def answer(server: ReportServer, path: str, host: str = "") -> tuple[int, str, str]:
    connection = HTTPConnection(HOST, server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host or f"{HOST}:{server.server_port}"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, response.getheader("Content-Type", "")


def test_the_report_server_rebuilds_the_page_when_a_file_changes(
    server: ReportServer, tmp_path: Path
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, page, kind = answer(server, "/", f"localhost:{server.server_port}")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert server.address == f"http://127.0.0.1:{server.server_port}/"
    assert "3 steps" in page
    assert "connect-src 'self'" in page
    status, version, kind = answer(server, "/version")
    assert (status, kind) == (200, "text/plain; charset=utf-8")
    assert answer(server, "/version")[1] == version
    write_metrics(tmp_path, 4)
    assert answer(server, "/version")[1] != version
    assert "4 steps" in answer(server, "/")[1]
    (tmp_path / "metrics.jsonl").write_text("")
    assert "has no metrics (it is empty)" in answer(server, "/")[1]


def test_the_report_server_refuses_other_paths_and_host_names(server: ReportServer) -> None:
    assert answer(server, "/metrics.jsonl")[0] == 404
    assert answer(server, "/", "evil.example:80")[0] == 404


def test_a_report_server_on_a_used_port_is_refused(server: ReportServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give another one by --port"):
        ReportServer([tmp_path], server.server_port)
