"""`plait schedule`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.app.cli.main import main
from plait.schedules.search.schedule_by_policy import POLICY_NAMES, schedule

DEMO = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "4"]


def test_plait_schedule_draws_the_timeline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_plait_schedule_prints_the_schedule_and_its_measures_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_plait_schedule_takes_costs_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    costs = [f"--cost.{kind}=1,1,1,2" for kind in "FIW"]
    assert main(["schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--json", *costs]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 57


def test_plait_schedule_writes_pictures_and_prints_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html, trace, csv = (
        tmp_path / name for name in ("new/demo.svg", "demo.html", "demo.json", "demo.csv")
    )
    files = ["--svg", str(svg), "--html", str(html), "--trace", str(trace), "--csv", str(csv)]
    assert main([*DEMO, *files]) == 0
    written = "".join(f"wrote     {path}\n" for path in (svg, html, trace, csv))
    assert capsys.readouterr().out.endswith(written)
    assert svg.read_text(encoding="utf-8").startswith("<svg ")
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert csv.read_text(encoding="utf-8") == (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    )


def test_with_json_nothing_else_is_printed_when_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "demo.csv"
    assert main([*DEMO, "--json", "--csv", str(csv)]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2
    assert csv.exists()


def test_a_schedule_within_the_memory_limit_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--limit", "2"]) == 0
    assert "peak      2 1" in capsys.readouterr().out


def test_plait_schedule_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ("", "plait schedule needs a POLICY or a CSV file; see `plait schedule --help`."),
        ("1f1b", "the following arguments are required: --ranks, --microbatches; see"),
        (
            "1f1b --ranks 2",
            "the following arguments are required: --microbatches; see `plait schedule --help`.",
        ),
        (
            "1f1b --ranks two --microbatches 4",
            "argument --ranks: 'two' is not a whole number of at least 1; see",
        ),
        ("1f1b --ranks 2.5 --microbatches 4", "'2.5' is not a whole number of at least 1; see"),
        (
            "1f1b --ranks 2 --microbatches 0",
            "argument --microbatches: '0' is not a whole number of at least 1;",
        ),
        ("1f2b --ranks 2 --microbatches 4", "there is no schedule policy '1f2b': did you mean 1f1b?"),
        ("1f2b", "there is no schedule policy '1f2b': did you mean 1f1b?"),
        (
            "1f1b --ranks 2 --microbatches 4 --chunks 2",
            "chunks is 2, but 1f1b takes 1 only: set it to that.",
        ),
        (
            "auto --ranks 4 --microbatches 8 --limit 0.5",
            "limit is 0.5, less than any schedule needs: give at least 1.",
        ),
        ("auto --ranks 2 --microbatches 4 --limit -1", "limit is -1: give the most that a rank may hold"),
        ("auto --ranks 2 --microbatches 4 --limit nan", "argument --limit: 'nan' is not a number; see"),
        ("auto --ranks 2 --microbatches 4 --measure sum", "argument --measure: invalid choice: 'sum'"),
        ("auto --ranks 2 --microbatches 4 --cost.until_W -1", "costs.until_W is -1: give a finite number"),
        (
            "missing.csv",
            "missing.csv cannot be read (No such file or directory): give a CSV file, or a policy.",
        ),
        ("1f1b --compare gpipe --ranks 2 --microbatches 4 --svg x", "--compare writes no files: name one"),
        (
            "--compare 1f1b,1f2b --ranks 2 --microbatches 4",
            "there is no schedule policy '1f2b': did you mean",
        ),
        ("--compare gpipe,1f1b --ranks 4 --microbatches 8 --limit -2", "limit is -2: give the most"),
        ("1f1b --ranks 2 --microbatches 4 --cost.I -1", "costs.I is -1: give a finite number of at least 0."),
        ("1f1b --ranks 2 --microbatches 4 --cost.I nan", "argument --cost.I: 'nan' is not a number; see"),
        (
            "1f1b --ranks 2 --microbatches 4 --cost.I 1,2,3",
            "costs.I has 3 values, but the schedule has 2 stages",
        ),
        ("1f1b --ranks 2 --microbatches 4 --rank 3", "unrecognized arguments: --rank 3; see"),
    ]:
        assert main(["schedule", *arguments.split()]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("plait: ")
        assert message in err
        assert err.count("\n") == 1


def test_a_schedule_above_the_memory_limit_is_refused_showing_the_action(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["schedule", "gpipe", "--ranks", "2", "--microbatches", "4", "--limit", "3.5"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "plait: rule 'memory limit' is broken on rank 0 by 0F3: with it the rank holds 4, above the limit of "
        "3.5.\n\n"
        "rank 0   0F0   0F1   0F2  [0F3]   .     .    0B0   0B1   0B2   0B3\n"
        "rank 1    .    1F0   1F1   1F2   1F3   1B0   1B1   1B2   1B3    .\n"
    )


def test_a_picture_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DEMO, "--svg", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"plait: {tmp_path} cannot be written (Is a directory): give another file.\n"
    )


def test_no_picture_of_a_schedule_above_the_limit_is_written(tmp_path: Path) -> None:
    assert main([*DEMO, "--limit", "1", "--svg", str(tmp_path / "demo.svg")]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_plait_schedule_draws_every_policy(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", policy, "--ranks", "2", "--microbatches", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(policy)
    assert ("\nbound " in shown) == (policy == "auto")


def test_auto_prints_the_chosen_policy_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "auto", "--ranks", "2", "--microbatches", "3", "--chunks", "1", "--limit", "2"]
    assert main(arguments) == 0
    assert "bound     10: no makespan within the limit is shorter\n" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["policy"], told["makespan"], told["bound"]) == ("auto (linear)", 10, 10)


def test_auto_prints_how_far_the_schedule_is_from_the_bound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.schedules.search.auto_search.EXACT_SIZE", 0)
    monkeypatch.setattr("plait.schedules.search.auto_search.BUDGET", 20_000)
    arguments = ["schedule", "auto", "--ranks", "3", "--microbatches", "4", "--chunks", "1", "--limit", "2"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["makespan"] > told["bound"]
    assert main(arguments) == 0
    above = told["makespan"] / told["bound"] - 1
    shown = capsys.readouterr().out
    assert f"bound     {told['bound']:g}: no makespan within the limit is below it;" in shown
    assert f"this one is {above:.2%} above\n" in shown


def test_a_schedule_csv_is_read_checked_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    assert main(["schedule", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: told[name] for name in ("policy", "ranks", "microbatches", "chunks", "makespan")} == {
        "policy": str(path),
        "ranks": 2,
        "microbatches": 2,
        "chunks": 1,
        "makespan": 9,
    }


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("0F0,xx\n", "", "line 1, column 2"),
        ("0F0,0B0\n", "--ranks 2", "has ranks = 1, but --ranks is 2: leave it out."),
        ("0B0,0F0\n", "", "rule 'forward, input, weights' is broken on rank 0 by 0B0"),
        ("0F0,0B0\n", "--limit 0.5", "rule 'memory limit' is broken on rank 0 by 0F0"),
    ],
)
def test_a_malformed_or_contradicting_schedule_csv_is_refused(
    text: str, options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert main(["schedule", str(path), *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


COMPARE = ["schedule", "--compare", "gpipe,1f1b,zb-h1", "--ranks", "4", "--microbatches", "8"]


def test_compare_prints_a_table_of_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--limit", "4"]) == 0
    assert capsys.readouterr().out == (
        "policy  chunks  makespan  span  bubble  of span  peak  × best\n"
        "1f1b         1        33    33   27.3%    27.3%     4    1.22\n"
        "zb-h1        1        27    27   11.1%    11.1%     4    1.00\n"
        "\n"
        "gpipe: rule 'memory limit' is broken on rank 0 by 0F4: "
        "with it the rank holds 5, above the limit of 4.\n"
    )


def test_compare_prints_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--limit", "4", "--json"]) == 0
    gpipe, one_f_one_b, _ = json.loads(capsys.readouterr().out)
    assert gpipe["policy"] == "gpipe"
    assert gpipe["error"].startswith("rule 'memory limit'")
    assert one_f_one_b["makespan"] == 33


def test_schedule_help_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--help"]) == 0
    shown = capsys.readouterr().out
    options = ("--cost.F", "--cost.until_W", "--cost.comm", "--limit", "--measure", "--compare", "--json")
    assert [option for option in options if option not in shown] == []
