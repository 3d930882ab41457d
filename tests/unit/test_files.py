"""Reading takes regular files and JSON of one meaning, writing follows no link, texts are safe to show."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mutated_files import ELSEWHERE, outcome
from plait.errors import ConfigError, PlaitError, terminal_text
from plait.files import (
    copy_file,
    is_within,
    json_value,
    make_folder,
    open_file,
    open_to_write,
    read_json,
    require_file,
    try_lock,
    validated,
    write_bytes,
)


def made_pipe(path: Path) -> None:
    os.mkfifo(path)


OTHER_THINGS: dict[str, Callable[[Path], None]] = {
    "it is a pipe": made_pipe,
    "it is a folder": Path.mkdir,
    "it is a device": lambda path: path.symlink_to("/dev/zero"),
    "Too many levels|it is a link": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("what", OTHER_THINGS)
def test_only_regular_files_are_read(tmp_path: Path, what: str) -> None:
    OTHER_THINGS[what](tmp_path / "a")
    for read in (open_file, require_file, read_json):
        with pytest.raises(OSError, match=what):
            outcome(lambda read=read: read(tmp_path / "a"))  # type: ignore[misc]


@pytest.mark.parametrize("write", [lambda path: write_bytes(path, b"b"), open_to_write, try_lock])
def test_files_are_not_written_through_links_or_into_pipes(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "new").symlink_to(tmp_path / "elsewhere")
    made_pipe(tmp_path / "pipe")
    for name in ("link", "new"):
        with pytest.raises(OSError, match="it is a link"):
            write(tmp_path / name)
    with pytest.raises(OSError, match="it is a pipe"):
        outcome(lambda: write(tmp_path / "pipe"))
    assert victim.read_text() == "kept"
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_is_written_appended_to_and_copied(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"longer")
    write_bytes(tmp_path / "a", b"one")
    with open_to_write(tmp_path / "a", append=True) as file:
        file.write(b" two")
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "one two"


def test_a_folder_is_made_and_no_link_is_one(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="it is a link"):
        make_folder(tmp_path / "link")


def test_names_within_a_folder_are_plain(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(ELSEWHERE)
    (tmp_path / "a").write_text("")
    (tmp_path / "in").symlink_to("a")
    names = ("a", "in", "missing", "", ".", "..", "../a", ELSEWHERE, "b/a", "a\0", "a\n", "\ud800", "out")
    assert [name for name in names if is_within(tmp_path, name)] == ["a", "in", "missing"]


MEANINGLESS = {
    '{"a": 1, "a": 2}': "the key 'a' twice",
    '{"a": NaN}': "NaN is no number",
    '{"a": 1e999}': "1e999 is beyond",
    '["\\ud800"]': "half a character",
    "[" * 100_000: "nested",
    "[" * 201 + "]" * 201: "nested more than 200 times",
    "9" * 5000: "4300",
}


@pytest.mark.parametrize("text", MEANINGLESS, ids=MEANINGLESS.values())
def test_json_without_a_single_meaning_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=MEANINGLESS[text]):
        outcome(lambda: json_value(text))


def test_json_that_python_writes_is_read_where_that_is_asked_for() -> None:
    assert json_value('["\\ud83d\\ude00", 1.5, 1e300]') == ["😀", 1.5, 1e300]
    assert str(json_value("[Infinity, NaN]", strict=False)) == "[inf, nan]"


def test_texts_are_shown_without_what_a_terminal_obeys() -> None:
    assert terminal_text("\x1b]0;a\x07 \x9b2J \u202e \ud800 \r") == r"\x1b]0;a\x07 \x9b2J \u202e \ud800 \r"
    shown = "ordinary, größer, 中文, \u00a0, a\u200db,\n\ttwo lines 😀"
    assert terminal_text(shown) == shown
    for kind in (PlaitError, ConfigError):
        assert str(kind("a name \x1b[31m.")) == r"a name \x1b[31m."


def test_json_of_another_type_is_refused_not_converted() -> None:
    assert validated(dict[str, int], '{"step": 1}') == {"step": 1}
    with pytest.raises(ValueError, match=r"^step: input should be a valid integer"):
        validated(dict[str, int], '{"step": "1"}')
