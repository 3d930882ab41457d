from __future__ import annotations

import resource
import shutil
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from plait.comm import host_check
from plait.comm.host_check import check_host


def remedies() -> dict[str, str]:
    return {finding.about: finding.remedy for finding in check_host() if finding.remedy}


@pytest.fixture
def good_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which nothing has to be changed."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (65536, resource.RLIM_INFINITY))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=8e9, free=7e9))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
    monkeypatch.setattr(host_check, "_SLOW_CLOCK", 1e9)


@pytest.mark.usefixtures("good_host")
def test_a_good_host_needs_no_change() -> None:
    found = {finding.about: finding.found for finding in check_host()}
    assert remedies() == {}
    assert found["versions"].startswith("plait ")
    assert "gloo" in found["backends"]
    assert found["open files"] == "65,536 of at most unlimited"
    assert found["shared memory"].startswith("7 of 8 GB free in ")
    assert "lo" in found["interfaces"]


def _no_address(name: str) -> str:
    raise OSError("no address")


@pytest.mark.usefixtures("good_host")
@pytest.mark.parametrize(
    ("about", "changed", "remedy"),
    [
        ("open files", (resource, "getrlimit", lambda limit: (1024, 4096)), "ulimit -n 16384"),
        (
            "shared memory",
            (shutil, "disk_usage", lambda path: SimpleNamespace(total=64e6, free=64e6)),
            "--shm-size",
        ),
        (
            "shared memory",
            (shutil, "disk_usage", lambda path: SimpleNamespace(total=8e9, free=1e8)),
            "remove what",
        ),
        ("host name", (socket, "gethostbyname", _no_address), "add it to the hosts file"),
        ("clock", (host_check, "_SLOW_CLOCK", 0.0), "faster clock source"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_to_change_is_said(
    about: str, changed: tuple[Any, str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*changed)
    assert remedy in remedies()[about]


@pytest.mark.usefixtures("good_host")
def test_variables_that_fit_not_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    found = remedies()
    assert set(found) == {"cores", "interfaces"}
    assert found["interfaces"].startswith("set GLOO_SOCKET_IFNAME to one of lo")
