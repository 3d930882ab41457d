"""Snapshots of optimizer state that one rank alone has, as of `plait.Owned`, over several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snapshot_runs import Ended, train

import plait
from plait.ranks.mesh import Mesh


def on_two_hosts(plan: plait.Plan, folder: Path, steps: int, owned: bool) -> Ended:
    """A run whose first and second half of ranks have folders of their own."""
    own = folder / str(2 * Mesh(plan).rank // plan.world)
    own.mkdir(exist_ok=True)
    return train(plan, own, steps, owned=owned)


def test_a_snapshot_without_states_that_a_lost_rank_owned_is_left_out(
    thread_ranks: Any, tmp_path: Path
) -> None:
    """The parameters are all there, as replicas; the newest snapshot has no copy on the other host yet."""
    plan = plait.Plan(dp=2)
    whole = thread_ranks.run(on_two_hosts, plan, tmp_path, 4, True, ranks=2)[0]
    for path in tmp_path.glob("*/*/*/rank-00001.json"):
        if path.is_relative_to(tmp_path / "1") or '"step":4,' in path.read_text():
            path.unlink()
    again = thread_ranks.run(on_two_hosts, plan, tmp_path, 4, True, ranks=2)
    assert [(one.first, one.losses) for one in again] == [(3, whole.losses[3:])] * 2


@pytest.mark.full
def test_an_owner_gets_the_parts_of_its_state_from_other_hosts(thread_ranks: Any, tmp_path: Path) -> None:
    """The state of AdamW was in shards, and is that of whole parameters afterwards."""
    plan = plait.Plan(dp=2, strategy="full")
    thread_ranks.run(on_two_hosts, plan, tmp_path, 1, False, ranks=2)
    for host, other in ((0, 1), (1, 0)):
        for path in tmp_path.glob(f"{host}/*/*/rank-0000{other}.*"):
            path.unlink()
    again = thread_ranks.run(on_two_hosts, plan, tmp_path, 3, True, ranks=2)
    for path in tmp_path.glob("?/*/*/*.json"):
        path.unlink()
    whole = thread_ranks.run(on_two_hosts, plan, tmp_path, 3, False, ranks=2)[0]
    assert [(one.first, one.losses) for one in again] == [(1, pytest.approx(whole.losses[1:], rel=1e-12))] * 2
