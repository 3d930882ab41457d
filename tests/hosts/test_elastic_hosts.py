"""Elastic ranks of several hosts: a rank is killed, a host vanishes or is cut off, and the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import plait

from . import elastic_training
from .network import Host, hosts, why_not
from .test_hosts import losses, wait_for

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]

LIMIT = 30.0
SECONDS = 0.3
"""Of a step, where a host is to be lost while the run goes on."""
Losses = Callable[[int], list[float]]


def supervisor(host: Host, number: int, of: int, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the supervisor of a host, as a launcher that sets torchrun's variables."""
    variables = {"RANK": number, "WORLD_SIZE": of, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place = {"MASTER_ADDR": "host-0", "MASTER_PORT": 29511, "OMP_NUM_THREADS": 1}
    program = (sys.executable, elastic_training.__file__, folder, "--limit", str(LIMIT), *words)
    given = (f"{name}={value}" for name, value in (variables | place).items())
    return host.start_program("env", "--unset", "GLOO_SOCKET_IFNAME", *given, *program)


def supervisors(machines: Sequence[Host], folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    started = []
    for number, host in enumerate(machines):
        started.append(supervisor(host, number, len(machines), folder, *words))
        time.sleep(0.05)  # else the processes might have one number and one time of start on both
    return started


def end_of(process: subprocess.Popen[str], seconds: float = 120.0) -> tuple[int, str, str]:
    """Wait for the end of a supervisor; return its exit code and what it has printed."""
    output, errors = process.communicate(timeout=seconds)
    return process.returncode, output, errors


def generations(folder: Path) -> list[dict[str, Any]]:
    """Return where each rank has begun in each generation, in order of time."""
    lines = [line for path in folder.glob("generations-*") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda line: float(line["at"]))


def wait_for_step(folder: Path, step: int) -> None:
    path = folder / "done"
    wait_for(lambda: path.exists() and int(path.read_text() or 0) >= step, f"no step {step}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of the same run to which nothing happens, on so many ranks of this host."""

    @cache
    def run(ranks: int) -> list[float]:
        folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
        plait.launch(elastic_training.train, folder, ranks=ranks, device="cpu", elastic=True)
        return losses(folder)

    return run


def test_a_rank_killed_on_one_host_is_replaced_and_all_other_processes_on_both_go_on(
    tmp_path: Path, undisturbed: Losses
) -> None:
    """The same bits, and no file of a checkpoint is opened."""
    folder = tmp_path / "run"
    with hosts(2, tmp_path) as machines:
        started = supervisors(machines, folder, "--ranks", "4", "--kill", "3", "7")
        ends = [end_of(process) for process in started]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all("[4, 4, 4, 4]" in output for _, output, _ in ends)
    assert "rank 3 of host 1 was killed by SIGKILL" in ends[0][2]
    told = generations(folder)
    begins = [one["begins_after"] for one in told]
    # The snapshot after step 7 may not be complete when the rank is killed.
    assert begins in ([0] * 4 + [7] * 4, [0] * 4 + [6] * 4)
    assert not any(one["checkpoints_read"] for one in told)
    before, after = ({one["rank"]: one["process"] for one in told[start : start + 4]} for start in (0, 4))
    assert [before[rank] == after[rank] for rank in range(4)] == [True, True, True, False]
    assert losses(folder) == undisturbed(4)


@pytest.mark.parametrize("how", ["vanish", "unplug"])
def test_a_host_goes_on_alone_from_its_copy_of_what_the_lost_one_held(
    tmp_path: Path, undisturbed: Losses, how: str
) -> None:
    """On two ranks in place of four; the host that was cut off does not go on, and ends."""
    folder = tmp_path / "run"
    with hosts(2, tmp_path) as machines:
        started = supervisors(machines, folder, "--ranks", "4", "--seconds", str(SECONDS))
        wait_for_step(folder, 4)
        getattr(machines[1], how)()
        code, output, errors = end_of(started[0])
        assert (code, output.splitlines()[-1]) == (0, "[2, 2]"), errors
        assert "host 1 is gone" in errors
        code, _, errors = end_of(started[1], 2 * LIMIT)
        if how == "unplug":
            assert code == 1
            assert "no majority of the 2 hosts of the last world" in errors
    told = generations(folder)
    last = [one for one in told if one["ranks"] == 2]
    assert len(last) == 2
    assert last[0]["begins_after"] >= 3, "the snapshot before the last one of step 4 or later"
    assert not last[0]["checkpoints_read"]
    processes = {one["process"] for one in told[:4]}
    assert {one["process"] for one in last} <= processes, "they went on in the same processes"
    assert losses(folder) == pytest.approx(undisturbed(4), rel=1e-12)


def test_two_of_three_hosts_go_on_when_the_first_vanishes_with_the_store(
    tmp_path: Path, undisturbed: Losses
) -> None:
    folder = tmp_path / "run"
    with hosts(3, tmp_path) as machines:
        started = supervisors(machines, folder, "--ranks", "3", "--seconds", str(SECONDS))
        wait_for_step(folder, 4)
        machines[0].vanish()
        for process in started[1:]:
            code, output, errors = end_of(process)
            assert (code, output.splitlines()[-1]) == (0, "[2, 2]"), errors
        started[0].communicate()
    assert losses(folder) == pytest.approx(undisturbed(3), rel=1e-12)


def test_a_host_that_vanished_comes_back_with_empty_memory_and_the_run_has_all_ranks_again(
    tmp_path: Path, undisturbed: Losses
) -> None:
    folder, words = tmp_path / "run", ("--ranks", "4", "--seconds", str(SECONDS), "--whole-at", "9")
    with hosts(2, tmp_path) as machines:
        started = supervisors(machines, folder, *words)
        wait_for_step(folder, 4)
        machines[1].vanish()
        started[1].communicate()
        wait_for(lambda: generations(folder)[-1]["ranks"] == 2, "the first host does not go on")
        machines[1].start()
        again = supervisor(machines[1], 1, 2, folder, *words)
        ends = [end_of(process) for process in (started[0], again)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all(output.splitlines()[-1] == "[4, 4, 4, 4]" for _, output, _ in ends)
    told = generations(folder)
    assert [one["ranks"] for one in told] == [4] * 4 + [2] * 2 + [4] * 4
    assert not any(one["checkpoints_read"] for one in told)
    assert losses(folder) == pytest.approx(undisturbed(4), rel=1e-12)


def test_a_host_that_comes_back_is_taken_in_after_a_step_and_no_step_is_computed_again(
    tmp_path: Path, undisturbed: Losses
) -> None:
    """With `Elastic(replace="later")`."""
    folder = tmp_path / "run"
    words = ("--ranks", "4", "--seconds", str(SECONDS), "--whole-at", "9", "--later")
    with hosts(2, tmp_path) as machines:
        started = supervisors(machines, folder, *words)
        wait_for_step(folder, 4)
        machines[1].vanish()
        started[1].communicate()
        wait_for(lambda: generations(folder)[-1]["ranks"] == 2, "the first host does not go on")
        machines[1].start()
        again = supervisor(machines[1], 1, 2, folder, *words)
        ends = [end_of(process) for process in (started[0], again)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "the run goes on with 4 ranks in place of 2" in ends[0][2]
    told = generations(folder)
    assert [one["ranks"] for one in told] == [4] * 4 + [2] * 2 + [4] * 4
    steps = [int(line) for line in (folder / "steps").read_text().split()]
    went_on_after = told[4]["begins_after"]
    assert steps[went_on_after - elastic_training.STEPS :] == [*range(went_on_after, elastic_training.STEPS)]
    assert told[6]["begins_after"] > went_on_after
    assert not any(one["checkpoints_read"] for one in told)
    assert losses(folder) == pytest.approx(undisturbed(4), rel=1e-12)


def test_the_first_host_vanishes_with_the_store_and_finds_the_others_when_it_comes_back(
    tmp_path: Path, undisturbed: Losses
) -> None:
    """They have met at the second host meanwhile, and each host knows the names of all."""
    folder = tmp_path / "run"
    words = ("--ranks", "3", "--seconds", str(SECONDS), "--whole-at", "9", "--hosts")
    with hosts(3, tmp_path) as machines:
        words = (*words, *(machine.name for machine in machines))
        started = supervisors(machines, folder, *words)
        wait_for_step(folder, 4)
        machines[0].vanish()
        started[0].communicate()
        wait_for(lambda: generations(folder)[-1]["ranks"] == 2, "the others do not go on")
        machines[0].start()
        again = supervisor(machines[0], 0, 3, folder, *words)
        ends = [end_of(process) for process in (*started[1:], again)]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert all(output.splitlines()[-1] == "[3, 3, 3]" for _, output, _ in ends)
    told = generations(folder)
    assert [one["ranks"] for one in told] == [3] * 3 + [2] * 2 + [3] * 3
    assert losses(folder) == pytest.approx(undisturbed(3), rel=1e-12)


def test_a_host_that_was_cut_off_for_a_while_comes_back_with_its_processes(
    tmp_path: Path, undisturbed: Losses
) -> None:
    folder, words = tmp_path / "run", ("--ranks", "4", "--seconds", str(SECONDS), "--whole-at", "9")
    with hosts(2, tmp_path) as machines:
        started = supervisors(machines, folder, *words)
        wait_for_step(folder, 4)
        machines[1].unplug()
        wait_for(lambda: generations(folder)[-1]["ranks"] == 2, "the first host does not go on")
        machines[1].plug_in()
        ends = [end_of(process) for process in started]
    assert [code for code, _, _ in ends] == [0, 0], ends
    told = generations(folder)
    assert [one["ranks"] for one in told] == [4] * 4 + [2] * 2 + [4] * 4
    assert losses(folder) == pytest.approx(undisturbed(4), rel=1e-12)
