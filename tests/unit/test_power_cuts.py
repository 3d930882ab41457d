"""After a power cut at any moment there is what was there before, or what is written; at the end that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from power_cuts import PowerCuts, put
from torch import nn

import plait
from plait.app.data.corpus_manifest import INDEX, CorpusIndex, damaged_shards, read_index
from plait.app.data.preparation import prepare_corpus
from plait.app.loop.loggers import JsonLines
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.folders import BestCheckpoint, atomic_folder, clean_up, resolve, unfinished_path
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.rewriting import convert
from plait.checkpoint.tensor_file import find_damage, portions
from plait.engine import Engine


@cache
def engine_of(value: int) -> Engine:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.constant_(model[0].weight, value)
    plan = plait.Plan()
    return plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)


def save(folder: Path, step: int, value: int = 0) -> None:
    plait.save(engine_of(value or step), None, folder / f"step-{step:08d}", {"value": value or step})


def series(folder: Path, step: int, start: int | None = None, *, is_best: bool = True) -> None:
    """One checkpoint more, of which one is kept, and the best one."""
    manager = CheckpointManager(folder, keep_last=1, start_step=start)
    best = [BestCheckpoint(step, 1 / step)] if is_best else None
    manager.save(engine_of(step), None, step, {"value": step}, best)
    manager.finish()


def hide(folder: Path, step: int) -> None:
    """As if a save had been killed before the checkpoint got its name."""
    save(folder, step)
    path = folder / f"step-{step:08d}"
    path.rename(unfinished_path(path))


def value_of(path: Path) -> int:
    """The value in a checkpoint that has all its bytes."""
    manifest = read_manifest(path)
    assert {find_damage(path, one) for one in portions(manifest.files)} == {None}
    return int(manifest.state["value"])


SAVES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "the first": (lambda folder: None, lambda folder: save(folder, 2)),
    "another": (lambda folder: save(folder, 1), lambda folder: save(folder, 2)),
    "in place of one": (lambda folder: save(folder, 2, 1), lambda folder: save(folder, 2)),
    "the first was the best": (
        lambda folder: series(folder, 1),
        lambda folder: series(folder, 2, is_best=False),
    ),
    "the second is the best": (lambda folder: series(folder, 1), lambda folder: series(folder, 2)),
    "in place of one without its name": (lambda folder: hide(folder, 2), lambda folder: save(folder, 2)),
    "beside one without its name": (lambda folder: hide(folder, 1), lambda folder: series(folder, 2)),
    "after a later one of another run": (
        lambda folder: (save(folder, 1), series(folder, 3)),
        lambda folder: series(folder, 2, 1),
    ),
    "converted": (
        lambda folder: save(folder, 1),
        lambda folder: convert(folder / "step-00000001", folder / "step-00000002"),
    ),
}


@pytest.mark.parametrize("case", SAVES)
def test_after_a_power_cut_a_checkpoint_is_the_old_or_the_new_one(case: str, tmp_path: Path) -> None:
    before, write = SAVES[case]
    (folder := tmp_path / "written").mkdir()
    before(folder)
    had = value_of(resolve(folder)) if any(folder.iterdir()) else None
    with PowerCuts(folder) as cuts:
        write(folder)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    now = value_of(resolve(folder))
    found = set()
    for number, state in enumerate(cuts.states):
        made = put(state, tmp_path / str(number))
        if had is None and not list(made.glob("*/manifest.json")) and not list(made.glob(".*/manifest.json")):
            continue  # not begun
        found.add(value_of(resolve(made)))
        if (made / "best.json").exists():
            found.add(value_of(resolve(made / "best")))
        clean_up(made, Disk())
        assert value_of(resolve(made)) in found
    assert found == {had, now} - {None}
    assert {value_of(resolve(put(state, tmp_path / f"end {n}"))) for n, state in enumerate(cuts.last)} == {
        now
    }


def test_after_a_power_cut_an_exported_folder_is_complete_or_absent(tmp_path: Path) -> None:
    """Whoever has written the files in it: an export copies some, libraries write some."""
    (folder := tmp_path / "written").mkdir()
    with PowerCuts(folder) as cuts, atomic_folder(folder / "exported", Disk()) as opened:
        (opened / "config.json").write_text("{}")
        (opened / "inner").mkdir()
        (opened / "inner" / "template").write_text("text")
    whole = {"exported": None, "exported/config.json": b"{}", "exported/inner": None}
    whole |= {"exported/inner/template": b"text"}
    parts = [
        {name: one for name, one in state.items() if name.startswith("exported")} for state in cuts.states
    ]
    assert {} in parts
    assert all(part in ({}, whole) for part in parts)
    assert all(state == whole for state in cuts.last)


def test_after_a_power_cut_metrics_of_a_resumed_run_are_complete(tmp_path: Path) -> None:
    (folder := tmp_path / "written").mkdir()
    rows = [b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 3}\n']
    (folder / "metrics.jsonl").write_bytes(b"".join(rows))
    logger = JsonLines(folder / "metrics.jsonl")
    with PowerCuts(folder) as cuts:
        logger.begin(2)
        logger.write({"step": 3})
    logger.close()
    assert {state["metrics.jsonl"] for state in cuts.states} == {b"".join(rows), b"".join(rows[:2])}


def test_after_a_power_cut_prepared_data_with_an_index_are_complete(tmp_path: Path) -> None:
    """And the same command goes on in every state."""
    (tmp_path / "text.txt").write_text("one\n\ntwo and more\nthree")
    (folder := tmp_path / "written").mkdir()

    def prepare(to: Path) -> CorpusIndex:
        return prepare_corpus([str(tmp_path / "text.txt")], to, "bytes", portion=12, lines=True)

    with PowerCuts(folder) as cuts:
        index = prepare(folder)
    assert len(index.shards) == 2
    for number, state in enumerate(cuts.states):
        made = put(state, tmp_path / str(number))
        if INDEX in state:
            assert not [*damaged_shards(made, read_index(made))]
        assert prepare(made) == index
        assert not [*damaged_shards(made, index)]
    assert all(INDEX in state for state in cuts.last)
