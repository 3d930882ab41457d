"""Sources that a run tokenizes by itself: by one process, also of several that begin at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from plait.data import preparation
from plait.data.token_shards import open_corpus
from plait.errors import DataError
from plait.train.config import Config
from plait.train.prepared_sources import holds_records, is_tokenized, prepared_folder
from plait.train.run_data import check_data, load_data


def make(tmp_path: Path, source: Path, timeout: float = 30) -> Config:
    return Config.model_validate(
        {
            "model": {"context": 8},
            "data": {"source": str(source)},
            "run": {"dir": str(tmp_path / "run"), "timeout": timeout},
        }
    )


def texts(tmp_path: Path, *documents: str) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return path


class Writing:
    """Writes shards in the same process, and counts the preparations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self.count = 0
        monkeypatch.setattr(preparation, "_written", self._written)

    def _written(self, folder: Path, waiting: Any, asked: Any, processes: int) -> Any:
        self.count += 1
        self.begun.set()
        assert self.goes_on.wait(30)
        for number in sorted(waiting):
            yield number, preparation.write_shard(folder, number, waiting[number], asked)


def test_what_is_tokenized_once(tmp_path: Path) -> None:
    assert holds_records(str(texts(tmp_path, "a")))
    chats, other, text = (tmp_path / name for name in ("chats.jsonl", "other.jsonl", "a.txt"))
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    other.write_text('{"body": "a"}\n')
    text.write_text('{"text": "a"}\n')
    assert is_tokenized(str(chats))
    assert holds_records("hf://owner/name")
    assert not any(is_tokenized(str(one)) for one in (other, text, tmp_path, "stdlib", "random"))


def test_json_lines_are_documents_and_tokenized_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(monkeypatch)
    config = make(tmp_path, texts(tmp_path, *["abcdefghi"] * 40))
    check_data(config)
    inputs, targets = load_data(config).training.batch(0, slice(None))
    assert writing.count == 1
    assert isinstance(inputs, dict), "documents are kept apart"
    assert (targets == -100).any()
    texts(tmp_path, *["other text"] * 40)
    load_data(config)
    assert writing.count == 2, "the file has changed"


def test_one_process_tokenizes_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under an external launcher, whose processes all begin at once."""
    writing = Writing(monkeypatch)
    writing.goes_on.clear()
    config = make(tmp_path, source := texts(tmp_path, "a", "b"))
    found: list[Path | None] = []
    ranks = [
        threading.Thread(target=lambda: found.append(prepared_folder(config, str(source)))) for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    assert writing.begun.wait(30)
    writing.goes_on.set()
    for rank in ranks:
        rank.join(30)
    assert (writing.count, len(found), len(set(found))) == (1, 3, 1)
    assert found[0] is not None
    assert open_corpus(found[0])[1].documents == 2


def test_they_do_not_wait_for_one_that_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(monkeypatch)
    writing.goes_on.clear()
    config = make(tmp_path, source := texts(tmp_path, "a"), timeout=1)
    owner = threading.Thread(target=prepared_folder, args=(config, str(source)))
    owner.start()
    assert writing.begun.wait(30)
    match = r"is being prepared by process \d+ on .+, and has written nothing for 1 seconds"
    with pytest.raises(DataError, match=match):
        prepared_folder(config, str(source))
    writing.goes_on.set()
    owner.join(30)
