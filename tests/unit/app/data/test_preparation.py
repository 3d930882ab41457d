"""Corpora that are prepared: what is read, where documents end, and that interrupted work goes on."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import in_one_process

from plait.app.cli.data import run
from plait.app.data import preparation
from plait.app.data.document_sources import SourceRange, divided, field_names, files_of, read_texts
from plait.app.data.preparation import PreparationProgress, portion_size, prepare_corpus
from plait.app.data.preparation_folder import locked_preparation
from plait.app.data.token_shards import Corpus, TokenShard, corpus_of, open_corpus
from plait.errors import ConfigError, DataError


def documents_in(folder: Path) -> list[str]:
    corpus, index = open_corpus(folder)
    found, first = [], 0
    for _ in range(index.documents):
        length = corpus.document_length(first)
        found.append(bytes(corpus.read(first, length).tolist()).decode())
        first += length
    assert first == len(corpus) == index.tokens
    return found


def as_jsonl(documents: list[str]) -> str:
    return "".join(json.dumps({"text": one}) + "\n" for one in documents)


@pytest.mark.parametrize("portion", [7, 1000])
def test_data_prepare_reads_each_kind_of_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    written = in_one_process(monkeypatch)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a first one.txt").write_text("")
    (texts / "a.txt").write_text("first\nof two lines\n")
    (texts / "b.JSONL").write_text(as_jsonl(["second", "", "thïrd\nline"]))
    with gzip.open(texts / "c.jsonl.Gz", "wt") as file:
        file.write(as_jsonl(["fourth"]))
    (texts / "d.txt").write_text("no line end")
    told: list[Any] = []
    given = [str(texts)], tmp_path / "out", "bytes"
    index = prepare_corpus(*given, portion=portion, report=lambda done, total: told.append((done, total)))
    assert [done.size for done, _ in told] == sorted(done.size for done, _ in told)
    size = sum(file.size for file in files_of(str(texts)))
    assert told[0] == (PreparationProgress(0, 0, 0), size)
    assert told[-1] == (PreparationProgress(size, index.documents, index.tokens), size)
    assert len(told) == len(index.shards) + 1
    assert not list((tmp_path / "out").glob("*.counts.json"))
    expected = ["first\nof two lines\n", "second", "thïrd\nline", "fourth", "no line end"]
    assert documents_in(tmp_path / "out") == expected
    assert (index.documents, index.end, index.dtype) == (5, None, "uint16")
    assert written == list(range(len(index.shards))), "each shard once"
    assert (len(written) == 1) == (portion == 1000)


@pytest.mark.parametrize("portion", [1, 5, 64])
def test_with_lines_each_line_of_a_text_is_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    in_one_process(monkeypatch)
    monkeypatch.setattr("plait.app.data.json_records._START", 2)
    (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo and more\nthree")
    prepare_corpus([str(tmp_path / "a.txt")], tmp_path / "out", "bytes", portion=portion, lines=True)
    assert documents_in(tmp_path / "out") == ["one", "two and more", "three"]


def test_options_and_folders_that_do_not_fit_the_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text(as_jsonl(["second"]))
    with pytest.raises(ConfigError, match="--column 'x': the sources are text, without fields"):
        prepare_corpus([str(tmp_path / "a.txt")], tmp_path / "out", "bytes", column="x")
    with pytest.raises(ConfigError, match="--lines: the sources hold rows, each a document already"):
        prepare_corpus([str(tmp_path / "b.jsonl")], tmp_path / "out", "bytes", lines=True)
    with pytest.raises(ConfigError, match=r"out lies in the source .*: choose a folder outside of it"):
        run(["prepare", str(tmp_path), str(tmp_path / "out"), "--tokenizer", "bytes"])


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("ab\n\r éß漢😀"), min_size=1, max_size=60),
    size=st.integers(1, 40),
    part=st.integers(1, 20),
    compressed=st.booleans(),
)
def test_a_text_read_in_chunks_is_the_text(
    tmp_path_factory: Any, text: str, size: int, part: int, compressed: bool
) -> None:
    """Wherever portions and parts are cut; the document ends once."""
    path = tmp_path_factory.mktemp("texts") / ("a.txt.gz" if compressed else "a.txt")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.app.data.text_files.PART", part)
        patch.setattr("plait.app.data.token_safe_cuts._LONGEST_LINE", 8)
        portions = [one for file in files_of(str(path)) for one in divided(file, size)]
        parts = [one for portion in portions for one in read_texts(portion, "text")]
    assert "".join(one.text for one in parts) == text
    assert [one.ends for one in parts] == [False] * (len(parts) - 1) + [True]
    assert [one.begins for one in parts] == [True] + [False] * (len(parts) - 1)
    assert all(len(one.text) <= part for one in parts)


@pytest.mark.parametrize(("total", "size"), [(10, 1 << 20), (100 << 20, 100 << 14), (1 << 40, 1 << 26)])
def test_token_shards_of_a_small_corpus_are_small(total: int, size: int) -> None:
    """So that each process has work, and the last one of a large corpus is not long."""
    assert portion_size(total) == size


def test_the_kind_of_a_source_file_follows_from_its_suffix(tmp_path: Path) -> None:
    rows = '[{"text": "a"}]'
    for name in ("a.txt", "b.jsonl", "c.NDJSON", "e.json", "f.py"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "d.ndjson.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "g.json").write_text(rows)

    def kinds(source: str, **options: bool) -> dict[str, str]:
        return {Path(one.path).name: one.kind for one in files_of(str(tmp_path / source), **options)}

    whole = {"a.txt": "text", "b.jsonl": "jsonl", "c.NDJSON": "jsonl", "d.ndjson.gz": "jsonl"}
    rest = {"e.json": "text", "f.py": "text", "g.json": "text"}
    assert kinds(".") == whole | rest, "beside texts a .json is one"
    assert kinds("rows") == {"g.json": "json"}
    assert kinds("*.json") == {"e.json": "json"}
    assert kinds("e.json") == {"e.json": "json"}
    assert kinds("e.json", lines=True) == {"e.json": "lines"}
    assert kinds("?.*", lines=True)["b.jsonl"] == "jsonl"
    (file,) = files_of(str(tmp_path / "b.jsonl"))
    ranges = [(one.begin, one.end, one.size) for one in divided(file, 6)]
    assert ranges == [(0, 6, 6), (6, 12, 6), (12, 15, 3)]
    assert field_names(files_of(str(tmp_path / "a.txt"))[0]) == []
    assert field_names(files_of(str(tmp_path / "rows"))[0]) == ["text"]
    (zipped,) = files_of(str(tmp_path / "d.ndjson.gz"))
    assert [(one.begin, one.end) for one in divided(zipped, 6)] == [(0, zipped.size)]


def test_document_numbers_span_token_shards_with_and_without_documents() -> None:
    shards = [
        TokenShard(np.arange(3), np.array([2])),
        TokenShard(np.arange(3, 5), None, np.array([1, 0], dtype=np.uint8)),
        TokenShard(np.arange(5, 9), np.array([1, 4]), None, np.array([0, 2], dtype=np.uint32)),
    ]
    corpus = Corpus(shards)
    assert (len(corpus), corpus.document_count) == (9, 4)
    assert corpus.document_ends(0, 4).tolist() == [2, 5, 6, 9]
    assert corpus.document_ends(1, 3).tolist() == [5, 6]
    assert corpus.first_answers(0, 4).tolist() == [1, 1, 0, 2]
    assert corpus.read(2, 4).tolist() == [2, 3, 4, 5]
    assert corpus.answers(3, 2).tolist() == [True, False]  # type: ignore[union-attr]
    assert corpus.answers(5, 4) is None
    assert corpus.read(4, 0).tolist() == corpus.document_ends(2, 2).tolist() == []
    assert [corpus.document_length(first) for first in range(9)] == [2, 1, 4, 3, 2, 1, 3, 2, 1]
    assert corpus.documents(5, 4).tolist() == [0, 1, 1, 1]
    assert corpus_of(np.arange(3)).documents(1, 2).tolist() == [0, 0]
    assert corpus_of(np.arange(3)).document_length(1) == 2


def test_shards_are_filled_with_portions_in_order() -> None:
    portions = [
        SourceRange(str(number), "text", 0, size, size) for number, size in enumerate([3, 3, 3, 5, 1, 9, 1])
    ]
    shards = preparation._shards(portions, 6)
    assert [[one.size for one in shard] for shard in shards] == [[3, 3], [3], [5, 1], [9], [1]]
    assert [*itertools.chain(*shards)] == portions


def test_only_one_command_prepares_a_folder_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is refused, and the first one goes on; see `locked_preparation`."""
    in_one_process(monkeypatch)
    (tmp_path / "a.txt").write_text("text")
    arguments = [str(tmp_path / "a.txt")], tmp_path / "out", "bytes"

    def second(done: Any, total: int) -> None:
        with pytest.raises(DataError, match="out is being prepared by process"):
            prepare_corpus(*arguments)

    assert prepare_corpus(*arguments, report=second).documents == 1


@given(
    shards=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 3)), min_size=1, max_size=5
    ),
    window=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_a_corpus_gives_the_document_numbers_of_any_window(shards: Any, window: tuple[int, int]) -> None:
    """Of documents of some lengths in each shard, the last of which goes on in the next one."""
    made, lengths, carried = [], [], 0
    for own, rest in shards:
        ends = np.cumsum(np.array(own, dtype=np.int64))
        size = int(sum(own)) + rest
        made.append(TokenShard(np.arange(size), ends))
        lengths += [own[0] + carried, *own[1:]] if own else []
        carried = rest if own else carried + rest
    tokens = [number for number, length in enumerate([*lengths, carried]) for _ in range(length)]
    corpus = Corpus(made)
    first = min(window[0], len(tokens))
    count = min(window[1], len(tokens) - first)
    found, expected = corpus.documents(first, count).tolist(), tokens[first : first + count]
    assert [a != b for a, b in itertools.pairwise(found)] == [a != b for a, b in itertools.pairwise(expected)]
    assert len(corpus.read(first, count)) == len(found) == count


def test_the_end_token_follows_each_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Path
) -> None:
    in_one_process(monkeypatch)
    (tmp_path / "a.jsonl").write_text(as_jsonl(["a b", "c"]))
    sources = [str(tmp_path / "a.jsonl")]
    index = prepare_corpus(sources, tmp_path / "out", str(word_tokenizer), end="b")
    corpus, _ = open_corpus(tmp_path / "out")
    assert (index.end, corpus.read(0, 9).tolist()) == (2, [1, 2, 3, 2]), "once where the text has it"
    (word_tokenizer.parent / "tokenizer_config.json").write_text('{"eos_token": {"content": "c"}}')
    assert prepare_corpus(sources, tmp_path / "two", str(word_tokenizer.parent)).end == 3
    assert prepare_corpus(sources, tmp_path / "three", str(word_tokenizer), end="").end is None
    with pytest.raises(ConfigError, match="'x', which is to end each document, is no token"):
        prepare_corpus(sources, tmp_path / "four", str(word_tokenizer), end="x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "is no UTF-8 text at byte 0:"),
        ("a.txt", b"a longer text \xff", "is no UTF-8 text at byte 14:"),
        ("a.jsonl", b'{"text": "a"}\nnothing\n', r"a\.jsonl:2 is no JSON object"),
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            "has rows of body, and of none of the fields that are read: messages",
        ),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": 5}\n',
            r"a\.jsonl:2 has a 'text' that is 5, and no text",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"id": 5}\n',
            r"a\.jsonl:2 has no text 'text' .it has: id",
        ),
        ("a.json", b'[{"text": "a"}, 3]', "has an element 1 that is no JSON object"),
        ("a.json", b'[{"text": "a"},', r"a\.json is no JSON"),
        ("a.json", b'[{"chosen": [], "rejected": []}]', "in a loop of your own, with plait.dpo_loss"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, message: str
) -> None:
    in_one_process(monkeypatch)
    monkeypatch.setattr("plait.app.data.text_files.PART", 4)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_corpus([str(tmp_path / name)], tmp_path / "out", "bytes")
    if name == "a.txt":
        (tmp_path / name).write_bytes(b"fine\n" + content)
        with pytest.raises(DataError, match=f"is no UTF-8 text at byte {5 + content.index(255)}:"):
            prepare_corpus([str(tmp_path / name)], tmp_path / "lines", "bytes", lines=True)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.jsonl",
            b'{"text": "half \\ud83d", "\\udc00": 1}\n{"text": "bad \xed\xa0\xbd"}\n',
            ["half \ufffd", "bad \ufffd"],
        ),
        ("a.jsonl", b'{"text": "whole \\ud83d\\ude42"}\n', ["whole \U0001f642"]),
        ("a.json", b'[\n{"text": "half \\ud83d"}, {"text": "bc"}]', ["half \ufffd", "bc"]),
        ("a.json", b'{"text": "of a line"}\n{"text": "bc"}\n', ["of a line", "bc"]),
        ("a.json", b'{"other": 3}', ['{"other": 3}']),
    ],
)
def test_a_half_surrogate_pair_in_json_text_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, expected: list[str]
) -> None:
    """Half a surrogate pair is no character, and is replaced."""
    in_one_process(monkeypatch)
    (tmp_path / name).write_bytes(content)
    prepare_corpus([str(tmp_path / name)], tmp_path / "out", "bytes")
    assert documents_in(tmp_path / "out") == expected


def test_short_documents_and_unread_fields_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_process(monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"text": "ab", "id": 1, "tools": []}\n{"text": "c", "url": ""}\n')
    index = prepare_corpus([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes")
    notes = ["1 document of less than two tokens is left out", "not read: 'id', 'tools'"]
    assert (index.notes(), index.documents, index.largest) == (notes, 1, ord("b"))


def test_a_folder_holds_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_process(monkeypatch)
    (tmp_path / "a.txt").write_text("text")
    arguments = [str(tmp_path / "a.txt")], tmp_path / "out", "bytes"
    index = prepare_corpus(*arguments)
    assert prepare_corpus(*arguments) == index, "it was finished already"
    with pytest.raises(
        DataError, match=r"out holds another preparation \(without --lines\): repeat its command"
    ):
        prepare_corpus(*arguments, lines=True)
    with pytest.raises(DataError, match="holds other files: choose a folder that is empty"):
        prepare_corpus(arguments[0], tmp_path, "bytes")
    with pytest.raises(DataError, match=r"has no index\.json: give a folder that"):
        open_corpus(tmp_path)
    (tmp_path / "out" / "00000.tokens.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match="has not the 4 elements"):
        open_corpus(tmp_path / "out")


def test_another_preparation_is_told_apart_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Path
) -> None:
    in_one_process(monkeypatch)
    source, other, folder, words = (
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        tmp_path / "out",
        word_tokenizer,
    )
    source.write_text(as_jsonl(["a b c", "b a c"]))
    usual: dict[str, Any] = {"sources": [str(source)], "tokenizer": str(words), "end": "a"}
    prepare_corpus(folder=folder, **usual)
    written = (folder / "preparation.json").read_text()

    def refused(difference: str, **options: Any) -> None:
        with pytest.raises(DataError, match=rf"out holds another preparation \({difference}\): repeat its"):
            prepare_corpus(folder=folder, **{**usual, **options})

    refused(f"another tokenizer: {words}, now bytes", tokenizer="bytes", end=None)
    refused("another --column: text, now body", column="body")
    refused("another --end: token 1, now token 2", end="b")
    refused("another --end: token 1, now none", end="")
    refused("another --shard, or another order of the files", portion=10)
    other.write_text(source.read_text())
    refused(f"another source: {other} is newly among the files", sources=[str(source), str(other)])
    refused(f"another source: {source} is no longer among the files", sources=[str(other)])
    (folder / "preparation.json").write_text("{}")
    refused(r"its preparation\.json is of another version, or damaged")
    (folder / "preparation.json").write_text(written)
    source.write_text(as_jsonl(["a b c", "b a b"]))
    refused(rf"{source} was written again since")
    source.write_text(as_jsonl(["a b c"]))
    refused(rf"{source} has another size")
    (words.parent / "chat_template.jinja").write_text("x")
    refused(f"the files of the tokenizer {words} have changed since")
    (folder / "preparation.json").unlink()
    (folder / "preparation.json").mkdir()
    with pytest.raises(
        DataError, match=r"preparation\.json cannot be read \(it is a folder\): choose another"
    ):
        prepare_corpus(folder=folder, **usual)


def test_rows_of_two_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_process(monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match="need a tokenizer with a chat template: set"):
        prepare_corpus([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"a\.jsonl holds conversations, and .*b\.txt does not"):
        prepare_corpus([str(tmp_path / "?.*")], tmp_path / "out", "bytes")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"messages": []}\n')
    with pytest.raises(ConfigError, match="need a tokenizer with a chat template: set"):
        prepare_corpus([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes")
    with pytest.raises(DataError, match=r"a\.jsonl:2 is a conversation, and the column 'text' is to be read"):
        prepare_corpus([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes", column="text")


def test_an_interrupted_preparation_continues_after_its_complete_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = [str(tmp_path / "a.jsonl")], tmp_path / "out"
    (tmp_path / "a.jsonl").write_text(as_jsonl([f"document {number}" for number in range(9)]))
    in_one_process(monkeypatch)
    index = prepare_corpus(source, tmp_path / "whole", "bytes", portion=60)
    in_one_process(monkeypatch, stops_at=3)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(source, folder, "bytes", portion=60)
    (folder / "00001.documents.bin").write_bytes(b"")
    written = in_one_process(monkeypatch)
    assert prepare_corpus(source, folder, "bytes", portion=60) == index
    assert written == [1, *range(3, len(index.shards))]
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_preparation_killed_before_its_settings_are_renamed_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_process(monkeypatch)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "preparation.json.partial").write_text("{")
    prepare_corpus([str(tmp_path / "a.txt")], tmp_path / "out", "bytes")
    assert documents_in(tmp_path / "out") == ["text"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed_again_and_again(tmp_path: Path, times: int) -> None:
    """Kill the command at random moments, until it has finished; compare with one that was left alone."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=5)) for _ in range(100)]
    documents = [" ".join(generator.choices(words, k=400)) for _ in range(2500)]
    (tmp_path / "a.jsonl").write_text(as_jsonl(documents))
    code = "import sys; from plait.app.cli.main import main; sys.exit(main(sys.argv[1:]))"
    options = ["--tokenizer", "bytes", "--processes", "2", "--shard", "1"]

    def started(folder: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, "data", "prepare", "a.jsonl", folder, *options]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)

    begun = time.monotonic()
    assert started("whole").wait(60) == 0
    usual, killed = time.monotonic() - begun, 0
    while killed < times:
        process = started("killed")
        time.sleep(usual * generator.uniform(0.2, 0.9))
        if process.poll() is not None:  # it had finished: from the start again
            assert process.returncode == 0
            assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
            for path in (tmp_path / "killed").iterdir():
                path.unlink()
        else:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            with locked_preparation(
                tmp_path / "killed", 60
            ):  # its processes live a little longer, and have the lock
                pass
    assert started("killed").wait(60) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert os.listdir(tmp_path / "killed") != []


@pytest.mark.full
def test_a_preparation_killed_twice_continues_and_gives_the_same_shards(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, 2)


@pytest.mark.full
def test_a_preparation_killed_at_20_moments_gives_the_same_shards(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, 20)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_parquet_tables_and_data_sets_are_prepared_as_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    in_one_process(monkeypatch)
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    texts = [f"document {number}\n" * (number % 3) for number in range(50)]
    table, path = datasets.Dataset.from_dict({"body": texts}), tmp_path / "table.parquet"
    if kind == "parquet":
        table.to_parquet(path, batch_size=7)
    else:
        path = tmp_path / "table"
        table.save_to_disk(path)
    with pytest.raises(DataError, match="has rows of body, and of none of the fields that are read"):
        prepare_corpus([str(path)], tmp_path / "none", "bytes")
    prepare_corpus([str(path)], tmp_path / "out", "bytes", column="body", portion=150)
    assert documents_in(tmp_path / "out") == [one for one in texts if one]
    assert len(open_corpus(tmp_path / "out")[1].shards) > 2


def test_a_table_without_the_datasets_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="needs the package datasets, which the extra data of plait"):
        prepare_corpus([str(tmp_path / "a.parquet")], tmp_path / "out", "bytes")
