"""A process keeps a run for the next world only as it was between two steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_runs import step_once

import plait
from parity.pairs import in_turns
from plait.engine.resharding.reshard_kept import reshard_kept
from plait.errors import CommunicationError, CorruptionError, ReplicaError
from plait.ranks.exchange_with_supervisor import go_on_before, variables_of_supervisor
from plait.ranks.run_kept_in_memory import KeptRun, forget_connections_of_kept_run, keep_run, take_kept_run

LOST = CommunicationError("another rank is lost")


def model() -> torch.nn.Module:
    return plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=32, context=8)


def new_run() -> tuple[Any, torch.optim.Optimizer]:
    plan = plait.Plan()
    engine = plait.parallelize(model(), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    return engine, torch.optim.AdamW(engine.parameters())


def kept_after(
    folder: Path,
    patch: pytest.MonkeyPatch,
    happens: Callable[[Any, Any], object],
    *,
    later: int = 1,
    error: Exception = LOST,
    afterwards: Callable[[], object] = lambda: None,
) -> KeptRun | None:
    """What a process has kept, so many worlds later, of a run that ends by an error after two steps.

    Something `happens` to engine and optimizer before, and something `afterwards`.
    """

    def run() -> KeptRun | None:
        for name, value in variables_of_supervisor(str(folder), 3).items():
            patch.setenv(name, value)
        assert take_kept_run() is None
        engine, optimizer = new_run()
        snapshots = plait.Snapshots(engine, optimizer, every=9, folder=folder)
        for step in range(2):
            step_once(engine, optimizer, step)
            snapshots.step(step + 1, {"seen": step})
        happens(engine, optimizer)
        snapshots.__exit__(type(error), error, None)
        afterwards()
        for name, value in variables_of_supervisor(str(folder), 3 + later).items():
            patch.setenv(name, value)
        return take_kept_run()

    return copy_context().run(run)


@pytest.mark.parametrize(
    ("flips", "first"),
    in_turns({"right": False, "flipped": True}, {name: name for name in ("checks", "snapshots")}),
)
def test_a_kept_run_moves_only_if_its_memory_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, flips: bool
) -> None:
    """Whichever ends first when a rank is lost, and although the next step has begun; the bit flips later."""
    checks: list[Any] = []

    def end_checks() -> None:
        checks.pop().__exit__(type(LOST), LOST, None) if checks else None

    def begin(engine: Any, optimizer: Any) -> None:
        checks.append(plait.CorruptionChecks(engine, optimizer))
        begin_a_step(engine, optimizer)
        if first == "checks":
            end_checks()

    def move() -> tuple[Any, Any] | None:
        kept = kept_after(tmp_path, monkeypatch, begin, afterwards=end_checks)
        assert kept is not None
        if flips:
            next(kept.engine.parameters()).detach().numpy().view("uint8").reshape(-1)[3] ^= 1
        keep_run(kept)
        for name, value in variables_of_supervisor(str(tmp_path), 5).items():
            monkeypatch.setenv(name, value)
        plan = plait.Plan()
        return plait.reshard_kept(
            no_model, torch.optim.AdamW, plan, plait.Mesh(plan), loss=plait.cross_entropy
        )

    if not flips:
        assert copy_context().run(move) is not None
        return
    with pytest.raises(CorruptionError, match=r"rank 0 of 1 cannot go on .* changed in memory") as found:
        copy_context().run(move)
    assert (found.value.last_good_step, found.value.ranks) == (2, (0,))


def no_model() -> Any:
    raise AssertionError("the kept one moves")


def begin_a_step(engine: Any, optimizer: Any) -> None:
    engine.forward_backward(*[torch.zeros(2, 8, dtype=torch.int64)] * 2)


def test_a_run_is_kept_with_its_step_and_state_while_the_next_step_is_not_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_after(tmp_path, monkeypatch, begin_a_step)
    assert kept is not None
    assert (kept.step, kept.state, kept.run_state["passes"]) == (2, {"seen": 1}, 2)
    assert kept.engine.passes == 3  # goes back when it is moved


def test_a_run_whose_next_update_has_begun_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        kept_after(tmp_path, monkeypatch, lambda engine, optimizer: step_once(engine, optimizer, 2)) is None
    )


def test_a_run_that_has_failed_itself_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where replicas differ: its memory may be wrong."""
    assert kept_after(tmp_path, monkeypatch, begin_a_step, error=ReplicaError("replicas differ")) is None


def test_a_run_is_kept_for_the_next_world_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_after(tmp_path, monkeypatch, begin_a_step, later=2) is None


def test_a_kept_run_that_cannot_move_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_after_wrong_bits() -> int:
        for name, value in variables_of_supervisor(str(tmp_path), 3).items():
            monkeypatch.setenv(name, value)
        assert take_kept_run() is None
        engine, optimizer = new_run()
        unit = weakref.ref(engine.runtime)
        keep_run(KeptRun(engine, optimizer, 2, {}, engine.run_state))
        del engine, optimizer
        for name, value in variables_of_supervisor(str(tmp_path), 4).items():
            monkeypatch.setenv(name, value)
        go_on_before(str(tmp_path), 1)
        plan = plait.Plan()
        moved = reshard_kept(model, torch.optim.AdamW, plan, plait.Mesh(plan), loss=plait.cross_entropy)
        assert moved is None
        return 0 if unit() is None else 1

    assert copy_context().run(drop_after_wrong_bits) == 0


def test_a_kept_run_of_a_world_before_the_one_that_failed_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_twice() -> tuple[bool, bool]:
        found = []
        engine, optimizer = new_run()
        for name, value in variables_of_supervisor(str(tmp_path), 3).items():
            monkeypatch.setenv(name, value)
        keep_run(KeptRun(engine, optimizer, 2, {}, engine.run_state))
        for generation in (3, 4):
            for name, value in variables_of_supervisor(str(tmp_path), generation).items():
                monkeypatch.setenv(name, value)
            found.append(forget_connections_of_kept_run())
        return found[0], found[1]

    assert copy_context().run(fail_twice) == (True, False)
