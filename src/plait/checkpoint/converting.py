"""`convert`: a checkpoint of many ranks' files into one of a single file, or of files of a certain size."""

from __future__ import annotations

from pathlib import Path

from plait.checkpoint.disk import Disk
from plait.checkpoint.wholes import Wholes, write_native


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
