"""The scripts in examples/roads go from what a user brings to a trained model, with ranks as threads."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import tokenize
import warnings
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.app.cli.main import main

ROADS = Path(__file__).parent.parent / "examples" / "roads"
RECORDER = """#!/bin/sh
for argument in "$@"; do printf '%s\\037' "$argument"; done >> commands
printf '\\n' >> commands
"""
LAYOUT_OF_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@pytest.fixture(scope="module")
def stand_ins() -> dict[str, Any]:
    return runpy.run_path(str(ROADS / "stand_ins.py"))


def commands_of(script: str, folder: Path, *options: str) -> list[list[str]]:
    """The arguments of each `plait` that a script calls, with ranks as threads."""
    recorder = folder / "bin" / "plait"
    recorder.parent.mkdir()
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    path = f"{recorder.parent}:{os.environ['PATH']}"
    given = ["--run.ranks_as", "threads", "--run.tensorboard", "false", *options]
    subprocess.run(["sh", ROADS / script, *given], cwd=folder, env={"PATH": path}, check=True)
    return [line.split("\037")[:-1] for line in (folder / "commands").read_text().splitlines()]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.transformers
@pytest.mark.parametrize("steps", [(4, 6), pytest.param((40, 60), marks=pytest.mark.full)], ids=str)
def test_pretraining_from_texts_resumes_on_other_ranks_and_exports_to_transformers(
    stand_ins: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    steps: tuple[int, int],
) -> None:
    """From texts, over four ranks and on over two others, to a folder that transformers loads."""
    import transformers

    stand_ins["write_texts"](tmp_path / "texts", files=8)
    monkeypatch.chdir(tmp_path)
    prepare, first, second, export = commands_of("pretraining.sh", tmp_path)
    second += ["--train.sample_tokens", "8"]
    first += ["--train.steps", str(steps[0]), "--train.validate_every", str(steps[0] // 2)]
    second += ["--train.steps", str(steps[1]), "--train.validate_every", str(steps[0] // 2)]
    for command in (prepare, first, second, export):
        assert main(command) == 0
    assert f"Resumed from runs/latest/checkpoints/step-{steps[0]:08}" in capsys.readouterr().out
    found = rows(tmp_path / "runs" / "latest")
    assert [row["step"] for row in found] == list(range(1, steps[1] + 1))
    validated = [row["validation_loss"] for row in found if "validation_loss" in row]
    assert len(validated) == 3
    assert validated[2] < validated[1] < validated[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.config.vocab_size == 256


@pytest.mark.full
@pytest.mark.transformers
def test_fine_tuning_on_conversations_learns_the_answers_and_exports_a_peft_adapter(
    stand_ins: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """From conversations and a model to one that knows the answers, and to an adapter that peft loads."""
    import peft
    import transformers

    stand_ins["write_model"](tmp_path / "model", stand_ins["write_chats"](tmp_path / "chats.jsonl"))
    monkeypatch.chdir(tmp_path)
    tune, export, adapt, export_adapter = commands_of("fine_tuning.sh", tmp_path)
    for command in (tune, export, [*adapt, "--train.steps", "3"], export_adapter):
        assert main(command) == 0
    printed = capsys.readouterr().out
    assert "What is the capital of Norway?\nIt is Oslo." in printed
    assert "133,440 parameters, of which 8,192 are trained" in printed
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    question = [{"role": "user", "content": "What is the capital of Norway?"}]
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's, about a name in transformers
        adapted = peft.PeftModel.from_pretrained(tuned, "adapter")
    for model in (tuned, adapted):
        answer = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == "It is Oslo.<|end|>"


@pytest.mark.full
def test_a_research_script_of_25_lines_trains_a_model_of_its_own() -> None:
    """Layers, dataset and loop of one's own, in 25 lines."""
    found = runpy.run_path(str(ROADS / "research.py"))
    losses = plait.launch(found["train"], 30, ranks=found["PLAN"].world, ranks_as="threads")
    assert len(set(losses)) == 1
    assert losses[0] < 1.5  # a uniform guess of eight has 2.08
    assert lines_of_code(ROADS / "research.py") <= 25


def lines_of_code(path: Path) -> int:
    """The lines of a file without comments, its docstring, and empty ones."""
    with path.open() as file:
        tokens = [one for one in tokenize.generate_tokens(file.readline) if one.type not in LAYOUT_OF_TOKENS]
    lines = {line for one in tokens[:-1] for line in range(one.start[0], one.end[0] + 1)}
    docstring = ast.parse(path.read_text()).body[0]
    assert docstring.end_lineno is not None
    return len(lines - set(range(docstring.lineno, docstring.end_lineno + 1)))
