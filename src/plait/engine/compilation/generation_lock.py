"""A lock by which one process of a host compiles a graph, and the others then read torch's cache."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from plait.ranks.file_lock import owner_of, try_lock, unlock

PATIENCE = 600.0
"""Seconds, as torch waits for its own locks."""
_SECONDS_BETWEEN_TRIES = 0.02


@contextmanager
def generating_alone(graph: str, cache: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Context manager that holds the lock of a graph in torch's cache folder, while its code is generated.

    `graph`: a text that identifies it. Another process that holds the lock is waited for, at most `patience`
    seconds; then a warning names it. Where no file can be locked in `cache`, nobody is waited for.
    """
    path = cache / f"plait-{sha256(graph.encode()).hexdigest()[:32]}.lock"
    file = _acquired(path, patience)
    try:
        yield
    finally:
        if file is not None:
            unlock(path, file)


def _acquired(path: Path, patience: float) -> BinaryIO | None:
    start = time.monotonic()
    try:
        while (file := try_lock(path)) is None and time.monotonic() - start < patience:
            time.sleep(_SECONDS_BETWEEN_TRIES)
    except OSError:
        return None
    if file is None:
        warnings.warn(
            f"{owner_of(path)} has generated the code of a layer for {patience:g} seconds ({path}): this "
            "rank generates its own.",
            stacklevel=1,
        )
    return file
