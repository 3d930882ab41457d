import os
from pathlib import Path

import pytest

from plait.app.data import document_sources
from plait.app.data.document_sources import read_documents
from plait.app.data.preparation import prepare_corpus
from plait.errors import DataError


def test_standard_library_is_python_and_always_the_same() -> None:
    documents = read_documents("stdlib")
    assert documents == read_documents("stdlib")
    assert sum(map(len, documents)) > 1_000_000
    assert any(b"def dataclass(" in document for document in documents)


def test_the_standard_library_source_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_sources, "STDLIB_BYTES", 500_000)
    assert 250_000 < sum(map(len, read_documents("stdlib"))) <= 500_000


def test_the_source_stdlib_without_python_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match='"stdlib" found no Python source'):
        read_documents("stdlib")


def make_folder(root: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/c.md", ".hidden", ".git/object", "__pycache__/x.txt"):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)


def test_a_source_may_be_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert read_documents(str(tmp_path / "b.txt")) == [b"b.txt"]
    assert read_documents(str(tmp_path)) == [b"b.txt", b"a/c.md", b"a/z.txt"]
    assert read_documents(f"{tmp_path}/a/*.md") == [b"a/c.md"]
    assert read_documents(f"{tmp_path}/[ab]/**/*.txt") == [b"a/z.txt"]


@pytest.mark.parametrize("name", ["none.txt", "*.none"])
def test_a_source_that_does_not_exist_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"data\.source = .* does not exist: give"):
        read_documents(str(tmp_path / name))


def test_the_source_random_is_refused_where_a_corpus_is_read() -> None:
    with pytest.raises(DataError, match=r"random tokens are data\.source of a run only, neither mixed nor"):
        read_documents("random")


def test_an_empty_source_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder without files"):
        read_documents(str(tmp_path))
    (tmp_path / "text.txt").touch()
    for source in (tmp_path, tmp_path / "text.txt"):
        with pytest.raises(DataError, match="is empty"):
            read_documents(str(source))


@pytest.mark.parametrize("data", [b"text\0text", b"caf\xe9"])
def test_a_binary_source_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "picture.png").write_bytes(data)
    with pytest.raises(DataError, match=r"picture\.png is binary, not UTF-8 text"):
        read_documents(str(tmp_path))
    (tmp_path / "picture.png").rename(tmp_path / "text.txt.zst")
    with pytest.raises(DataError, match=r"text\.txt\.zst is binary, not UTF-8 text: decompress it\."):
        read_documents(str(tmp_path))


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt cannot be read: it is a pipe"):
        read_documents(str(tmp_path))
    with pytest.raises(DataError, match=r"b\.txt' is no regular file or folder: give"):
        read_documents(str(tmp_path / "b.txt"))
    with pytest.raises(DataError, match=r"b\.txt cannot be read: it is a pipe"):
        prepare_corpus([str(tmp_path)], tmp_path / "out", "bytes")
