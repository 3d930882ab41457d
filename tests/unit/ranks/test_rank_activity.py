"""What a rank does stands in a file that its supervisor reads."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch

import plait
from plait.ranks.collectives import all_reduce
from plait.ranks.failure.rank_activity import ActivityFile, activity_file_of_rank, variables_of_activity


def test_a_rank_that_has_done_nothing_yet_does_not_hang(tmp_path: Path) -> None:
    activity = ActivityFile.begin(tmp_path / "a").read()
    assert (activity.since, activity.waits, activity.awaited) == (math.inf, False, "")


def test_a_wait_and_its_end_are_read_with_their_time(tmp_path: Path) -> None:
    reader = ActivityFile.begin(tmp_path / "a")
    writer = ActivityFile(tmp_path / "a")
    before = time.monotonic()
    writer.begin_wait("3F1 from rank 2")
    waiting = reader.read()
    assert before <= waiting.since <= time.monotonic()
    assert (waiting.waits, waiting.awaited) == (True, "3F1 from rank 2")
    writer.end_wait()
    assert (reader.read().waits, reader.read().awaited) == (False, "3F1 from rank 2")
    assert reader.read().since >= waiting.since
    writer.begin_wait("é" * 1000)
    assert reader.read().awaited == "é" * 120


def waited(folder: Path) -> tuple[str, bool]:
    path = folder / str(os.getpid())
    reader = ActivityFile.begin(path)
    os.environ |= variables_of_activity(path)
    mesh = plait.Mesh(dp=2)
    all_reduce(torch.ones(1), mesh.group("dp")).about("a sum").wait()
    return reader.read().awaited, reader.read().waits


def test_waits_of_a_mesh_are_written_where_there_is_a_supervisor(rank_pool: Any, tmp_path: Path) -> None:
    assert rank_pool.run(waited, tmp_path, ranks=2) == [
        ("all_reduce over dp with 1 (a sum)", False),
        ("all_reduce over dp with 0 (a sum)", False),
    ]
    assert activity_file_of_rank() is None
