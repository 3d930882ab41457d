"""benchmarks/gpu on CPUs: what its ranks answer, and what becomes of ranks that hang or fail.

The only tests of this folder that need no option: they keep the benchmark fit to be run where there are GPUs.
"""

from __future__ import annotations

import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmark_modules import find_modules_of
from plait.plan.plan import Plan

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
RANK = """
import json, os, sys, time

def say(**said):
    os.write(int(sys.argv[2]), (json.dumps(said) + "\\n").encode())

say(ready=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _modules_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    find_modules_of(FOLDER, monkeypatch)


def small_work() -> Any:
    return import_module("work").Work(2, 32, 2, vocab=128, context=32, rows=2, microbatches=2)


def answered(contestants: list[dict[str, Any]], orders: list[str]) -> list[list[dict[str, Any]]]:
    """What one rank of each contestant answers."""
    work = small_work()
    return [list(import_module("rank").answers(one, work, "cpu", 30.0, orders)) for one in contestants]


@pytest.mark.full
def test_contestants_answer_and_make_rows(rank_pool: Any, tmp_path: Path) -> None:
    measuring, configurations = import_module("measuring"), import_module("configurations")
    one = configurations.Configuration("dp 2", 2, {"dp": 2}, "DDP")
    sides = [{"plan": one.plan}, {"peer": one.peer}]
    ranks = rank_pool.run(answered, sides, ["memory", "steps 2"], ranks=2)
    (ours, ours_taken), (theirs, theirs_taken) = (
        ([rank[side][1] for rank in ranks], [rank[side][2] for rank in ranks]) for side in (0, 1)
    )
    memory = measuring.memory_row(one, ours, theirs)
    assert memory.ratio == pytest.approx(1, abs=0.01)
    assert memory.notes.startswith("DDP takes ")
    work = small_work()
    settings = measuring.Measuring(work, "cpu", "H100", 1, 2, 0, 30.0, 1, tmp_path)
    seconds = [[max(rank["seconds"] for rank in taken)] for taken in (ours_taken, theirs_taken)]
    losses = [(ours_taken[0]["loss"], theirs_taken[1]["loss"])]
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-4)
    speed = measuring.speed_row(one, settings, *seconds, losses)
    assert speed.ratio == seconds[1][0] / seconds[0][0]
    assert speed.plait == f"{2 * work.tokens / seconds[0][0]:,.0f} tokens/s"
    assert "MFU 0% and 0%; losses within" in speed.notes
    for other in (1.01, math.nan):
        unlike = measuring.speed_row(one, settings, *seconds, [(1.0, other)])
        assert unlike.notes.startswith(f"LOSSES DIFFER: 1 and {other}; each turn")


@pytest.mark.parametrize(
    ("code", "fate", "line"),
    [
        ("time.sleep(60)", "no answer", "no answer within 0.2 s"),
        (
            "if os.environ['RANK'] == '0': say(error='waits\\nin vain', kind='CommunicationError')\n"
            "else: time.sleep(0.1); say(error='out of\\n\\nmemory', kind='Error')\n"
            "time.sleep(60)",
            "error",
            "rank 1: Error: memory",
        ),
        (
            "if os.environ['RANK'] == '0': time.sleep(60)\n"
            "print('plait: rank 1 waits for 1F0.\\nFile x', flush=True); os._exit(1)",
            "error",
            "rank 1 ended without an answer: plait: rank 1 waits for 1F0.",
        ),
        (
            "if os.environ['RANK'] == '1': time.sleep(0.1); os.kill(os.getpid(), 9)\n"
            "say(error='closed by peer', kind='CommunicationError'); time.sleep(60)",
            "error",
            "rank 1 was ended by signal 9: nothing was said",
        ),
    ],
    ids=["hangs", "fails", "ends", "is killed"],
)
def test_a_contestant_without_a_result_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, fate: str, line: str
) -> None:
    contestants = import_module("contestants")
    monkeypatch.setattr(contestants, "GRACE", 0.2)
    command = [sys.executable, "-S", "-E", "-c", RANK + code]
    with contestants.Contestant(command, 2, 30.0, tmp_path / "log") as ranks:
        assert [answer["ready"] for answer in ranks.answers()] == [True, True]
        ranks._timeout = 0.2 if fate == "no answer" else 30.0
        with pytest.raises(contestants.NoResultError) as raised:
            ranks.ask("steps 1")
    assert (raised.value.fate, raised.value.line) == (fate, line)
    assert all(process.poll() is not None for process in ranks._processes)


def test_every_plan_is_one_for_its_ranks() -> None:
    module, peers = import_module("configurations"), import_module("peers").PEERS
    work = import_module("work").WORKS["1.3B"]
    for count, ranks in ((1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)):
        assert module.ranks_of(count) == ranks
        names = [one.name for one in module.configurations(ranks)]
        assert len(set(names)) == len(names)
        for one in module.configurations(ranks):
            plan: Plan = import_module("woven").plan_of(work, one.ranks, one.plan)
            assert plan.world == one.ranks
            assert one.ranks in (1, ranks)
            assert plan.dp * plan.microbatches == one.ranks * work.microbatches
            assert one.peer is None or one.peer in peers


@pytest.mark.parametrize(
    ("child", "fate", "notes"),
    [
        ("", "passed", "3 s"),
        ('<failure message="AssertionError: a&#10;off by | one" />', "failed", "off by / one"),
        ('<skipped message="needs 2 GPUs, and there are 1" />', "skipped", "needs 2 GPUs, and there are 1"),
    ],
)
def test_a_marked_test_becomes_a_row(
    monkeypatch: pytest.MonkeyPatch, child: str, fate: str, notes: str
) -> None:
    tests = import_module("marked_tests")

    def run(command: list[str], *_: object) -> tuple[int, str]:
        case = ElementTree.fromstring(f'<s><testcase time="3.2">{child}</testcase></s>')
        ElementTree.ElementTree(case).write(command[command.index("--junitxml") + 1])
        return 0, ""

    monkeypatch.setattr(tests, "run", run)
    row = tests.outcome("tests/gpu/test_parity.py::test_every_gradient[tp 2]", [], "cpu", 2, 1.0)
    assert str(row) == f"| tests | parity: every gradient [tp 2] |  | {fate} |  |  | {notes} |"


def test_a_marked_test_that_hangs_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = import_module("marked_tests")
    monkeypatch.setattr(tests, "PYTEST", [sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)"])
    assert [row.plait for row in tests.rows("cpu", 2, 0.1)] == ["no answer"]
    assert tests.outcome("a::test_b", [], "cpu", 2, 0.1).notes == "no answer within 0.1 s"


def test_gpus_that_are_not_wanted_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = import_module("marked_tests").visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible("cuda", 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert visible("cuda", 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert visible("cpu", 2) == {}


def test_the_report_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on two GPUs, of which nothing is asked here."""
    run, report = import_module("run"), import_module("report")
    for module in (run, report):
        monkeypatch.setattr(module, "default_device", lambda: torch.device("cuda"))
        monkeypatch.setattr(module, "name_of", lambda device: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(module, "total_memory", lambda device: 85 * 10**9)
    monkeypatch.setattr(run, "visible_accelerators", lambda: 2)
    monkeypatch.setattr(report, "accelerator_versions", lambda: {"driver": "550.54", "NCCL": "2.21.5"})
    rows = [report.Row("tests", "one", None, "passed"), report.Row("tests", "other", None, "no answer")]
    asked: list[Any] = []
    monkeypatch.setattr(run.marked_tests, "rows", lambda *given: asked.append(given) or iter(rows))
    monkeypatch.setattr(run.Measuring, "rows", lambda *given: asked.append(given[1].ranks) or iter(()))
    path = tmp_path / "report.md"
    assert run.main(["--output", str(path), "--timeout", "7"]) == 1
    text = capsys.readouterr().out
    assert path.read_text() == text
    assert "- Device: 2 × NVIDIA H100 80GB HBM3, 79.2 GiB" in text
    assert "- Versions: driver 550.54, NCCL 2.21.5, torch " in text
    assert "GPT-2 of 1,347.0 M parameters" in text
    assert text.endswith("| tests | one |  | passed |  |  |  |\n| tests | other |  | no answer |  |  |  |\n")
    assert asked[0] == ("cuda", 2, 7.0, 1)
    assert asked[1:] == [1, 1, 1, *[2] * 8]


@pytest.mark.parametrize(("giga", "name"), [(141, "1.3B"), (80, "1.3B"), (48, "0.37B"), (16, "0.14B")])
def test_the_benchmark_chooses_the_largest_model_that_fits_the_gpu(giga: int, name: str) -> None:
    assert import_module("work").fitting(giga * 1e9) == name
