"""The command line of a run without secrets, its commit, and how busy processors are."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from plait.app.loop.describe_run import command_line, commit_of
from plait.app.loop.report_callback import ProcessorUse


def test_a_command_line_is_shown_without_secrets() -> None:
    for given, shown in [
        ("/a/b/plait train --train.steps 3", "plait train --train.steps 3"),
        ("x --hf-token abc --train.lr 1", "x --hf-token … --train.lr 1"),
        ("x --api_key=abc HF_TOKEN=def", "x --api_key=… HF_TOKEN=…"),
        ("x --apiKey abc --password abc -db-passwd abc", "x --apiKey … --password … -db-passwd …"),
        ("x --verbose-token --steps 3", "x --verbose-token --steps 3"),
        ("x --train.sample_tokens 9 --data.tokenizer t", "x --train.sample_tokens 9 --data.tokenizer t"),
        ("x --url https://me:abc@host/a", "x --url https://…@host/a"),
        ("x --keep_every 5 --author me", "x --keep_every 5 --author me"),
        ("", ""),
    ]:
        assert shlex.split(command_line(given.split())) == (shown.split() or [""])


def test_the_commit_of_a_folder_is_that_of_git(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (tmp_path / "inner").mkdir()
    assert commit_of(tmp_path) == commit_of(tmp_path / "inner") == head
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert commit_of(tmp_path) == head
    subprocess.run([*git, "worktree", "add", "-q", "--detach", str(tmp_path / "tree")], check=True)
    assert commit_of(tmp_path / "tree") == head
    (tmp_path / ".git" / "HEAD").write_text("<script>")
    assert commit_of(tmp_path) == ""


def test_the_busy_share_of_processors_is_measured_between_two_readings(tmp_path: Path) -> None:
    counts = tmp_path / "stat"
    counts.write_text("cpu 100 0 100 700 100 0 0 0 50 0\ncpu0 1\n")
    use = ProcessorUse(counts)
    assert use.share() is None, "no time has passed"
    counts.write_text("cpu 130 0 100 760 110 0 0 0 50 0\n")
    assert use.share() == 0.3
    counts.unlink()
    assert use.share() is None
    assert use.share() is None
