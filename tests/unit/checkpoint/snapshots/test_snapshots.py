"""A run whose ranks end and start again goes on from memory, as the run that never ended."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_runs import Ended, make_run, step_once, train

import plait
from plait.errors import CheckpointError, CorruptionError
from plait.ranks.mesh import Mesh

DP = plait.Plan(dp=2)
STEPS = 6


@pytest.fixture(scope="module")
def whole(thread_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """A run that never ended."""
    found: list[Ended] = thread_ranks.run(train, DP, tmp_path_factory.mktemp("whole"), STEPS, ranks=2)
    return found


def half_of(folder: Path, step: int) -> Path:
    """The half with the snapshot of a step."""
    (found,) = {path.parent for path in folder.glob("*/*/*.json") if f'"step":{step},' in path.read_text()}
    return found


def flip(path: Path, byte: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_restarted_ranks_go_on_with_the_same_bits(
    thread_ranks: Any, whole: list[Ended], tmp_path: Path
) -> None:
    """Every second step is copied; the state of both ranks, replicas of each other, once."""
    ended = thread_ranks.run(train, DP, tmp_path, 5, 2, ranks=2)
    assert [one.first for one in ended] == [None, None]
    again = thread_ranks.run(train, DP, tmp_path, STEPS, 2, ranks=2)
    for one, other in zip(again, whole, strict=True):
        assert (one.first, one.losses) == (4, other.losses[4:])
        assert all(torch.equal(one.parameters[name], value) for name, value in other.parameters.items())
    elements = sum(value.numel() for value in whole[0].parameters.values())
    numbers = len(whole[0].parameters)
    assert sum(one.bytes_copied for one in ended) == 2 * (3 * 8 * elements + 4 * numbers)


LAYOUTS: dict[str, tuple[plait.Plan, plait.Plan]] = {
    "dp to tp": (DP, plait.Plan(tp=2)),
    "four to two, sharded": (plait.Plan(pp=2, dp=2, strategy="full"), plait.Plan(dp=2, strategy="optimizer")),
    "two to four": (plait.Plan(tp=2, sequence_parallel="keep"), plait.Plan(pp=2, dp=2, replicate=2)),
    "four to one": (plait.Plan(dp=4, strategy="full"), plait.Plan()),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_layouts_go_on_from_a_snapshot(
    thread_ranks: Any, whole: list[Ended], tmp_path: Path, case: str
) -> None:
    first, second = LAYOUTS[case]
    thread_ranks.run(train, first, tmp_path, 3, ranks=first.world)
    again = thread_ranks.run(train, second, tmp_path, 5, ranks=second.world)
    assert [(one.first, one.losses) for one in again] == [
        (3, pytest.approx(whole[0].losses[3:5], rel=1e-12)) for _ in again
    ]
    assert len([*tmp_path.glob("*/*/*.safetensors")]) == 2 * second.world, "those of more ranks are gone"
    back = thread_ranks.run(train, first, tmp_path, STEPS, ranks=first.world)
    assert back[0].losses == pytest.approx(whole[0].losses[5:], rel=1e-12)


@pytest.mark.parametrize("where", ["a value", "the header", "the manifest"])
def test_a_flipped_bit_makes_ranks_take_the_other_half_and_then_none(
    thread_ranks: Any, whole: list[Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    name, byte = {
        "a value": ("rank-00001.safetensors", -1),
        "the header": ("rank-00001.safetensors", 9),
        "the manifest": ("rank-00001.json", 200),
    }[where]
    thread_ranks.run(train, DP, tmp_path, 4, ranks=2)
    flip(half_of(tmp_path, 4) / name, byte)
    again = thread_ranks.run(train, DP, tmp_path, 5, ranks=2)
    assert [(one.first, one.losses) for one in again] == [(3, whole[0].losses[3:5])] * 2
    told = capsys.readouterr().out
    assert ("WARNING: the snapshot of step 4 in memory is left out" in told) == (where != "the manifest")
    for step in (4, 5):
        flip(half_of(tmp_path, step) / name, byte)
    assert thread_ranks.run(train, DP, tmp_path, 1, ranks=2)[0].first is None


def own_folders(plan: plait.Plan, folder: Path, steps: int) -> Ended:
    """As on two hosts, with half of the ranks each."""
    own = folder / str(2 * Mesh(plan).rank // plan.world)
    own.mkdir(exist_ok=True)
    return train(plan, own, steps)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [plait.Plan(pp=2, dp=2), plait.Plan(dp=4), plait.Plan(pp=2, tp=2, sequence_parallel="keep")],
    ids=str,
)
def test_each_host_keeps_what_its_ranks_hold(
    thread_ranks: Any,
    whole: list[Ended],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plan: plait.Plan,
) -> None:
    """So restarted ranks need no other host; with another plan they get from there what they lack."""
    thread_ranks.run(own_folders, plan, tmp_path, 4, ranks=4)
    again = thread_ranks.run(own_folders, plan, tmp_path, 5, ranks=4)
    assert [(one.first, one.losses) for one in again] == [
        (4, pytest.approx(whole[0].losses[4:5], rel=1e-12))
    ] * 4
    other = plait.Plan(tp=2, dp=2)
    again = thread_ranks.run(own_folders, other, tmp_path, 6, ranks=4)
    assert [(one.first, one.losses) for one in again] == [
        (5, pytest.approx(whole[0].losses[5:], rel=1e-12))
    ] * 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plait.Plan(dp=4), id="replicas", marks=pytest.mark.full),
        pytest.param(plait.Plan(pp=2, dp=2), id="stages"),
    ],
)
def test_a_host_that_lost_its_memory_gets_its_part_from_another(
    thread_ranks: Any, whole: list[Ended], tmp_path: Path, plan: plait.Plan
) -> None:
    """Hosts keep a copy of what only the one before has; where both are lost, there is no snapshot."""
    thread_ranks.run(own_folders, plan, tmp_path, 4, ranks=4)
    files = {path.name for path in tmp_path.glob("0/*/*/*.safetensors")}
    assert len(files) == (2 if plan.dp == 4 else 4)
    shutil.rmtree(tmp_path / "1")
    again = thread_ranks.run(own_folders, plan, tmp_path, 5, ranks=4)
    expected = (4, pytest.approx(whole[0].losses[4:5], rel=1e-12))
    assert [(one.first, one.losses) for one in again] == [expected] * 4
    for host in ("0", "1"):
        shutil.rmtree(tmp_path / host)
    assert [one.first for one in thread_ranks.run(own_folders, plan, tmp_path, 1, ranks=4)] == [None] * 4


def rolled_back(folder: Path) -> tuple[list[float], list[float]]:
    engine, optimizer, snapshots = make_run(plait.Plan(), folder, every=2)
    with snapshots:
        losses = []
        for step in range(3):
            losses.append(step_once(engine, optimizer, step))
            snapshots.step(step + 1)
        found = snapshots.restore()
        assert found is not None
        assert found.step == 2
        again = [step_once(engine, optimizer, 2)]
        step_once(engine, optimizer, 3)
        snapshots.step(4)  # of the tensors that take the place of those before
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        step_once(engine, optimizer, 4)
        found = snapshots.restore()
        assert found is not None
        assert found.step == 4
        assert all(map(torch.equal, moments, [state["exp_avg"] for state in optimizer.state.values()]))
        assert len([*folder.glob("*/*/*.safetensors")]) == 2
    return losses[2:], again


def test_a_run_goes_back_to_its_own_snapshot_and_leaves_nothing_at_its_end(tmp_path: Path) -> None:
    first, again = rolled_back(tmp_path)
    assert first == again
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_does_not_restore_removes_the_snapshots_of_before_with_its_first(tmp_path: Path) -> None:
    train(plait.Plan(), tmp_path, 4)
    engine, optimizer, snapshots = make_run(plait.Plan(), tmp_path)
    step_once(engine, optimizer, 0)
    snapshots.step(1)
    snapshots.finish()
    assert len([*tmp_path.glob("*/*/*.json")]) == 1
    snapshots.close()


def test_an_error_leaves_the_snapshots(tmp_path: Path) -> None:
    snapshots = make_run(plait.Plan(), tmp_path)[2]
    snapshots.step(1)
    snapshots.finish()
    with pytest.raises(ZeroDivisionError), snapshots:
        raise ZeroDivisionError
    assert len([*tmp_path.glob("*/*/*.json")]) == 1


def test_wrong_bits_leave_the_snapshots_of_the_steps_before(tmp_path: Path) -> None:
    """The last is withdrawn, also where its checksums are still computed."""
    engine, optimizer, snapshots = make_run(plait.Plan(), tmp_path)
    for step in (1, 2):
        step_once(engine, optimizer, step - 1)
        snapshots.step(step)
    with pytest.raises(CorruptionError), snapshots:
        raise CorruptionError("a bit flipped", 1)
    with make_run(plait.Plan(), tmp_path)[2] as again:
        found = again.restore()
    assert found is not None
    assert found.step == 1


def found_after_wrong_bits(folder: Path, last_right: int | None) -> int | None:
    """Train four steps as on two hosts, or go on; then rank 3 finds wrong bits. Return what was restored."""
    rank = Mesh(plait.Plan(dp=4)).rank
    own = folder / str(rank // 2)
    own.mkdir(exist_ok=True)
    engine, optimizer, snapshots = make_run(plait.Plan(dp=4), own)
    found = snapshots.restore()
    for step in range(found.step if found else 0, 4):
        step_once(engine, optimizer, step)
        snapshots.step(step + 1)
    if rank == 3 and last_right is not None:
        snapshots.withdraw_after(last_right)
    snapshots.release()
    return found and found.step


@pytest.mark.full
def test_no_host_goes_on_from_what_a_rank_of_another_has_found_wrong(
    thread_ranks: Any, tmp_path: Path
) -> None:
    """Though the replicas there are whole; later snapshots of the same steps count."""
    found = [
        thread_ranks.run(found_after_wrong_bits, tmp_path, last_right, ranks=4)
        for last_right in (3, None, 2, None)
    ]
    assert found == [[None] * 4, [3] * 4, [4] * 4, [None] * 4]


def test_a_name_in_use_is_refused_and_one_is_needed_without_torchrun(tmp_path: Path) -> None:
    kept = make_run(plait.Plan(), tmp_path)
    with pytest.raises(
        CheckpointError, match=f"is used by process {os.getpid()} on .*: end that run, or give"
    ):
        make_run(plait.Plan(), tmp_path)
    with pytest.raises(CheckpointError, match="snapshots have no name, and neither torchrun nor"):
        make_run(plait.Plan(), tmp_path, name=None)
    with pytest.raises(CheckpointError, match=r"there is no folder .*missing for snapshots in memory"):
        make_run(plait.Plan(), tmp_path / "missing")
    kept[2].close()
    make_run(plait.Plan(), tmp_path)[2].close()


def failing_ranks(folder: Path) -> list[str]:
    """What each rank is told where the second one has no room, and then the first one cannot write."""
    engine, _, snapshots = make_run(DP, folder)
    told = []
    for action in (
        lambda: snapshots.step(1),
        lambda: snapshots.step(1) and snapshots.finish(),
        lambda: snapshots.step(2, {"not JSON": object()} if engine.mesh.rank else {}),
    ):
        try:
            action()
        except CheckpointError as error:
            told.append(str(error))
    snapshots.step(3)
    snapshots.finish()
    found = snapshots.restore()
    snapshots.close()
    return [*told, str(found)]


def test_all_ranks_learn_that_one_has_no_room_or_cannot_write(
    thread_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reserved = os.posix_fallocate, list[int]()

    def reserve(handle: int, start: int, size: int) -> None:
        reserved.append(size)
        if len(reserved) == 3:  # both of the first rank, and then one of the second
            raise OSError(errno.ENOSPC, "no space")
        real(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    one, other = thread_ranks.run(failing_ranks, tmp_path, ranks=2)
    assert one == other
    assert one[0].startswith(
        f"a rank's snapshots take two files of {reserved[2]:,} bytes, and {tmp_path} has"
    )
    assert one[1].startswith("the state to be saved is not what JSON can hold")
    assert one[2] == "Restored(step=3, state={})"
    assert [*tmp_path.iterdir()] == []
