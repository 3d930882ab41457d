"""The lock of a run's folder: who holds it, for how long, and where there is none."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from plait.app.config.config import Config
from plait.app.loop import run_folder
from plait.app.loop.loggers import Csv, JsonLines
from plait.app.loop.run_folder import EARLIER, locked_folder, set_aside
from plait.app.train.train_run import train
from plait.errors import ConfigError
from plait.files import try_lock
from plait.pictures.report.run_record import write_event
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import GridMesh

HOLDER = """
import os, sys, time
from pathlib import Path
from plait.files import try_lock
file = try_lock(Path(sys.argv[1]))
copy = os.dup(file.fileno())
if os.fork():  # a process of a killed rank lives a little longer, and has the lock too
    print(flush=True)
    time.sleep(60)
time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, action: str = "") -> str:
    """Hold the lock on a rank of a world of two; return what happened."""
    mesh = GridMesh(dp=2)
    try:
        with locked_folder(folder, "run.lock", mesh, must_be_writable=action != "may fail"):
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


def test_no_file_of_a_run_is_written_through_a_link(tmp_path: Path):
    """A folder from somebody else may have links to files of the user's."""
    (victim := tmp_path / "victim").write_text("kept")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "run"
    for name in (
        "metrics.jsonl",
        "metrics.jsonl.part",
        "metrics.csv",
        "run.lock",
        "run.json",
        "events.jsonl",
    ):
        folder.mkdir()
        (folder / name).symlink_to(victim)
        for lines in (JsonLines(folder / "metrics.jsonl"), Csv(folder / "metrics.csv")):
            with suppress(OSError):
                lines.begin(1)
            lines.close()
        with suppress(OSError):
            file = try_lock(folder / "run.lock")
            assert file is not None
            file.close()
        write_event(folder, "start", 0, "")
        shutil.rmtree(folder)
    assert victim.read_text() == "kept"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}")
    (folder / EARLIER).symlink_to(elsewhere)
    with pytest.raises(OSError, match="it is a link"):
        set_aside(folder)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["checkpoints", "earlier", "metrics.jsonl", "tensorboard", "config.json"])
def test_a_run_whose_folder_contains_a_symbolic_link_is_refused(tmp_path: Path, name: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name} is a link, and a run writes through none: remove it"):
        train(Config.model_validate({"run": {"dir": tmp_path / "run"}}))
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "linked").symlink_to(tmp_path / "run")  # the folder itself may be one
    (tmp_path / "run" / name).unlink()
    with locked_folder(tmp_path / "linked", "run.lock", GridMesh(dp=1)):
        pass
