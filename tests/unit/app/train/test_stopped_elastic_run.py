"""A signal to stop counts although ranks are restarted before the run has stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import plait
from plait.app.train.train_run import received_signal
from plait.ranks.collectives import barrier
from plait.ranks.launch.rank_main_loop import STOP_SIGNAL
from plait.ranks.mesh import Mesh


def signalled_and_lost(folder: Path) -> int:
    """Return the signal that this rank knows of; rank 1 is killed after it has received one."""
    mesh = Mesh(dp=2, timeout=20.0)
    with received_signal([STOP_SIGNAL]) as received:
        if mesh.rank == 1 and not (folder / "restarted").exists():
            (folder / "restarted").touch()
            os.kill(os.getpid(), STOP_SIGNAL)
            assert received() == STOP_SIGNAL
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(mesh.group("world"), checked=False).wait()
        return received()


@pytest.mark.full
def test_a_signal_to_stop_counts_after_the_rank_that_received_it_was_replaced(tmp_path: Path) -> None:
    found = plait.launch(
        signalled_and_lost, tmp_path, ranks=2, threads=1, device="cpu", timeout=30.0, elastic=True
    )
    assert found == [STOP_SIGNAL] * 2
    assert (tmp_path / "restarted").exists()
