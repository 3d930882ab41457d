"""A folder that is there as a whole or not at all: written under a hidden name, and renamed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.checkpoint.disk import Disk
from plait.checkpoint.folders import put_in_place, remove_replaced, saving, standing
from plait.errors import CheckpointError


@contextmanager
def new_folder(path: Path, disk: Disk) -> Iterator[Path]:
    """Give the folder to write in; it is called `path` when the block has ended without an error.

    CheckpointError where `path` is taken, and for an OSError meanwhile: nothing is left then.
    """
    path = path.absolute()
    if _is_taken(path):
        raise CheckpointError(f"{path} is there already: choose a path that is free.")
    hidden = saving(path)
    try:
        if hidden.exists():
            disk.remove(hidden)
        disk.make_folder(hidden)
        yield hidden
        disk.sync_folder(hidden)
        put_in_place(path, disk)
        remove_replaced(path, disk)
    except BaseException as error:
        with suppress(OSError):  # what went wrong first is told
            if hidden.exists():
                disk.remove(hidden)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{path} was not written ({error.strerror or error}): make room, or choose another path."
        ) from None


def _is_taken(path: Path) -> bool:
    """Whether something stands there, or waits to: all but an empty folder."""
    if standing(path) is not None:
        return True
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))
