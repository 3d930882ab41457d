"""Records in JSON are read one at a time, in bounded memory, and mean one thing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from plait.app.data import json_records
from plait.app.data.document_sources import divided, files_of, read_records
from plait.app.data.json_records import json_kind
from plait.errors import DataError


def records_in(path: Path) -> list[object]:
    files = files_of(str(path))
    return [row for file in files for one in divided(file, 50) for _, row in read_records(one, None)]


@pytest.mark.parametrize("start", [1, 3, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list_is_read_in_chunks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, indent: int | None
) -> None:
    monkeypatch.setattr(json_records, "_START", start)
    records = [{"text": 'a ] , [ b {} \\" 漢🙂\n', "n": [1.5, {"x": None}]}, {}, {"text": ""}] * 3
    (path := tmp_path / "a.json").write_text(
        "\ufeff " + json.dumps(records, indent=indent, ensure_ascii=False)
    )
    assert [row for _, row in json_records.read_list(str(path))] == records
    path.write_text(" [ ] \n")
    assert not list(json_records.read_list(str(path)))


NO_LISTS = [
    ('[{"text": "a"}, {"text": "b"]', "is no JSON behind element 0: "),
    ('[{"text": "a"}', "is no JSON behind element 0: there is no comma"),
    ('[{"text": "a"} {}]', "there is no comma"),
    ('[{"text": "a"}] {}', "it goes on behind the list"),
    ('[{"text": "a"}, 3]', "has an element 1 that is no JSON object"),
    ('[{"text": "a"}, {"text": "b", "text": "c"}]', "it has the key 'text' twice"),
    ('[{"text": "a", "n": 1e999}]', "Out of range float values"),
    ('[{"text": "a"}, ' + "[" * 100_000, "nested"),
]


def test_a_malformed_json_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, told in NO_LISTS:
        path.write_text(text)
        with pytest.raises(DataError, match=r"a\.json .*" + told):
            records_in(path)


NO_RECORDS = [
    (b'{"text": "a", "text": "b"}', "it has the key 'text' twice"),
    (b'{"text": "a", "n": NaN}', "Out of range float values"),
    (b'{"text": ' + b"[" * 100_000, "nested"),
    (b'{"text": "a"', "delimiter"),
    ('{"text": "a"}'.encode("utf-16"), "no UTF-8"),
    (b'{"text": "\xff"}', "it is no UTF-8 at byte 24"),
]


def test_a_line_that_is_no_record_is_refused_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "_AT_ONCE", 4)
    path = tmp_path / "a.jsonl"
    for line, told in NO_RECORDS:
        path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
        with pytest.raises(DataError, match=r"a\.jsonl:2 is no JSON object .*" + told):
            records_in(path)
    path.write_text("[3]\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1 is no JSON object: mend or remove it"):
        records_in(path)


def test_a_record_of_the_greatest_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"text": "abc"}\n'
    (path := tmp_path / "a.jsonl").write_text(line * 2)
    monkeypatch.setattr(json_records, "LONGEST_RECORD", len(line))
    assert records_in(path) == [{"text": "abc"}] * 2
    monkeypatch.setattr(json_records, "LONGEST_RECORD", len(line) - 1)
    with pytest.raises(DataError, match=r"a\.jsonl has a line of more than 0 MiB at byte 0: divide it"):
        records_in(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_reading_json_records_holds_one_record_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As of a small file that is compressed from a huge line."""
    monkeypatch.setattr(json_records, "LONGEST_RECORD", 1 << 12)
    monkeypatch.setattr(json_records, "_START", 1 << 10)
    long = json.dumps({"text": "a" * 20_000})
    text = f'[{{"text": "a"}}, {long}]' if ".json." in f"{name}." else f'{{"text": "a"}}\n{long}\n'
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wt") as file:
        file.write(text)
    with pytest.raises(DataError, match=r"more than|is no JSON behind element 0"):
        records_in(tmp_path / name)


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_a_damaged_compressed_file_is_one_sentence(tmp_path: Path, damage: str) -> None:
    data = gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(2000)))
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 255, data[middle + 1] ^ 255]) + data[middle + 2 :]
    damaged = {"cut": data[:middle], "flipped": flipped, "no gzip": b"text"}
    (tmp_path / "a.jsonl.gz").write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz (cannot be read as gzip|has a line at byte \d+)"):
        records_in(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("row", [{"messages": []}, {"conversations": []}, {"prompt": "a", "completion": "b"}])
def test_a_text_field_that_holds_conversations_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [row, row]}))
    with pytest.raises(
        DataError, match='an object whose field "data" lists conversations: give that list by'
    ):
        json_kind(str(path))
    path.write_text(json.dumps({"files": [{"name": "a"}]}))
    assert json_kind(str(path)) is None, "a text"
