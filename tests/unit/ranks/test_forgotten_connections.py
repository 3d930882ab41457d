"""The connections of a world that failed end, although a process keeps the mesh of its run."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from plait.ranks.collectives import all_reduce
from plait.ranks.launch.world_membership import leave_world
from plait.ranks.mesh import GridMesh
from plait.ranks.run_kept_in_memory import KeptRun, forget_connections_of_kept_run, keep_run, take_kept_run


def threads_of_gloo() -> int:
    """Return how many threads look after connections of Gloo: one for each process group."""
    gc.collect()
    return sum("gloo_tcp" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def threads_that_leaving_ends() -> tuple[int, int]:
    """Return how many threads a world and a mesh in it have, and how many of them leaving ends."""
    take_kept_run()
    before = threads_of_gloo() - 1  # without that of the world
    mesh = GridMesh(rows=1, columns=2)
    all_reduce(torch.zeros(1 << 20), mesh.group("columns"), "sum").wait()
    own = threads_of_gloo() - before
    keep_run(KeptRun(SimpleNamespace(mesh=mesh), None, 1, {}, {}))
    forget_connections_of_kept_run()
    leave_world()
    deadline = time.monotonic() + 5.0  # the last reference may be that of a thread which is about to end
    while (left := threads_of_gloo()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mesh.size("columns") == 2
    take_kept_run()
    return own, own + before - left


def test_leaving_a_world_ends_its_process_groups_although_the_mesh_is_kept(rank_pool: Any) -> None:
    for own, ended in rank_pool.run(threads_that_leaving_ends, ranks=2):
        assert ended == own >= 2
