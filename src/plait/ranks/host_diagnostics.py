"""`check_host`: checks this host for ranks: versions, backends, devices, limits, network, clock."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from plait.package import version_of
from plait.ranks.accelerator import accelerator_versions, name_of, total_memory, visible_accelerators

SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED = 1_000_000_000
_ENOUGH_DESCRIPTORS = 4096
_ENOUGH_PROCESSES = 1024
_SLOW_CLOCK = 1000.0
"""Nanoseconds of a call."""
_EXTRAS = ("tensorboard", "tokenizers", "transformers", "datasets", "wandb", "mlflow")


@dataclass(frozen=True)
class HostFinding:
    """A property of this host that was checked, its value, and a remedy if it has to change."""

    about: str
    found: str
    remedy: str = ""
    """A sentence about what to change; "" where nothing has to be."""


def check_host() -> Iterator[HostFinding]:
    """Yield a finding for each property of this host that ranks depend on, without starting ranks."""
    yield from _versions()
    yield _backends()
    yield from _devices()
    yield _cores()
    yield _shared_memory()
    yield from _limits()
    yield from _network()
    yield _clock()


def _versions() -> Iterator[HostFinding]:
    packages = ("plait", "torch", "numpy", "pydantic", "safetensors")
    found = ", ".join(f"{name} {version_of(name)}" for name in packages)
    yield HostFinding("versions", f"{found}, Python {platform.python_version()}")
    present = [name for name in _EXTRAS if version_of(name)]
    extras = ", ".join(f"{name} {version_of(name)}" for name in present) or "none"
    yield HostFinding("extras", extras)


def _backends() -> HostFinding:
    if not dist.is_available():
        remedy = "install a torch that was built with torch.distributed: ranks cannot communicate without it."
        return HostFinding("backends", "none", remedy)
    known = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    found = ", ".join(name for name, here in known.items() if here) or "none"
    missing = "" if known["gloo"] else "install a torch with Gloo: ranks on CPUs communicate over it."
    return HostFinding("backends", found, missing)


def _devices() -> Iterator[HostFinding]:
    count = visible_accelerators()
    if not count:
        yield HostFinding("devices", "no GPU that torch sees: ranks run on the CPU")
        return
    each = [torch.device("cuda", index) for index in range(count)]
    names = [f"{name_of(device)} ({total_memory(device) / 1e9:.0f} GB)" for device in each]
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    remedy = ""
    if len(set(names)) > 1:
        remedy = "take GPUs of one kind by CUDA_VISIBLE_DEVICES: all ranks wait for the slowest one."
    yield HostFinding("devices", kinds, remedy)
    versions = accelerator_versions()
    yield HostFinding("device software", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _cores() -> HostFinding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} for this process, {torch.get_num_threads()} threads of torch"
    found += "" if threads is None else f", OMP_NUM_THREADS={threads}"
    if threads is not None and threads.isdecimal() and int(threads) > cores:
        return HostFinding("cores", found, f"set OMP_NUM_THREADS to at most {cores}, or unset it.")
    return HostFinding("cores", found)


def _shared_memory() -> HostFinding:
    if not SHARED_MEMORY.is_dir():
        return HostFinding("shared memory", f"no {SHARED_MEMORY}: ranks of one host communicate over Gloo")
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / 1e9:.2g} of {usage.total / 1e9:.2g} GB free in {SHARED_MEMORY}"
    remedy = ""
    if usage.total < _ENOUGH_SHARED:
        remedy = "start the container with --shm-size=8g or --ipc=host: ranks share tensors there."
    elif usage.free < usage.total / 10:
        remedy = f"remove what earlier processes have left in {SHARED_MEMORY}."
    return HostFinding("shared memory", found, remedy)


def _limits() -> Iterator[HostFinding]:
    for about, limit, enough, option in (
        ("open files", resource.RLIMIT_NOFILE, _ENOUGH_DESCRIPTORS, "n"),
        ("processes", resource.RLIMIT_NPROC, _ENOUGH_PROCESSES, "u"),
    ):
        soft, hard = resource.getrlimit(limit)
        found = " of at most ".join(map(_limit_text, (soft, hard)))
        remedy = ""
        if soft != resource.RLIM_INFINITY and soft < enough:
            remedy = f"raise it, `ulimit -{option} {enough * 4}`: each rank opens several for each peer."
        yield HostFinding(about, found, remedy)


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _network() -> Iterator[HostFinding]:
    names = [name for _, name in socket.if_nameindex()]
    given = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    chosen = ", ".join(f"{name}={value}" for name, value in given.items() if value)
    remedy = ""
    unknown = given["GLOO_SOCKET_IFNAME"]
    if unknown and unknown not in names:
        remedy = f"set GLOO_SOCKET_IFNAME to one of {', '.join(names)}, or unset it."
    yield HostFinding("interfaces", ", ".join(names) + (f"; {chosen}" if chosen else ""), remedy)
    host = socket.gethostname()
    try:
        yield HostFinding("host name", f"{host} is {socket.gethostbyname(host)}")
    except OSError:
        remedy = "add it to the hosts file, or set GLOO_SOCKET_IFNAME: ranks find each other by name."
        yield HostFinding("host name", f"{host} has no address", remedy)


def _clock() -> HostFinding:
    calls = 10_000
    start = time.perf_counter_ns()
    for _ in range(calls):
        time.perf_counter_ns()
    each = (time.perf_counter_ns() - start) / calls
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.is_file() else "monotonic"
    found = f"{name}, {each:.0f} ns a reading"
    slow = "boot with a faster clock source, such as tsc: recorded times are coarse."
    return HostFinding("clock", found, slow if each > _SLOW_CLOCK else "")
