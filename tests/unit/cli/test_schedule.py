"""`plait schedule`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.schedules.policies import schedule

DEMO = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "4"]


def test_draws_the_timeline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(DEMO) == 0
    assert capsys.readouterr().out == (
        "1f1b: 2 ranks, 4 micro-batches\n"
        "\n"
        "rank 0  F0 F1 ······B0--- F2 B1--- F3 B2--- ···B3---\n"
        "rank 1  ···F0 B0--- F1 B1--- F2 B2--- F3 B3--- ······\n"
        "        0              5              10             15\n"
        "        F forward, B backward, · idle\n"
        "\n"
        "makespan  15 (span of the longest rank: 15)\n"
        "bubble    20.0% (20.0% of the span)\n"
        "peak      2 1 activations per rank, in micro-batches\n"
    )


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*DEMO, "--json", "--cost.F", "1", "--cost.I=2", "--cost.W", "0.5", "--cost.comm", ".25"]) == 0
    )
    made = schedule("1f1b", ranks=2, microbatches=4)
    assert json.loads(capsys.readouterr().out) == {
        "policy": "1f1b",
        "ranks": 2,
        "chunks": 1,
        "microbatches": 4,
        "makespan": 4 * 3.5 + 3.5 + 2 * 0.25 * 2,
        "span": 18.5,
        "bubble": 9 / 37,
        "bubble_span": 9 / 37,
        "peak": [2, 1],
        "order": [list(rank) for rank in made.order],
        "rank_of": [0, 1],
    }


def test_costs_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    costs = [f"--cost.{kind}=1,1,1,2" for kind in "FIW"]
    assert main(["schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--json", *costs]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 57


def test_writes_files_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, csv = tmp_path / "new" / "demo.svg", tmp_path / "demo.csv"
    assert main([*DEMO, "--svg", str(svg), "--csv", str(csv)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote     {svg}\nwrote     {csv}\n")
    assert svg.read_text(encoding="utf-8").startswith("<svg ")
    assert csv.read_text(encoding="utf-8") == (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    )


def test_json_stays_alone_when_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "demo.csv"
    assert main([*DEMO, "--json", "--csv", str(csv)]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2
    assert csv.exists()


def test_a_limit_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--limit", "2"]) == 0
    assert "peak      2 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: POLICY, --ranks, --microbatches; see"),
        (
            "1f1b --ranks 2",
            "the following arguments are required: --microbatches; see `plait schedule --help`.",
        ),
        ("1f1b --ranks two --microbatches 4", "argument --ranks: 'two' is no number; see"),
        ("1f1b --ranks 2.5 --microbatches 4", "'2.5' is no whole number of at least 1; see"),
        ("1f1b --ranks 2 --microbatches 0", "argument --microbatches: '0' is no whole number of at least 1;"),
        ("1f2b --ranks 2 --microbatches 4", "there is no schedule policy '1f2b': did you mean 1f1b?"),
        ("zb-h1 --ranks 2 --microbatches 4", "the policy zb-h1 is not available yet: choose gpipe or 1f1b."),
        ("auto --ranks 2 --microbatches 4", "the policy auto is not available yet: choose gpipe or 1f1b."),
        ("1f1b --ranks 2 --microbatches 4 --chunks 2", "--chunks 2 is not available yet: set it to 1."),
        (
            "1f1b --ranks 2 --microbatches 4 --html x",
            "--html is not available yet: write an SVG with --svg FILE.",
        ),
        ("1f1b --ranks 2 --microbatches 4 --trace x", "--trace is not available yet: "),
        ("1f1b --ranks 2 --microbatches 4 --cost.I -1", "costs.I is -1: give a finite number of at least 0."),
        ("1f1b --ranks 2 --microbatches 4 --cost.I nan", "argument --cost.I: 'nan' is no number; see"),
        (
            "1f1b --ranks 2 --microbatches 4 --cost.I 1,2,3",
            "costs.I has 3 values, but the schedule has 2 stages",
        ),
        ("1f1b --ranks 2 --microbatches 4 --rank 3", "unrecognized arguments: --rank 3; see"),
        (
            "gpipe --ranks 2 --microbatches 4 --limit 3.5",
            "rank 0 holds up to 4 activations, above the limit of 3.5: raise --limit, or choose",
        ),
    ],
)
def test_refusals_are_one_sentence(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("plait: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--svg", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"plait: {tmp_path} cannot be written (Is a directory): give another file.\n"
    )


def test_nothing_is_written_above_the_limit(tmp_path: Path) -> None:
    assert main([*DEMO, "--limit", "1", "--svg", str(tmp_path / "demo.svg")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--help"]) == 0
    shown = capsys.readouterr().out
    options = ("--cost.F", "--cost.I", "--cost.W", "--cost.comm", "--limit", "--json", "--svg", "--csv")
    assert [option for option in options if option not in shown] == []


def test_runs_without_torch() -> None:
    script = (
        "import sys\nfrom plait.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert 'torch' not in sys.modules, 'torch was imported'\nsys.exit(code)"
    )
    command = [sys.executable, "-c", script, *DEMO, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
