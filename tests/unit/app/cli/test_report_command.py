from __future__ import annotations

from pathlib import Path

import pytest

from plait.app.cli.main import main


def test_report_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.html'}\n"
    both = tmp_path / "both.html"
    assert main(["report", str(tmp_path), str(tmp_path / "metrics.jsonl"), "--out", str(both)]) == 0
    assert both.read_text().count("<section class=run>") == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "metrics.csv", "linked.html"])
def test_a_file_of_the_run_is_not_replaced_by_the_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.5\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "linked.html").symlink_to("metrics.jsonl")
    before = (tmp_path / name).read_text()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name} is a file of the run" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == before


def test_report_refuses_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in [
        ([], "the following arguments are required: RUN; see `plait report --help`."),
        (["nowhere"], "nowhere does not exist: give the folder of a run (its run.dir)."),
        (["."], ". has no metrics.jsonl: give the folder of a run (its run.dir) that has done a step."),
        (["nowhere", "--watch"], "nowhere does not exist: give the folder of a run (its run.dir)."),
        (["a", "--port", "7000"], "--port goes with --watch: add that, or leave --port out."),
        (["a", "--watch", "--out", "x.html"], "--out does not go with --watch, which serves the page"),
        (["a", "--port", "70000"], "argument --port: 70000 is not a port: give one below 65536; see"),
    ]:
        monkeypatch.chdir(tmp_path)
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"plait: {told}")
        assert error.count("\n") == 1
