"""`plait data`: what it says about a corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity import chats
from plait.app.cli.data import run
from plait.errors import ConfigError


def prepared(source: Path, tokenizer: str) -> Path:
    run(["prepare", str(source), str(source.parent / "out"), "--tokenizer", tokenizer, "--processes", "1"])
    return source.parent / "out"


def test_data_prepare_prints_counts_and_the_end_of_document_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word_tokenizer: Path
) -> None:
    (tmp_path / "a.txt").write_text("a b c")
    (word_tokenizer.parent / "tokenizer_config.json").write_text('{"eos_token": "c"}')
    folder = prepared(tmp_path / "a.txt", str(word_tokenizer))
    out = capsys.readouterr().out
    assert "1 document, 3 tokens in 1 shard." in out
    assert "\nEnd of a document: c\n" in out
    run(["inspect", str(folder)])
    assert "document 0, 3 tokens: 'a b c'" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"the tokenizer given is bytes .* leave --tokenizer out"):
        run(["inspect", str(folder), "--tokenizer", "bytes"])
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "b", "add_bos_token": True}
    (word_tokenizer.parent / "tokenizer_config.json").write_text(json.dumps(written))
    run(["prepare", str(tmp_path / "a.txt"), str(tmp_path / "three"), "--tokenizer", str(word_tokenizer)])
    assert "Beginning of a document: none (tokenizer_config.json has add_bos_token" in capsys.readouterr().out
    run(["prepare", str(tmp_path / "a.txt"), str(tmp_path / "two"), "--tokenizer", "bytes"])
    assert "End of a document: none (bytes have no token for it)" in capsys.readouterr().out


@pytest.mark.transformers
def test_data_inspect_marks_answers_and_roles_of_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    (tokenizer := tmp_path / "tokenizer").mkdir()
    chats.save_tokenizer(tokenizer)
    talks = [[("guest", "ab"), ("assistant", "cd")], [("user", "a"), ("bot", "b")]]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(tmp_path / "a.jsonl", str(tokenizer))
    capsys.readouterr()
    run(["inspect", str(folder)])
    out = capsys.readouterr().out
    assert "2 conversations, " in out
    assert "3 of them in answers; 1 without an answer (no answers to plait: the roles 'bot')" in out
    assert "[user]" in out
    assert "[assistant]⟦" in out.replace(" ", "")
    assert "<end>⟧'" in out
