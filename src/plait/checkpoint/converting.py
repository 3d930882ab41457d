"""`convert`: a checkpoint in other files: of a single one, of files of a certain size, or of other ranks."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from plait.checkpoint.disk import Disk, write_text
from plait.checkpoint.manifest import FILE, written
from plait.checkpoint.matching import require_model, run_under
from plait.checkpoint.new_folder import new_folder
from plait.checkpoint.spread import Spread
from plait.checkpoint.tensor_file import write_file
from plait.checkpoint.wholes import Wholes, write_native
from plait.checkpoint.writing import file_of


def convert(
    source: str | Path, target: str | Path, *, max_bytes: int | None = None, disk: Disk | None = None
) -> None:
    """Write the checkpoint `source` to the new folder `target`: every tensor whole, one after another.

    In one process, without ranks. `max_bytes`: the most that a file may have, unless it holds one tensor that
    is larger; None: one file for all. Parameters, optimizer, `state` and what else there is stay as they are,
    bit by bit. Memory: one tensor. Raises `CheckpointError` where the source is damaged or the target is
    taken.
    """
    wholes = Wholes(Path(source))
    write_native(Path(target), wholes.manifest, wholes.items(), max_bytes=max_bytes, disk=disk or Disk())


def convert_for(source: str | Path, target: str | Path, spread: Spread, *, disk: Disk | None = None) -> None:
    """Write `source` to the new folder `target` as ranks of another layout would: the same boxes and files.

    `spread` is `plait.blueprint.build_blueprint(model, plan).spread`. What a rank of it holds then lies
    in its own file, but for what others hold as well. Otherwise as `convert`. Memory: one
    box. Raises `CheckpointError`, too, where the checkpoint is of another model.
    """
    wholes, disk = Wholes(Path(source)), disk or Disk()
    manifest = wholes.manifest
    require_model(manifest, spread.layouts, spread.buffer_shapes, spread.aliases)
    head = replace(manifest, plan=asdict(spread.plan), run=run_under(spread.plan, manifest))
    with new_folder(Path(target), disk) as folder:
        files = (
            write_file(folder / file_of(rank), items, disk) for rank, items in enumerate(spread.items(wholes))
        )
        write_text(disk, folder / FILE, written(replace(head, files=tuple(files))))
