"""Sources that a run tokenizes by itself: by one process, also of several that begin at once."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mutated_files import ELSEWHERE
from plait.app.config.config import Config
from plait.app.data import preparation
from plait.app.data.corpus_manifest import read_index, write_index
from plait.app.data.preparation import prepare_corpus
from plait.app.data.token_shards import open_corpus
from plait.app.data.tokenizer_json import files_hash
from plait.app.train import data_sources as prepared_sources
from plait.app.train.data_sources import holds_records, is_tokenized, prepared_folder
from plait.app.train.run_data import check_data, load_data
from plait.app.train.trained_model import TOKENIZER, trained_tokenizer
from plait.checkpoint.manifest import Manifest
from plait.errors import CheckpointError, ConfigError, DataError
from plait.files import MOST_BYTES


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


def test_sources_of_records_are_tokenized_before_the_run_and_text_files_are_not(tmp_path: Path) -> None:
    assert holds_records(str(texts(tmp_path, "a")))
    chats, other, text = (tmp_path / name for name in ("chats.jsonl", "other.jsonl", "a.txt"))
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    other.write_text('{"body": "a"}\n')
    text.write_text('{"text": "a"}\n')
    assert is_tokenized(str(chats))
    assert holds_records("hf://owner/name")
    assert not any(is_tokenized(str(one)) for one in (text, "stdlib", "random"))
    (rows := tmp_path / "rows").mkdir()
    with gzip.open(rows / "a.json.gz", "wt") as file:
        file.write('[{"text": "a"}]')
    assert is_tokenized(str(rows))
    (rows / "a.py").write_text("")
    assert not is_tokenized(str(rows)), "a program may have such files"
    assert is_tokenized(str(rows / "*.json.gz"))
    shutil.rmtree(rows)
    other.write_text('{"dialogue": []}\n')
    for source in (other, tmp_path):
        with pytest.raises(DataError, match="has rows of dialogue, and of none of the fields that are"):
            is_tokenized(str(source))


def test_json_lines_in_a_folder_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(monkeypatch)
    folder = tmp_path / "texts"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "from JSON"}\n')
    (text := folder / os.fsdecode(b"b\xe9.txt")).write_text("from a file")  # a name that is no UTF-8
    config = make(tmp_path, folder)
    found = prepared_folder(config, str(folder))
    assert found is not None
    assert bytes(open_corpus(found)[0].read(0, 20).tolist()) == b"from JSONfrom a file"
    text.write_text("other text")
    prepared_folder(config, str(folder))
    assert writing.count == 2, "a file has changed"


def test_a_run_uses_the_tokenizer_of_its_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Path
) -> None:
    Writing(monkeypatch)
    (source := tmp_path / "texts.txt").write_text("a b c " * 200)
    corpus = tmp_path / "corpus"
    prepare_corpus([str(source)], corpus, str(word_tokenizer))
    other = json.loads(word_tokenizer.read_text().replace('"a"', '"d"'))
    word_tokenizer.unlink()
    config = make(tmp_path, corpus)
    data = load_data(config)
    assert config.tokenizer == str(corpus / "tokenizer")
    assert (data.tokenizer.decode([1, 2]), data.vocab, data.unreadable) == ("a b", 4, "")
    assert "(tokenizer.json)" in data.summary
    with pytest.raises(
        ConfigError, match=r"with tokenizer\.json .vocabulary 4.* given is bytes .vocabulary 256"
    ):
        load_data(with_tokenizer(config, "bytes"))
    word_tokenizer.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="gives its tokens other numbers: leave"):
        load_data(with_tokenizer(config, str(word_tokenizer)))
    own = json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())
    word_tokenizer.write_text(json.dumps({**own, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ConfigError, match="divides texts into tokens by other rules: leave"):
        load_data(with_tokenizer(config, str(word_tokenizer)))
    shutil.rmtree(corpus / "tokenizer")
    with pytest.raises(DataError, match="has not the files of the tokenizer that were written: repeat its"):
        load_data(config)
    write_index(corpus, replace(read_index(corpus), tokenizer_hash=""))  # as an earlier version did
    assert "set data.tokenizer to the corpus's own" in load_data(config).unreadable


def test_a_corpus_with_other_tokens_than_the_model_in_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Path
) -> None:
    Writing(monkeypatch)
    (source := tmp_path / "texts.txt").write_text("a b c " * 200)
    for name, tokenizer in (("words", str(word_tokenizer)), ("characters", "bytes")):
        prepare_corpus([str(source)], tmp_path / name, tokenizer)
    (folder := tmp_path / "model").mkdir()

    def opened(corpus: str, tokenizer: str | None = None) -> None:
        config = make(tmp_path, tmp_path / corpus)
        model = config.model.model_copy(update={"name": str(folder), "vocab": 300})
        data = config.data.model_copy(update={"tokenizer": tokenizer})
        load_data(config.model_copy(update={"model": model, "data": data}))

    opened("words")  # a model without a tokenizer
    own = json.loads(word_tokenizer.read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**own, "normalizer": {"type": "Lowercase"}}))
    opened("words")  # whose tokens have the same numbers
    own["model"]["vocab"] |= {"a": 2, "b": 1}
    (folder / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(
        ConfigError, match=r"words was prepared with a tokenizer that gives '[ab]' the number"
    ):
        opened("words")
    with pytest.raises(
        ConfigError, match=r"characters was prepared with bytes as tokens, unlike that of the"
    ):
        opened("characters")
    opened("words", str(tmp_path / "words" / "tokenizer"))


def test_an_export_finds_the_tokenizer_of_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Path
) -> None:
    Writing(monkeypatch)
    (source := tmp_path / "texts.txt").write_text("a b")
    prepare_corpus([str(source)], tmp_path / "corpus", str(word_tokenizer), end="c")
    config = make(tmp_path, tmp_path / "corpus")
    state = {"config": json.loads(config.model_dump_json())}
    state[TOKENIZER] = files_hash(str(tmp_path / "corpus" / "tokenizer"))
    files = {"tokenizer.json": tmp_path / "corpus" / "tokenizer" / "tokenizer.json"}
    assert trained_tokenizer(Manifest({}, (), state=state)) == (files, 3, "")
    shutil.rmtree(tmp_path / "corpus")
    assert trained_tokenizer(Manifest({}, (), state=state)) == ({}, None, "")
    assert trained_tokenizer(Manifest({}, ())) == ({}, None, "")


@pytest.mark.parametrize("tokenizer", [ELSEWHERE, "{}/../{}/secret.json", "{}/link", "{}/folder", "{}/large"])
def test_a_file_that_somebody_else_s_checkpoint_names_is_no_tokenizer(tmp_path: Path, tokenizer: str) -> None:
    for name in ("secret.json", "folder/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("secret")
    (tmp_path / "link").symlink_to("secret.json")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(MOST_BYTES + 1)  # refused, whatever it holds
    named = tokenizer.format(tmp_path, tmp_path.name)
    for known in ({}, {TOKENIZER: ""}, {TOKENIZER: "0" * 16}, {TOKENIZER: None}):
        state = {"config": {"data": {"tokenizer": named}}, **known}
        files, end, note = trained_tokenizer(Manifest({}, (), state=state))
        assert (files, end) == ({}, None)
        assert f"names {named}, and holds no hash" in note


def test_a_configuration_in_a_checkpoint_that_is_none_is_refused() -> None:
    for data in ({"tokenizer": 3}, {"source": None}, {"mixture": "a"}):
        with pytest.raises(CheckpointError, match="holds no configuration of a run"):
            trained_tokenizer(Manifest({}, (), state={"config": {"data": data}}))


def with_tokenizer(config: Config, tokenizer: str) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})


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


def test_a_tokenizer_that_has_changed_tokenizes_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Path
) -> None:
    writing, source = Writing(monkeypatch), texts(tmp_path, "a", "b")
    config = with_tokenizer(make(tmp_path, source), str(word_tokenizer))
    for content in (None, "{% for m in messages %}{% endfor %}"):
        if content is not None:
            (tmp_path / "chat_template.jinja").write_text(content)
        for _ in range(2):
            prepared_folder(config, str(source))
    assert writing.count == 2, "once for each state of the files"


def test_one_process_tokenizes_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under an external launcher, whose processes all begin at once."""
    writing = Writing(monkeypatch)
    writing.goes_on.clear()
    config = make(tmp_path, source := texts(tmp_path, "aa", "bb"))
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


def test_processes_wait_for_the_tokenizing_one_as_long_as_run_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one that writes nothing; see `test_folder_lock`."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(prepared_sources, "prepare_corpus", lambda *_, **options: asked.update(options))
    prepared_folder(make(tmp_path, source := texts(tmp_path, "a"), timeout=7), str(source))
    assert asked["patience"] == 7
