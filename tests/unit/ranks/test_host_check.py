from __future__ import annotations

import resource
import shutil
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from plait.package import version_of
from plait.ranks import host_diagnostics
from plait.ranks.host_diagnostics import check_host


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
    monkeypatch.setattr(host_diagnostics, "_SLOW_CLOCK", 1e9)


@pytest.mark.usefixtures("good_host")
def test_check_host_suggests_nothing_on_a_good_host() -> None:
    found = {finding.about: finding.found for finding in check_host()}
    assert remedies() == {}
    assert found["versions"].startswith(f"plait {version_of('plait')}, torch {version_of('torch')}, numpy ")
    extras = {one.partition(" ")[0]: one for one in found["extras"].split(", ")}
    assert extras.get("transformers", "transformers None") == f"transformers {version_of('transformers')}"
    assert "gloo" in found["backends"]
    assert found["devices"] == "no GPU that torch sees: ranks run on the CPU"
    assert found["open files"] == "65,536 of at most unlimited"
    assert found["shared memory"].startswith("7 of 8 GB free in ")
    assert "lo" in found["interfaces"]
    assert found["host name"] == f"{socket.gethostname()} is 10.0.0.1"


@pytest.mark.usefixtures("good_host")
def test_gpus_are_counted_by_kind_and_extras_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H100", "A100", "H100"]
    monkeypatch.setattr(host_diagnostics, "version_of", lambda name: "")
    monkeypatch.setattr(host_diagnostics, "name_of", lambda device: names[device.index])
    monkeypatch.setattr(host_diagnostics, "total_memory", lambda device: 79.6e9)
    monkeypatch.setattr(host_diagnostics, "accelerator_versions", lambda: {"driver": "550", "CUDA": "12.6"})
    for count, kinds, remedy in (
        (3, "2 × H100 (80 GB), 1 × A100 (80 GB)", "take GPUs of one kind by CUDA_VISIBLE_DEVICES"),
        (1, "1 × H100 (80 GB)", ""),
    ):
        monkeypatch.setattr(host_diagnostics, "visible_accelerators", lambda count=count: count)
        found = {finding.about: finding for finding in check_host()}
        assert found["devices"].found == kinds
        assert found["devices"].remedy.partition(":")[0] == remedy
        assert found["device software"].found == "driver 550, CUDA 12.6"
        assert found["extras"].found == "none"


@pytest.mark.usefixtures("good_host")
def test_a_host_with_the_least_resources_needs_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(host_diagnostics.os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    least = {resource.RLIMIT_NOFILE: 4096, resource.RLIMIT_NPROC: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (least[limit], 4096))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1e9, free=1e8))
    assert remedies() == {}
    found = {finding.about: finding.found for finding in check_host()}
    assert found["cores"].endswith(f"threads of torch, OMP_NUM_THREADS={cores}")
    assert found["interfaces"].endswith("; GLOO_SOCKET_IFNAME=lo")
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (least[limit] - 1, 4096))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1e9 - 1, free=1e8))
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 1))
    assert set(remedies()) == {"cores", "open files", "processes", "shared memory"}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
    assert {finding.found for finding in check_host() if finding.about == "processes"} == {
        "unlimited of at most unlimited"
    }


def _no_address(name: str) -> str:
    raise OSError("no address")


CHANGED: list[tuple[str, tuple[Any, str, Any], str]] = [
    ("open files", (resource, "getrlimit", lambda limit: (1024, 4096)), "ulimit -n 16384"),
    ("processes", (resource, "getrlimit", lambda limit: (1000, 4096)), "ulimit -u 4096"),
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
    ("clock", (host_diagnostics, "_SLOW_CLOCK", 0.0), "faster clock source"),
    ("backends", (host_diagnostics.dist, "is_gloo_available", lambda: False), "install a torch with Gloo"),
    ("backends", (host_diagnostics.dist, "is_available", lambda: False), "built with torch.distributed"),
]


@pytest.mark.usefixtures("good_host")
def test_each_lacking_resource_of_a_host_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for about, changed, remedy in CHANGED:
        with monkeypatch.context() as patched:
            patched.setattr(*changed)
            assert remedy in remedies()[about]


@pytest.mark.usefixtures("good_host")
def test_environment_variables_that_do_not_fit_the_host_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    found = remedies()
    assert set(found) == {"cores", "interfaces"}
    assert found["interfaces"].startswith("set GLOO_SOCKET_IFNAME to one of lo")
