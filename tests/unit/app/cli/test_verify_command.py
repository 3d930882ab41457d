"""`plait verify`: its options, what it prints, and its exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from parity import huggingface_cases
from plait.app.cli.main import main
from plait.engine import Engine
from plait.errors import CommunicationError, NonFiniteError, PlanError, RankError
from plait.plan.plan import Plan
from plait.schedules.search.schedule_by_policy import POLICY_NAMES
from plait.verification.sweep import RefusedPlan, Sweep

SETTINGS = {
    "model.layers": "1",
    "model.hidden": "8",
    "model.heads": "2",
    "model.context": "8",
    "data.source": "random",
    "train.batch": "4",
    "train.microbatches": "2",
    "run.threads": "1",
    "run.device": "cpu",
}
TINY = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
BATCHES = TINY[2 * 4 :]
"""The settings that are not the model's."""


class Answer:
    """In the place of a report."""

    compared = 1

    def __init__(self, equal: bool) -> None:
        self.equal = equal

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return "EQUAL" if self.equal else "NOT EQUAL"

    def as_json(self) -> dict[str, Any]:
        return {"equal": self.equal}


@pytest.fixture(autouse=True)
def stay() -> Iterator[None]:
    """The command is not the end of this process: its signals stay as they are."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No rank starts; what would be verified."""
    seen: list[dict[str, Any]] = []

    def one(case: Any, plan: Plan, reference: Any, *, threads: int | None) -> Answer:
        seen.append({"options": case.options, "plan": plan, "threads": threads, "case": case})
        return Answer(True)

    def every(case: Any, plan: Plan, ranks: int, *, threads: int | None, report_progress: Any) -> Answer:
        seen.append({"options": case.options, "plan": plan, "threads": threads, "ranks": ranks})
        return Answer(True)

    monkeypatch.setattr("plait.verification.verify.verify_case", one)
    monkeypatch.setattr("plait.verification.verify.verify_all", every)
    return seen


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool | BaseException], None]:
    """Have the verification say equal or not, or fail."""

    def install(result: bool | BaseException) -> None:
        def verify(*_: Any, **__: Any) -> Answer:
            if isinstance(result, BaseException):
                raise result
            return Answer(result)

        monkeypatch.setattr("plait.verification.verify.verify_case", verify)
        monkeypatch.setattr("plait.verification.verify.verify_all", verify)

    return install


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of one rank is a call."""

    def launch(function: Callable[[], Any], *, ranks: int, **_: Any) -> list[Any]:
        assert ranks == 1
        return [function()]

    monkeypatch.setattr("plait.verification.verify.launch", launch)


def forbidden(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("no rank may start")


@pytest.mark.parametrize("options", [[], ["--all"]])
@pytest.mark.parametrize(("equal", "code", "said"), [(True, 0, "EQUAL\n"), (False, 1, "NOT EQUAL\n")])
def test_plait_verify_exits_with_0_if_equal_and_1_if_not(
    options: list[str],
    equal: bool,
    code: int,
    said: str,
    answer: Callable[[bool], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(equal)
    assert main(["verify", *TINY, *options]) == code
    assert capsys.readouterr() == (said, "")


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_plaits_own_models_are_compared_with_those_of_transformers(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model.name", name, "--run.ranks_as", "threads", "--against", "transformers", "--steps", "1"]
    assert main(["verify", *TINY, *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["equal"], said["against"], said["unmatched"]) == (True, "transformers", 0)
    assert said["phases"]["gradient"]["compared"] == {"gpt2": 16, "llama": 12}[name]


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("deepseek-v3", marks=pytest.mark.full)])
def test_sparse_models_in_a_folder_are_compared_with_those_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huggingface_cases.drawn(huggingface_cases.MODELS[name]).float().save_pretrained(tmp_path)
    options = ["--run.ranks_as", "threads", "--against", "transformers", "--steps", "1", "--parallel.tp", "2"]
    assert main(["verify", *BATCHES, "--model.name", str(tmp_path), *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["equal"], said["unmatched"]) == (True, 0)


def test_plait_verify_exits_with_2_where_no_plan_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was compared, so nothing was found to differ."""
    nothing = Sweep(1, ((Plan(), RefusedPlan("no")),))
    monkeypatch.setattr("plait.verification.verify.verify_all", lambda *_, **__: nothing)
    assert main(["verify", *TINY, "--all"]) == 2
    assert capsys.readouterr().out.startswith("NOTHING to compare")


@pytest.mark.parametrize(
    "error",
    [
        PlanError("5 stages need at least 5 layers: give fewer."),
        RankError("rank 1 failed: ValueError: no.", 1, "Trace\n"),
        CommunicationError("rank 0 lost rank 1."),
        NonFiniteError("the loss is nan."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_plait_verify_exits_with_2_on_an_error(
    error: Exception, answer: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answer(error)
    assert main(["verify", *TINY]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"plait: {error}")


@pytest.mark.parametrize("equal", [True, False])
def test_plait_verify_prints_one_json_object(
    equal: bool, answer: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answer(equal)
    assert main(["verify", "--json", *TINY]) == (0 if equal else 1)
    assert json.loads(capsys.readouterr().out) == {"equal": equal}


def test_plait_verify_refuses_wrong_options_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in [
        ("--mode fast", "argument --mode: invalid choice: 'fast'"),
        ("--steps 0", "argument --steps: '0' is not a whole number of at least 1"),
        ("--steps two", "argument --steps: 'two' is not a whole number"),
        ("--ranks -1 --all", "argument --ranks"),
        ("--ranks", "argument --ranks: expected one argument"),
        ("--ranks 2", "--ranks goes with --all: without it the ranks are those of the configuration."),
        ("--against torchtitan", "argument --against: invalid choice"),
        ("--against transformers --all", "--all does not go with --against, which compares one plan"),
        ("--against transformers --mode exact", "--mode does not go with --against"),
        ("--against transformers --model.lora.rank 2", "compares models without adapters"),
        ("--against transformers --model.name llama --model.experts 2", "plait's own llama with experts"),
        ("--mode exact --steps 2", "steps is 2: mode exact takes 1"),
        ("--parallel.tp 3", "model.heads = 4 is not divisible by parallel.tp = 3"),
        ("--model.layerz 1", "did you mean model.layers?"),
        ("--stepz 1", "stepz"),
        ("--config nowhere.toml", "There is no configuration file nowhere.toml"),
        ("--data.source nowhere.txt", "nowhere.txt"),
        ("surplus", "surplus"),
    ]:
        monkeypatch.setattr("plait.verification.verify.launch", forbidden)
        assert main(["verify", *arguments.split()]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("plait: ")
        assert told in err
        assert err.count("\n") == 1


def test_a_wrong_option_of_verify_points_to_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--steps", "0"]) == 2
    assert capsys.readouterr().err.endswith("; see `plait verify --help`.\n")


def test_an_unknown_option_of_verify_points_to_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, remedy in [
        ("--moed native", "did you mean --mode?"),
        ("--step=3", "did you mean --steps?"),
        ("--lr 1e-3", "did you mean --train.lr?"),
        ("--zzzz", "see `plait verify --help`."),
        ("--mode native --train.steps 3 --zzzz 3", "see `plait verify --help`."),
    ]:
        assert main(["verify", *arguments.split()]) == 2
        told = capsys.readouterr().err
        assert told.startswith("plait: --")
        assert told.endswith(f" is not an option of `plait verify`: {remedy}\n")


def test_options_of_plait_verify_are_passed_to_verify(calls: list[dict[str, Any]]) -> None:
    options = ["--mode", "native", "--steps", "3", "--isolate", "--parallel.pp", "2", "--train.seed", "7"]
    assert main(["verify", *options, *TINY]) == 0
    (call,) = calls
    options = call["options"]
    assert (options.mode, options.steps, options.isolate, options.seed) == ("native", 3, True, 7)
    assert (call["plan"].pp, call["plan"].microbatches, call["threads"]) == (2, 2, 1)
    assert len(call["case"].batches) == 3
    assert call["case"].device == "cpu"


@pytest.mark.parametrize(("mode", "steps"), [("float64", 2), ("exact", 1)])
def test_plait_verify_runs_two_steps_or_one_in_exact_mode_by_default(
    mode: str, steps: int, calls: list[dict[str, Any]]
) -> None:
    assert main(["verify", "--mode", mode, *TINY]) == 0
    assert calls[0]["options"].steps == steps


def test_an_option_may_stand_between_those_of_the_configuration(calls: list[dict[str, Any]]) -> None:
    assert main(["verify", "--train.batch=8", "--isolate", "--train.microbatches", "4", *TINY[:8]]) == 0
    assert calls[0]["options"].isolate
    assert calls[0]["plan"].microbatches == 4


@pytest.mark.parametrize(("options", "ranks"), [([], 2), (["--ranks", "6"], 6)])
def test_every_layout_has_the_ranks_of_the_plan_unless_told(
    options: list[str], ranks: int, calls: list[dict[str, Any]]
) -> None:
    assert main(["verify", "--all", *options, "--parallel.dp", "2", *TINY]) == 0
    assert calls[0]["ranks"] == ranks


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--parallel.pp", "2"],
            "parallel.pp = 2 times parallel.dp = 1 times parallel.tp = 1 needs 2 ranks, ",
        ),
        (["--all", "--ranks", "4"], "--ranks 4 needs 4 ranks, "),
    ],
)
def test_plait_verify_refuses_a_launcher_with_another_number_of_ranks(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("plait.verification.verify.launch", forbidden)
    assert main(["verify", *TINY, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"plait: {told}but torchrun started 3")


@pytest.mark.parametrize(("rank", "said"), [("0", "EQUAL\n"), ("1", "")])
def test_under_a_launcher_only_rank_0_of_plait_verify_prints(
    rank: str,
    said: str,
    answer: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    answer(True)
    assert main(["verify", *TINY, "--parallel.pp", "2"]) == 0
    assert capsys.readouterr().out == said


def test_verify_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: plait verify ")
    assert "exit code: 0 equal, 1 different, 2 could not run" in shown
    named = ("--mode", "--steps", "--isolate", "--all", "--ranks", "--json")
    assert [name for name in named if f"\n  {name} " not in shown] == []
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("alone")
def test_plait_verify_of_one_rank_prints_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *TINY]) == 0
    out = capsys.readouterr().out
    assert out.startswith("EQUAL to one rank: ")
    assert "  plan     pp 1 · dp 1 · tp 1, 1f1b; float64, 2 micro-batches, 2 steps, clipped" in out


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_plait_verify_all_on_one_rank_runs_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--all", "--ranks", "1", "--steps", "1", "--parallel.pp", "2", *TINY]) == 0
    out = capsys.readouterr().out
    assert out.startswith("EQUAL to one rank: all 19 plans on 1 rank, ")
    *rows, chunked = [line.partition("  m ")[0].split() for line in out.splitlines()[2:]]
    assert [row[-1] for row in rows] == [name for name in POLICY_NAMES for _ in ("none", "full")]
    assert ["recompute" in row for row in rows] == [False, True] * len(POLICY_NAMES)
    assert "loss" in chunked


@pytest.mark.usefixtures("alone")
def test_plait_verify_prints_a_verification_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", "--mode", "exact", *TINY]) == 0
    read = json.loads(capsys.readouterr().out, parse_constant=forbidden)
    assert (read["equal"], read["mode"], read["steps"], read["first"]) == (True, "exact", 1, None)


@pytest.mark.usefixtures("alone")
def test_plait_verify_exits_with_1_on_a_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Engine.clip_grad_norm_
    monkeypatch.setattr(Engine, "clip_grad_norm_", lambda self, limit, *how: right(self, 2 * limit, *how))
    assert main(["verify", "--steps", "1", *TINY]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NOT EQUAL to one rank: the clip of ")
    assert "likely   all of it is 2 times what it should be" in out


@pytest.mark.full
def test_plait_verify_as_a_process_over_two_ranks_prints_equal() -> None:
    command = [sys.executable, "-m", "plait", "verify", *TINY, "--parallel.pp", "2", "--mode", "exact"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("EQUAL to one rank, bit by bit: ")


@pytest.mark.full
def test_plait_verify_all_as_a_process_verifies_every_layout_of_four_ranks() -> None:
    command = [sys.executable, "-m", "plait", "verify", *TINY, "--all", "--ranks", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    read = json.loads(done.stdout)
    assert read["equal"]
    refused = [plan for plan in read["plans"] if plan["equal"] is None]
    of_stages = [one["plan"] for one in refused if "stages" in one["reason"]]
    of_heads = [one["plan"] for one in refused if "stages" not in one["reason"]]
    assert {plan["pp"] for plan in of_stages} == {4}  # four layers
    by_heads = [
        plan["tp"] * (plan["cp"] if plan["context_parallel"] == "ulysses" else 1) for plan in of_heads
    ]
    assert set(by_heads) == {4}  # two heads


@pytest.mark.full
def test_plait_verify_over_two_ranks_gives_the_same_report_for_processes_and_threads(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reports = []
    for ranks_as in ("processes", "threads"):
        options = ["--json", "--parallel.pp", "2", "--run.ranks_as", ranks_as, "--mode", "exact"]
        assert main(["verify", *options, *TINY]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        reports.append(json.loads(out) | {"seconds": None})
    assert (reports[0]["equal"], reports[0]["mode"]) == (True, "exact")
    assert reports[0]["compared"]
    assert reports[0] == reports[1]
