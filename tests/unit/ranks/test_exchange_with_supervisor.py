"""What ranks tell their supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.ranks.exchange_with_supervisor import (
    found_at_start,
    generation_of_rank,
    go_on_before,
    newest_good_step,
    note_begun_anew,
    note_possible_ranks,
    note_restored,
    possible_ranks,
    remove_at_end,
    removed_at_end,
    restored_step,
    supervisor_of_rank,
    variables_of_supervisor,
)


def test_without_a_supervisor_nothing_is_told(tmp_path: Path) -> None:
    assert supervisor_of_rank() == ""
    assert not remove_at_end(tmp_path)
    note_restored(3)
    note_begun_anew()
    assert found_at_start(tmp_path, ["one"]) == {"one"}
    assert found_at_start(tmp_path, ["two"]) == {"two"}
    assert restored_step(str(tmp_path)) is None
    assert [*removed_at_end(str(tmp_path))] == []
    assert newest_good_step() is None
    assert (generation_of_rank(), possible_ranks()) == (0, 0)


def test_folders_to_remove_and_the_restored_step_reach_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables_of_supervisor(str(tmp_path), 3).items():
        monkeypatch.setenv(name, value)
    assert supervisor_of_rank()
    assert generation_of_rank() == 3
    assert possible_ranks() == 0
    note_possible_ranks(str(tmp_path), 4)
    assert possible_ranks() == 4
    assert remove_at_end(tmp_path / "one")
    assert remove_at_end(tmp_path / "one")
    assert remove_at_end(tmp_path / "two")
    assert remove_at_end(tmp_path / "three\nlines\u2028")
    with (tmp_path / "removed_at_end").open("a") as file:
        file.write(f'"{tmp_path}')  # a full disk has cut the rest
    folders = [tmp_path / name for name in ("one", "two", "three\nlines\u2028")]
    assert [*removed_at_end(str(tmp_path))] == folders
    note_restored(3)
    note_restored(7)
    assert restored_step(str(tmp_path)) == 7
    go_on_before(str(tmp_path), 5)
    assert newest_good_step() == 5
    note_restored(4)
    assert newest_good_step() is None
    go_on_before(str(tmp_path), 5)
    note_begun_anew()
    assert (newest_good_step(), restored_step(str(tmp_path))) == (None, None)
    assert found_at_start(tmp_path, ["one"]) == {"one"}
    assert found_at_start(tmp_path, ["one", "two"]) == {"one"}
    assert found_at_start(tmp_path / "other", ["two"]) == {"two"}
