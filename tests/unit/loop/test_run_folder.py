"""The lock of a run's folder: who holds it, for how long, and where there is none."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.comm.mesh import GridMesh
from plait.comm.rank_pool import RankPool
from plait.errors import ConfigError
from plait.loop import run_folder
from plait.loop.run_folder import locked_folder

HOLDER = """
import os, sys, time
from pathlib import Path
from plait.file_lock import try_lock
file = try_lock(Path(sys.argv[1]))
if os.fork():  # a worker of a killed rank lives a little longer, and has the lock too
    print(flush=True)
    time.sleep(60)
time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, action: str = "") -> str:
    """Hold the lock on a rank of a world of two; return what happened."""
    mesh = GridMesh(ranks=2)
    try:
        with locked_folder(
            folder, "run.lock", mesh.group("world"), mesh.device, must_be_writable=action != "may fail"
        ):
            return "held"
    except ConfigError as error:
        return str(error)


def test_every_rank_is_told_who_holds_the_lock(thread_ranks: RankPool, tmp_path: Path):
    assert thread_ranks.run(hold, tmp_path, ranks=2) == ["held"] * 2
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run.lock"), "0.6"], stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        told = thread_ranks.run(hold, tmp_path, ranks=2)
        assert all(f"{tmp_path} is in use by another run, process {holder.pid} on " in one for one in told)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        began = time.monotonic()
        assert thread_ranks.run(hold, tmp_path, ranks=2) == ["held"] * 2  # once its child has ended, too
        assert time.monotonic() - began < 9


def test_a_file_system_without_locks_is_used_without(
    thread_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder, "try_lock", refuse)
    assert thread_ranks.run(hold, tmp_path, ranks=2) == ["held"] * 2


def test_a_folder_that_cannot_be_written_to_is_an_error_where_it_must_be(
    thread_ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    told = thread_ranks.run(hold, tmp_path / "file", ranks=2)
    assert all("cannot be written to" in one for one in told)
    assert thread_ranks.run(hold, tmp_path / "file", "may fail", ranks=2) == ["held"] * 2
