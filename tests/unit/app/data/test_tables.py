"""Data sets of Hugging Face by name, and rows of tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import in_one_process

from plait.app.data import tables
from plait.app.data.document_sources import divided, files_of, read_records, read_texts
from plait.app.data.preparation import prepare_corpus
from plait.app.data.tables import column_names, dataset_files, is_dataset, row_ranges
from plait.errors import DataError


def stub(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    made = SimpleNamespace(load_dataset=load, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", made)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", ("owner/name", None, None, "train")),
        ("owner/name:test", ("owner/name", None, None, "test")),
        ("owner/name/20231101.en@v1.0:train_sft", ("owner/name", "20231101.en", "v1.0", "train_sft")),
        ("squad", ("squad", None, None, "train")),
        ("./some/folder/here:test", ("./some/folder/here", None, None, "test")),
        ("/some/folder", ("/some/folder", None, None, "train")),
    ],
)
def test_an_hf_name_gives_path_configuration_revision_and_split(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: Any
) -> None:
    asked = {}

    def load(**arguments: Any) -> None:
        asked.update(arguments)
        raise ConnectionError("Couldn't reach 'it' on the Hub.")

    stub(monkeypatch, load)
    assert is_dataset(f"hf://{name}")
    with pytest.raises(DataError, match=rf"hf://{name} cannot be reached, and is not in the cache: Couldn't"):
        dataset_files(f"hf://{name}")
    assert tuple(asked[one] for one in ("path", "name", "revision", "split")) == expected


def test_an_hf_name_with_a_slice_of_a_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, None)
    with pytest.raises(DataError, match="cannot be read: write OWNER/NAME:SPLIT after hf://, where SPLIT is"):
        dataset_files("hf://owner/name:train[:10%]")


@pytest.mark.full
def test_a_data_set_by_name_goes_on_and_keeps_its_division(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of Parquet files, given to `load_dataset` as a name is; one split of two."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        table = datasets.Dataset.from_dict({"text": [f"{split} {number}" for number in range(300)]})
        table.to_parquet(tmp_path / "set" / f"{split}.parquet")
    source = [f"hf://{tmp_path}/set:test"]
    in_one_process(monkeypatch)
    prepare_corpus(source, tmp_path / "whole", "bytes", portion=700)
    in_one_process(monkeypatch, stops_at=2)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(source, tmp_path / "out", "bytes", portion=700)
    rest = in_one_process(monkeypatch)
    index = prepare_corpus(source, tmp_path / "out", "bytes", portion=700)
    assert rest == list(range(2, len(index.shards)))
    assert (index.documents, len(rest) > 2) == (300, True)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    with pytest.raises(DataError, match='Unknown split "none"'):
        prepare_corpus([f"hf://{tmp_path}/set:none"], tmp_path / "none", "bytes")
    datasets.DatasetDict({"a": table, "b": table}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"has several splits .a, b.: give the folder of one of them"):
        prepare_corpus([str(tmp_path / "splits")], tmp_path / "none", "bytes")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_each_row_is_read_once_and_named_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of row groups, or batches, of three rows, which are read two at a time."""
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 2)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, rows = tmp_path / name, [{"text": letter, "n": n} for n, letter in enumerate("abcdefghij")]
    table = pyarrow.Table.from_pylist(rows)
    if name == "a.parquet":
        parquet.write_table(table, path, row_group_size=3)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as file:
            file.write_table(table, max_chunksize=3)
    assert column_names(str(path)) == ["text", "n"]
    whole = sum(held for _, _, held in row_ranges(str(path), 1))
    counts = []
    for size in (1, whole // 3, whole // 2, whole, 2 * whole):
        portions = list(divided(files_of(str(path))[0], size))
        read = [found for one in portions for found in read_records(one, ("text", "none"))]
        assert [row for _, row in read] == [{"text": one["text"]} for one in rows]
        assert [str(place) for place, _ in read] == [f"{path}, row {n}," for n in range(10)]
        assert sum(one.size for one in portions) == whole
        assert all(one.size >= min(size, whole) * 0.75 for one in portions[:-1])
        counts.append(len(portions))
        (first, *_) = portions
        assert [row for _, row in read_records(first, None)] == rows[: len(list(read_records(first, None)))]
    assert counts[0] == (4 if name == "a.parquet" else 10)
    assert counts[1:] == sorted(counts[1:], reverse=True)
    assert counts[-2:] == [1, 1]


def test_text_that_is_no_utf_8_is_named_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    in_one_process(monkeypatch)
    _, ends, data = pyarrow.array([b"fine", b"half \xed\xa0\xbd"], pyarrow.binary()).buffers()
    table = pyarrow.table({"text": pyarrow.StringArray.from_buffers(2, ends, data)})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    with pytest.raises(DataError, match=r"a\.arrow cannot be read in row 1: .*UTF8"):
        prepare_corpus([str(tmp_path / "a.arrow")], tmp_path / "out", "bytes")


def test_fields_that_a_structure_was_written_without_are_not_read(tmp_path: Path) -> None:
    """All structures of a column have the same fields, which are null where others have them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": ["a", None]}}]
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table({"calls": [calls], "limits": pyarrow.array([[("a", 1)]], kind), "none": [None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (portion,) = divided(files_of(str(tmp_path / "a.parquet"))[0], 1 << 20)
    assert [row for _, row in read_records(portion, None)] == [
        {"calls": calls, "limits": {"a": 1}, "none": None}
    ]


def test_a_column_without_text_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [b"bytes"]}), tmp_path / "a.parquet")
    (portion,) = divided(files_of(str(tmp_path / "a.parquet"))[0], 1 << 20)
    with pytest.raises(DataError, match=r"row 0, has a 'text' that is .b'bytes'., and no text"):
        list(read_texts(portion, "text"))
    with pytest.raises(DataError, match=r"a\.parquet has no column 'body' .it has: text.: give --column"):
        list(read_texts(portion, "body"))
    for name in ("b.parquet", "b.arrow"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=r"b\.\w+ cannot be read: it is a pipe"):
            column_names(str(tmp_path / name))
