"""The `plait` command: what it prints, its exit codes, and that it starts without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

import pytest

from plait.app.cli import main as module
from plait.app.cli.main import main
from plait.app.cli.ranks_and_signals import degrees
from plait.errors import NonFiniteError, RankError
from plait.plan.plan import Plan


@pytest.fixture
def break_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Put a command `broken` in place that raises the given error."""

    def install(error: BaseException) -> None:
        def run(argv: list[str]) -> NoReturn:
            raise error

        broken = ModuleType("plait.app.cli.broken")
        vars(broken)["run"] = run
        monkeypatch.setitem(sys.modules, broken.__name__, broken)
        monkeypatch.setattr(module, "COMMANDS", {"broken": "fails"})

    return install


def test_a_wrong_option_or_file_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ("train --train.steps abc", 'train.steps is "abc" (from the command line): give a whole number'),
        ("train --train.stepz 3", "did you mean train.steps?"),
        ("train --train.microbatches 0", "train.microbatches is 0"),
        ("train --config nowhere.toml", "There is no configuration file nowhere.toml"),
        ("train --model.hidden 100 --model.heads 3", "set model.hidden to 99 or 102"),
        ("train --parallel.tp 3", "model.heads = 4 is not divisible by parallel.tp = 3: set parallel.tp to"),
        ("trian", '"trian" is not a command: did you mean train?'),
        ("zzz", '"zzz" is not a command: see `plait --help` for all commands.'),
    ]:
        assert main(arguments.split()) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("plait: ")
        assert message in err
        assert err.count("\n") == 1


def test_an_error_of_the_run_is_one_sentence(
    break_command: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    break_command(NonFiniteError("the loss of step 3 is nan: lower train.lr."))
    assert main(["broken"]) == 2
    assert capsys.readouterr().err == "plait: the loss of step 3 is nan: lower train.lr.\n"


@pytest.mark.parametrize(
    "message", ["rank 1 failed: ValueError: no.", "rank 1 failed: ValueError: no.\n\nTrace\n"]
)
def test_a_failed_rank_shows_its_traceback_once(
    message: str, break_command: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    break_command(RankError(message, 1, "Trace\n"))
    assert main(["broken"]) == 1
    assert capsys.readouterr().err == "plait: rank 1 failed: ValueError: no.\n\nTrace\n"


def test_ctrl_c_prints_no_traceback(
    break_command: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    break_command(KeyboardInterrupt())
    assert main(["broken"]) == 130
    assert capsys.readouterr().err == "plait: interrupted.\n"


def test_an_unexpected_exception_keeps_its_traceback(break_command: Callable[[BaseException], None]) -> None:
    break_command(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["broken"])


def test_plait_prints_its_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plait ")


def test_a_launcher_must_start_as_many_ranks_as_the_degrees_ask_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--parallel.pp", "2"]) == 2
    assert capsys.readouterr().err == (
        "plait: parallel.pp = 2 times parallel.dp = 1 times parallel.tp = 1 needs 2 ranks, "
        "but torchrun started 3: start 2, or change the degrees.\n"
    )


def test_the_degrees_of_an_error_name_context_parallelism_where_there_is_some() -> None:
    assert degrees(Plan(pp=2)) == "parallel.pp = 2 times parallel.dp = 1 times parallel.tp = 1"
    assert degrees(Plan(cp=2)) == (
        "parallel.pp = 1 times parallel.dp = 1 times parallel.cp = 2 times parallel.tp = 1"
    )


def test_plait_shows_help_and_refuses_options_without_importing_torch() -> None:
    codes = {"--help": 0, "train --help": 0, "train --train.steps 0": 2, "plan --ranks 2": 2, "zzz": 2}
    codes |= {"verify --help": 0, "verify --steps 0": 2, "verify --train.steps abc": 2}
    codes |= {"schedule 1f1b --ranks 2 --microbatches 4 --json": 0}
    script = (
        "import sys\nfrom plait.app.cli.main import main\n"
        "for line in sys.argv[1:]:\n    print('exits with', main(line.split()))\n"
        "    assert 'torch' not in sys.modules, f'{line} imported torch'"
    )
    command = [sys.executable, "-c", script, *codes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    exits = [line for line in done.stdout.splitlines() if line.startswith("exits with")]
    assert exits == [f"exits with {code}" for code in codes.values()]
    assert "Traceback" not in done.stderr
