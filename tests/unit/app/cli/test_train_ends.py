"""However a run of `plait train` ends, it says why and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from plait.ranks.failure.process_watch import SAME_SIGNAL_SECONDS

SETTINGS = {
    "model.layers": "1",
    "model.hidden": "8",
    "model.heads": "2",
    "model.context": "8",
    "train.batch": "4",
    "train.microbatches": "2",
    "train.validate_batches": "1",
    "parallel.pp": "2",
    "run.threads": "1",
    "run.tensorboard": "false",
}


TOO_FAST = {"train.lr": "1e38", "train.warmup": "0"}


def options(folder: Path, **changes: str) -> list[str]:
    settings = {**SETTINGS, "run.dir": str(folder / "run"), **changes}
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    return str(tmp_path / "text.txt")


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that marks all processes of the run, with a folder for temporary files."""
    # Not below tmp_path: the names of sockets have to be short.
    with tempfile.TemporaryDirectory() as folder:
        yield {**os.environ, "TMPDIR": folder, "PLAIT_TEST": str(tmp_path)}
        torchs = ("torchinductor", "torchelastic")
        ours = [path for path in Path(folder).iterdir() if not path.name.startswith(torchs)]
        assert ours == []


def left_running(mark: str) -> list[str]:
    """Processes that carry the mark in their environment."""
    return [words for _, words in running(mark)]


def running(mark: str) -> list[tuple[int, str]]:
    """Their numbers, and what they were started with."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"PLAIT_TEST={mark}".encode() in (entry / "environ").read_bytes():
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(entry.name), words))
        except OSError:
            continue
    return found


WISH = "stops after this step; once more stops at once."


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGTERM, 143, f"plait: SIGTERM: {WISH}", marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 130, f"plait: SIGINT: {WISH}", marks=pytest.mark.full),
    ],
)
def test_a_signal_to_plait_train_finishes_the_step_and_saves_a_checkpoint(
    tmp_path, text, temporary, number, code, said
):
    """The step is finished, and a checkpoint is there, from which the run goes on.

    `test_a_signal_to_the_process_group_finishes_the_step_and_saves_a_checkpoint` shows the same of more
    signals at once.
    """
    process = started(tmp_path, text, temporary)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.strip()) == (code, said)
    assert left_running(str(tmp_path)) == []
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(rows):08d}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "plait: terminated."), (signal.SIGINT, 130, "plait: interrupted.")],
)
def test_a_second_signal_stops_plait_train_at_once(tmp_path, text, temporary, number, code, said):
    """Here the first cannot be heard: a rank is stopped."""
    process = started(tmp_path, text, temporary)
    os.kill(max(pid for pid, _ in running(str(tmp_path))), signal.SIGSTOP)  # ranks are the youngest
    process.send_signal(number)
    time.sleep(2 * SAME_SIGNAL_SECONDS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.strip().splitlines()[-1]) == (code, said)
    assert left_running(str(tmp_path)) == []


@pytest.mark.full
def test_a_signal_to_the_process_group_finishes_the_step_and_saves_a_checkpoint(tmp_path, text, temporary):
    """As `timeout` and services send it: to the command, to its ranks, and to the command once more."""
    process = started(tmp_path, text, temporary)
    os.killpg(process.pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.strip()) == (143, f"plait: SIGTERM: {WISH}")
    assert left_running(str(tmp_path)) == []
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert checkpoint.name == f"step-{len(rows):08d}"


@pytest.mark.full
def test_a_signal_to_torchrun_finishes_the_step_and_saves_a_checkpoint(tmp_path, text, temporary):
    """It hands the signal on to its ranks: they finish the step, and leave a checkpoint."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    program = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "plait"]
    process = started(tmp_path, text, temporary, program)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=40)
    assert process.returncode != 0
    assert "got SIGTERM while it waited" not in errors
    assert left_running(str(tmp_path)) == []
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(rows):08d}"


def started(
    tmp_path: Path,
    text: str,
    environment: dict[str, str],
    program: Sequence[str] = (sys.executable, "-m", "plait"),
    **changes: str,
) -> subprocess.Popen[str]:
    """A run that goes on for long, after its first step."""
    command = [*program, "train", *options(tmp_path, **changes)]
    command += ["--data.source", text, "--train.steps", "1000000"]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(300):
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.1)
    return process


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_elastic_run_goes_on_and_ends_in_order_where_the_process_that_forks_its_ranks_is_killed_or_stopped(
    tmp_path, text, temporary, number
):
    """A rank is killed, too: another process has to fork the one in its place."""
    process = started(tmp_path, text, temporary, **{"run.elastic": "true"})
    before = {pid for pid, words in running(str(tmp_path)) if "forkserver" in words}
    os.kill(min(before), number)
    os.kill(max(before), signal.SIGKILL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert eventually(lambda: len({pid for pid, _ in running(str(tmp_path))} - {process.pid, *before}) >= 2)
    seen = metrics.stat().st_size
    assert eventually(lambda: metrics.stat().st_size > seen + 2000)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.strip().splitlines()[-1]) == (130, f"plait: SIGINT: {WISH}")
    assert "; the ranks go on" in errors
    assert left_running(str(tmp_path)) == []
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(metrics.read_text().splitlines()):08d}"


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, at most a minute; return whether it does."""
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.full
def test_plait_train_leaves_no_process_behind(tmp_path, text, temporary):
    command = [sys.executable, "-m", "plait", "train", *options(tmp_path)]
    command += ["--data.source", text, "--train.steps", "2", "--run.compare", "2"]
    done = subprocess.run(command, env=temporary, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "The first 2 steps match one rank" in done.stdout
    assert left_running(str(tmp_path)) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**TOO_FAST, "train.steps": "3"}, "plait: step 2: the loss is nan on rank 1, stage 1"),
        pytest.param(
            {**TOO_FAST, "train.steps": "1"},
            "plait: step 1: the validation loss is nan",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"parallel.pp": "5"},
            "plait: 5 stages need at least 5 layers, but the model has 4",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_error_of_a_rank_of_plait_train_is_one_sentence(tmp_path, text, temporary, changes, said):
    command = [sys.executable, "-m", "plait", "train", *options(tmp_path, **changes), "--data.source", text]
    done = subprocess.run(command, env=temporary, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert left_running(str(tmp_path)) == []
