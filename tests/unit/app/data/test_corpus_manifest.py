"""Damage to a prepared corpus is found by checksums, and mended by the command that wrote it."""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import in_one_process

from plait.app.cli.main import main
from plait.app.data import checksummed_files
from plait.app.data.corpus_manifest import (
    CorpusIndex,
    ShardEntry,
    _difference,
    read_index,
    require_intact,
    write_index,
)
from plait.app.data.preparation import prepare_corpus
from plait.app.data.token_shards import open_corpus
from plait.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards of bytes, three documents."""
    in_one_process(monkeypatch)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 40)
    prepared(tmp_path / "corpus")
    return tmp_path / "corpus"


def prepared(folder: Path) -> None:
    prepare_corpus([str(folder.parent / "*.txt")], folder, "bytes", portion=80)


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir())}


def without(path: Path) -> None:
    path.unlink()


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def of_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["00000.tokens.bin", "00001.documents.bin", "index.json"])
@pytest.mark.parametrize("damage", [without, shorter, of_zeros, a_pipe])
def test_a_damaged_corpus_is_refused_and_preparing_again_mends_it(
    corpus: Path, name: str, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(corpus)
    damage(corpus / name)
    assert main(["data", "inspect", str(corpus)]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert told.count("\n") == 1
    prepared(corpus)
    assert contents(corpus) == before


def test_the_first_bytes_are_checked_when_a_corpus_is_opened_and_all_by_inspect(corpus: Path) -> None:
    of_zeros(corpus / "00001.tokens.bin")
    index = read_index(corpus)
    require_intact(corpus, index, most=100)
    with pytest.raises(
        DataError, match=r"00001\.tokens\.bin is not what was written, by its checksum: repeat"
    ):
        require_intact(corpus, index, most=1 << 20)
    assert _difference(corpus / "missing", "0") == "cannot be read (No such file or directory)"


def test_an_index_of_another_preparation_does_not_count_as_finished(corpus: Path) -> None:
    before, index = contents(corpus), read_index(corpus)
    for other in (replace(index, vocab=300), replace(index, shards=index.shards[:1])):
        write_index(corpus, other)
        prepared(corpus)
        assert contents(corpus) == before


def test_a_corpus_index_with_contradicting_counts_is_refused(tmp_path: Path) -> None:
    roles = tuple(f"r{number}" for number in range(6))
    shards = (
        ShardEntry(5, 2, 3, 1, 1, 9, ("id",), (), roles, ("0" * 8,) * 4),
        ShardEntry(7, 1, 7, 0, 1, 8, ("id", "url"), (), ("x", "r0", "y", "z"), ("1" * 8,) * 4),
    )
    index = CorpusIndex("a.json", 10, "uint16", 9, True, shards, "hash")
    assert (index.tokens, index.documents, index.largest, index.count("answers")) == (12, 3, 9, 10)
    assert index.notes() == [
        "2 documents of less than two tokens are left out",
        "the chat template leaves out messages of the roles 'r0', 'r1', 'r2', 'r3', 'r4', 'r5', 'x', 'y', …",
        "not read: 'id', 'url'",
    ]
    empty = replace(index, shards=())
    assert (empty.largest, empty.names("unread"), empty.notes()) == (-1, "", [])
    fitting = (
        replace(index, vocab=1 << 16),
        replace(index, vocab=1 << 32, dtype="uint32"),
        replace(index, end=None),
    )
    for one in (index, empty, *fitting):
        write_index(tmp_path, one)
        assert read_index(tmp_path) == one
    for other, told in (
        (replace(index, vocab=(1 << 16) + 1), "vocab: 65537 is more than uint16 can count"),
        (replace(index, end=10), "end: 10 is no token of 10"),
        (
            replace(index, shards=(replace(shards[0], answers=6),)),
            r"shards\.0: it has more answers than tokens",
        ),
        (replace(index, chats=False), r"shards\.0: it has 4 checksums"),
    ):
        write_index(tmp_path, other)
        with pytest.raises(DataError, match=rf"index\.json is damaged \({told}\): repeat its"):
            read_index(tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(DataError, match=r"index\.json holds no JSON object: repeat"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_text('{"format": 2}')
    with pytest.raises(DataError, match="is of another version of plait: prepare the corpus again"):
        read_index(tmp_path)


def test_a_corpus_file_is_synced_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done, usual = tmp_path / "a", list[object](), (os.fsync, Path.replace)

    def synchronised(handle: int) -> None:
        found = os.fstat(handle)
        done.append(("folder" if stat.S_ISDIR(found.st_mode) else found.st_size, path.exists()))
        usual[0](handle)

    def renamed(self: Path, target: Path) -> Path:
        done.append((self.name, target.name))
        return usual[1](self, target)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(Path, "replace", renamed)
    with checksummed_files.whole_file(path) as file:
        for data in (b"ab", b"c"):
            file.write(data)
    assert done == [(3, False), ("a.partial", "a"), ("folder", True)]
    assert file.checksum == checksummed_files.file_checksum(path) == f"{zlib.crc32(b'abc'):08x}"
    monkeypatch.setattr(checksummed_files, "_READ_AT_ONCE", 1)
    assert checksummed_files.file_checksum(path) == file.checksum


def test_a_corpus_of_an_earlier_version_opens_without_checksums(corpus: Path) -> None:
    content = json.loads((corpus / "index.json").read_text())
    del content["checksum"], content["tokenizer_hash"]
    for shard in content["shards"]:
        del shard["checksums"]
    (corpus / "index.json").write_text(json.dumps(content))
    found, index = open_corpus(corpus)
    require_intact(corpus, index)
    assert bytes(found.read(0, 120).tolist()) == b"a" * 40 + b"b" * 40 + b"c" * 40
    np.array([80, 40]).tofile(corpus / "00000.documents.bin")
    with pytest.raises(DataError, match=r"00000\.documents\.bin is damaged .its numbers do not ascend"):
        open_corpus(corpus)[0].document_ends(0, 2)
    prepared(corpus)
    assert "checksum" not in json.loads((corpus / "index.json").read_text()), "nothing was to be written"


@pytest.mark.parametrize(
    ("number", "call"),
    [
        *((errno.ENOSPC, "write"), (errno.EDQUOT, "fsync"), (errno.ENOSPC, "rename")),
        *((errno.EACCES, "rename"), (errno.EROFS, "write"), (errno.EIO, "fsync")),
    ],
)
def test_a_write_error_of_data_prepare_is_one_sentence_and_a_second_run_finishes(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, call: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    before = contents(corpus)
    (corpus / "00001.tokens.bin").unlink()
    with monkeypatch.context() as patched:
        if call == "write":
            patched.setattr(checksummed_files.ChecksumWriter, "write", fails)
        elif call == "fsync":
            patched.setattr(os, "fsync", fails)
        else:
            patched.setattr(Path, "replace", fails)
        arguments = ["--tokenizer", "bytes", "--shard", "1"]
        with pytest.raises(
            DataError, match=rf"cannot be written .{os.strerror(number)}.: make room or choose"
        ):
            prepared(corpus)
        sources = sorted(map(str, corpus.parent.glob("*.txt")))
        assert main(["data", "prepare", *sources, str(corpus.parent / "new"), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(corpus.glob("*.partial"))
    prepared(corpus)
    assert contents(corpus) == before


def test_an_unfinished_corpus_file_that_is_a_link_is_not_written_through(corpus: Path) -> None:
    (corpus / "00001.tokens.bin").unlink()
    (victim := corpus.parent / "victim").write_text("mine")
    (corpus / "00001.tokens.bin.partial").symlink_to(victim)
    prepared(corpus)
    assert victim.read_text() == "mine"
