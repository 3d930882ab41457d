"""Runs under the launchers themselves; each is skipped where its launcher is not installed."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
HERE = Path(__file__).parent
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
MPICH = ("mpirun.mpich",)
SLURM = ("srun", "-N2", "--overcommit")


def needed(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Block until `condition` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


def start(command: Sequence[str], script: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, sys.executable, str(HERE / script), *map(str, arguments)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    """The exit code of a launcher, and what its ranks have written."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate(timeout=20)
        pytest.fail(f"the run did not end within {timeout} s:\n{output}\n{errors}")
    return process.returncode, output, errors


def torchrun(*options: object) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--no-python", *map(str, options)]


@pytest.mark.parametrize("command", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_two_launches_at_once_do_not_join_each_others_group(command: tuple[str, ...]) -> None:
    needed(command[0])
    runs = [start((*command, "-n", "2"), "summing.py", number) for number in (1, 100)]
    for process, total in zip(runs, (2.0, 200.0), strict=True):
        code, output, errors = finished(process)
        assert (code, output.count(f"sums [{total}, {total}]")) == (0, 2), output + errors


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables for a Slurm of two nodes on this machine."""
    for program in ("srun", "slurmctld", "slurmd", "munged"):
        needed(program)
    if os.getuid() != 0:
        pytest.skip("only root starts a Slurm")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    try:
        subprocess.run([HERE / "slurm", "start", folder], check=True, timeout=60)
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([HERE / "slurm", "stop", folder], check=False, timeout=20)


@pytest.mark.parametrize("plugin", ["none", "pmi2"])
def test_slurm_runs_ranks_on_two_nodes(slurm: dict[str, str], plugin: str) -> None:
    command = (*SLURM, "-n4", f"--mpi={plugin}")
    code, output, errors = finished(start(command, "summing.py", 1, MASTER_ADDR="127.0.0.1", **slurm))
    assert (code, output.count("sums [4.0, 4.0, 4.0, 4.0]")) == (0, 4), output + errors


def test_a_node_of_slurm_without_an_address_is_named(slurm: dict[str, str]) -> None:
    code, _, errors = finished(start((*SLURM, "-n2"), "summing.py", 1, **slurm))
    assert code != 0
    assert "the host of rank 0, n1, has no address on" in errors
    assert "frame #" not in errors


def supervised(slurm: dict[str, str], folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start a supervisor of elastic ranks on each of two nodes."""
    options = ("-n2", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0")
    script = "../hosts/elastic_training.py"
    place = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return start((*SLURM, *options), script, folder, "--ranks", 4, *words, **place, **slurm)


def test_a_rank_of_one_node_of_slurm_is_replaced(slurm: dict[str, str], tmp_path: Path) -> None:
    code, output, errors = finished(supervised(slurm, tmp_path / "run", "--kill", 2, 5))
    assert (code, output.count("[4, 4, 4, 4]")) == (0, 2), errors
    assert "rank 2 of host 1 was killed by SIGKILL" in errors
    assert "after step 5" in output


def test_a_node_of_slurm_goes_on_when_the_task_of_the_other_is_killed(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """Slurm leaves the other task alone, and returns the exit code of the one that was killed."""
    folder = tmp_path / "run"
    process = supervised(slurm, folder, "--seconds", 0.3)
    wait_for(lambda: (folder / "done").exists() and int((folder / "done").read_text() or 0) >= 4, "no step")
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            of_second = b"SLURM_PROCID=1" in (path / "environ").read_bytes().split(b"\0")
            if of_second and str(folder).encode() in (path / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(path.name), signal.SIGKILL)
    code, output, errors = finished(process)
    assert (code, "[2, 2]" in output) == (137, True), errors
    assert "host 1 is gone" in errors
    assert len(losses_of(folder)) >= 12


def test_a_run_goes_on_when_the_daemon_of_a_node_of_slurm_is_killed(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    folder, state = tmp_path / "run", Path(slurm["SLURM_CONF"]).parent
    process = supervised(slurm, folder, "--seconds", 0.5)
    wait_for(lambda: (folder / "done").exists() and int((folder / "done").read_text() or 0) >= 2, "no step")
    daemon = state / "n2.pid"
    os.kill(int(daemon.read_text()), signal.SIGKILL)
    daemon.unlink()
    code, output, errors = finished(process)
    subprocess.run(["slurmd", "-N", "n2", "-f", slurm["SLURM_CONF"]], check=True, timeout=20)
    wait_for(daemon.exists, "the daemon is not back")  # the end of the fixture kills it by this file
    assert (code, output.count("[4, 4, 4, 4]")) == (0, 2), errors


def test_torchrun_restarts_until_the_run_has_ended_with_the_same_loss(tmp_path: Path) -> None:
    last: list[str] = []
    for kills in (0, 3):
        command = torchrun("--nproc-per-node", 2, "--master-port", free_port(), "--max-restarts", kills)
        code, output, errors = finished(start(command, "mortal_run.py", tmp_path / str(kills), 5, kills))
        assert code == 0, errors
        assert f"after {kills} restarts" in output
        last.append(output.partition("The last loss is ")[2].partition(" ")[0])
    assert last[0] == last[1] != ""


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ranks_that_torchrun_restarts_go_on_from_memory_and_read_no_checkpoint(tmp_path: Path) -> None:
    """Both ranks are killed, one in each attempt: the losses are those of the run that lost no rank."""
    before = {*Path("/dev/shm").glob("plait-*")}
    for kind, killed in {"undisturbed": "", "same": "3,5", "other": "2,5", "disk": "3,5"}.items():
        restarts = ("--max-restarts", killed.count(",") + bool(killed))
        command = torchrun("--nproc-per-node", 2, "--master-port", free_port(), *restarts)
        process = start(
            command, "mortal_snapshots.py", tmp_path / kind, killed, *[kind] * (kind in ("other", "disk"))
        )
        code, output, errors = finished(process)
        assert code == 0, output + errors
        ended = json.loads(output.splitlines()[-1])
        assert ended["restarts"] == str(restarts[1])
        assert (ended["opened"] == [0, 0]) == (kind != "disk"), "this run counts what it reads"
        assert output.count("Resumed from memory") == (restarts[1] if kind in ("same", "other") else 0)
    whole = losses_of(tmp_path / "undisturbed")
    assert len(whole) == 8
    assert losses_of(tmp_path / "same") == losses_of(tmp_path / "disk") == whole
    assert losses_of(tmp_path / "other") == pytest.approx(whole, rel=1e-12)
    assert {*Path("/dev/shm").glob("plait-*")} <= before


def test_ranks_of_two_restarted_hosts_agree_on_the_attempt(tmp_path: Path) -> None:
    """Each agent counts only the restarts that its own ranks have caused: here one each, of two."""
    options = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--max-restarts", 2)
    command = torchrun(*options, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    hosts = [start(command, "mortal_run.py", tmp_path / "run", 4, 2) for _ in range(2)]
    ended = [finished(process) for process in hosts]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "after 1 restarts" in "".join(output for _, output, _ in ended)


def test_workers_of_ray_train_call_launch(tmp_path: Path) -> None:
    """They have joined a world of Ray's: the losses are those of ranks that plait starts."""
    pytest.importorskip("ray")
    import plait

    code, output, errors = finished(start([], "ray_train.py", tmp_path / "losses"))
    assert code == 0, output + errors
    expected = plait.launch(runpy.run_path(str(HERE / "ray_train.py"))["train"], ranks=4)
    assert json.loads((tmp_path / "losses").read_text()) == expected
