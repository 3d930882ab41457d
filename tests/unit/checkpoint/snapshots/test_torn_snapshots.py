"""Wherever ranks are killed while they write, the newest snapshot that all have completed is restored."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.snapshots import snapshot_buffer
from plait.checkpoint.snapshots.snapshot_buffer import SnapshotBuffer
from plait.checkpoint.snapshots.snapshot_folder import SnapshotFolder

STEPS = 3


class State(NamedTuple):
    """What a rank has written."""

    begun: int
    """Snapshots."""
    committed: int
    files: dict[str, bytes]
    """By their paths."""


class Written:
    """What the files of each rank held, after each of its writes and in the middle of the copy of a box."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self.states: dict[int, list[State]] = {0: [State(0, 0, {})], 1: [State(0, 0, {})]}
        """By rank."""
        self.too_early = False
        """Whether a rank has begun a snapshot before all have committed the one before."""
        self._current = threading.local()

    @contextmanager
    def by(self, buffer: Any, *, begins: bool) -> Iterator[None]:
        """Within it this thread copies, or commits, for the rank of a buffer."""
        self._current.states = self.states[int(buffer._manifest[5:10])]
        self.see(begun=begins)
        yield
        self.see(committed=not begins)

    def see(self, *, begun: bool = False, committed: bool = False) -> None:
        if not hasattr(self._current, "states"):
            return
        states: list[State] = self._current.states
        if begun:
            self.too_early |= min(one[-1].committed for one in self.states.values()) < states[-1].begun
        number = next(number for number, one in self.states.items() if one is states)
        paths = self._base.glob(f"plait-*/*/rank-{number:05d}*")
        files = {str(path.relative_to(self._base)): path.read_bytes() for path in paths}
        state = State(states[-1].begun + begun, states[-1].committed + committed, files)
        if state != states[-1]:
            states.append(state)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    (base := tmp_path / "written").mkdir()
    seen = Written(base)

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            seen.see()
            return result

        monkeypatch.setattr(owner, name, call)

    for name in ("mapped", "withdraw", "publish"):
        watched(SnapshotFolder, name)
    for name in ("create", "write", "rename"):
        watched(Disk, name)
    real_copy, real_commit, copy_later = (
        SnapshotBuffer.copy,
        SnapshotBuffer.commit,
        snapshot_buffer.copy_later,
    )

    def in_two_parts(target: Tensor, source: Tensor) -> None:
        if target.dim():
            target[: len(target) // 2].copy_(source[: len(target) // 2])
            seen.see()
        copy_later(target, source)
        seen.see()

    def copy(buffer: Any, *arguments: Any) -> None:
        with seen.by(buffer, begins=True):
            real_copy(buffer, *arguments)

    def commit(buffer: Any, *arguments: Any) -> None:
        with seen.by(buffer, begins=False):
            time.sleep(0.02)  # longer than the next step takes
            real_commit(buffer, *arguments)

    monkeypatch.setattr(snapshot_buffer, "copy_later", in_two_parts)
    monkeypatch.setattr(SnapshotBuffer, "copy", copy)
    monkeypatch.setattr(SnapshotBuffer, "commit", commit)
    return seen


def make() -> tuple[Any, torch.optim.Optimizer]:
    plan = plait.Plan(pp=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    return engine, torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)


def values_of(engine: Any, optimizer: Any) -> list[Tensor]:
    shards = [shard for _, shard in engine.named_parameters()]
    return [
        *(one.detach().clone() for one in shards),
        *(optimizer.state[one]["momentum_buffer"].clone() for one in shards),
    ]


def train(base: Path) -> list[list[Tensor]]:
    """The values after each step, each of which is copied."""
    engine, optimizer = make()
    snapshots = plait.Snapshots(engine, optimizer, every=1, name="run", folder=base)
    values = []
    for step in range(STEPS):
        engine.forward_backward(torch.ones(1, 4) * step, torch.tensor([step % 2]))
        optimizer.step()
        optimizer.zero_grad()
        snapshots.step(step + 1)
        values.append(values_of(engine, optimizer))
    snapshots.finish()
    return values


def restore_all(bases: list[Path]) -> list[tuple[int, list[Tensor]]]:
    """The step and the values that are restored from each folder; step 0 where there is nothing."""
    engine, optimizer = make()
    found = []
    for base in bases:
        snapshots = plait.Snapshots(engine, optimizer, every=1, name="run", folder=base)
        restored = snapshots.restore()
        found.append((0, []) if restored is None else (restored.step, values_of(engine, optimizer)))
        snapshots.release()
    return found


def put(base: Path, files: Mapping[str, bytes]) -> None:
    base.mkdir()
    for name, data in files.items():
        (path := base / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.mark.parametrize("number", [60, pytest.param(200, marks=pytest.mark.full)])
def test_ranks_killed_anywhere_are_restored_to_the_newest_snapshot_of_both(
    thread_ranks: Any,
    written: Written,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    """Pairs of what both ranks may have written when one of them is killed."""
    values = thread_ranks.run(train, tmp_path / "written", ranks=2)
    monkeypatch.undo()
    one, other = written.states.values()
    assert min(len(one), len(other)) > 30
    assert not written.too_early
    third = [state for state in one if state.begun == 3][1:]  # of the first its half may still tell
    manifests = [data for state in third for name, data in state.files.items() if ".json" in name]
    assert not any(b'"step":1,' in data for data in manifests), "the third takes the place of the first"
    pairs = [
        (mine, others)
        for mine, others in product(one, other)
        if max(mine.begun, others.begun) - 1 <= min(mine.committed, others.committed)
    ]
    choice = random.Random(0)
    groups = [
        [pair for pair in pairs if min(one.committed for one in pair) == done] for done in range(STEPS + 1)
    ]
    pairs = [
        pair for group in groups for pair in choice.sample(group, min(len(group), number // len(groups)))
    ]
    bases = [tmp_path / str(pair) for pair in range(len(pairs))]
    for base, (mine, others) in zip(bases, pairs, strict=True):
        put(base, mine.files | others.files)
    restored = zip(*thread_ranks.run(restore_all, bases, ranks=2), strict=True)
    steps = set()
    for (mine, others), found in zip(pairs, restored, strict=True):
        (step, *_) = {step for step, _ in found}
        committed = min(mine.committed, others.committed)
        assert committed <= step <= committed + 1
        steps.add(step)
        for rank, (own_step, own) in enumerate(found):
            assert own_step == step
            assert all(map(torch.equal, own, values[rank][step - 1] if step else []))
    assert steps == {0, 1, 2, 3}
    assert capsys.readouterr().out == "", "what is half written is no damaged snapshot"
