"""The folder of a prepared corpus: the settings by which a repeated command is recognised, and its lock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from plait.app.data.checksummed_files import partial_path, write_text
from plait.app.data.corpus_manifest import SETTINGS
from plait.app.data.document_sources import SourceRange
from plait.app.data.encoded_documents import TextEncoding
from plait.errors import DataError
from plait.files import json_value, owner_of, read_text, try_lock, unlock

LOCK = "preparation.lock"
"""Names the process that prepares a corpus in the folder."""
_SECONDS_BETWEEN_TRIES = 0.2


@contextmanager
def locked_preparation(folder: Path, patience: float) -> Iterator[None]:
    """Context manager that holds the lock of a folder, which is made where it is missing.

    Another process that holds it is waited for as long as the files in the folder change at least every
    `patience` seconds; then DataError names that process. A process that ends, or is killed, releases its
    locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}): choose another folder.") from None
    path, seen, since = folder / LOCK, _state(folder), time.monotonic()
    while (file := _acquired(path)) is None:
        if (state := _state(folder)) != seen:
            seen, since = state, time.monotonic()
        if time.monotonic() - since >= patience:
            waited = f", and has written nothing for {patience:g} seconds" if patience else ""
            raise DataError(
                f"{folder} is being prepared by {owner_of(path)}{waited}: wait until it has finished, or end "
                "it and repeat the command, which goes on from there."
            )
        time.sleep(min(_SECONDS_BETWEEN_TRIES, patience))
    try:
        yield
    finally:
        unlock(path, file)


def _acquired(path: Path) -> BinaryIO | None:
    try:
        return try_lock(path)
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot be locked ({error.strerror}): choose another folder."
        ) from None


def _state(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files in a folder."""
    found = []
    with os.scandir(folder) as entries:
        for one in entries:
            with suppress(FileNotFoundError):  # it was renamed meanwhile
                found.append((one.name, one.stat(follow_symlinks=False).st_size))
    return found


def begin_preparation(folder: Path, shards: Sequence[Sequence[SourceRange]], settings: TextEncoding) -> None:
    """Write the settings into a new folder; DataError where the folder has those of another preparation."""
    path = folder / SETTINGS
    paths = dict.fromkeys(one.path for shard in shards for one in shard)
    asked = {
        "settings": asdict(settings),
        "changed": {path: Path(path).stat().st_mtime_ns for path in paths},
        "shards": [[asdict(one) for one in shard] for shard in shards],
    }
    text = json.dumps(asked, indent=1)
    if path.exists() or path.is_symlink():
        if (written := _read(path)) == text:
            return
        raise DataError(
            f"{folder} holds another preparation ({_difference(written, json.loads(text))}): repeat its "
            "command to go on, or choose another folder."
        )
    if any(one.name not in (LOCK, partial_path(path).name) for one in folder.iterdir()):
        raise DataError(f"{folder} holds other files: choose a folder that is empty or does not exist.")
    write_text(path, text)


def _read(path: Path) -> str:
    """Return the text of the settings. Raises DataError where they cannot be read."""
    try:
        return read_text(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): choose another folder, or mend it."
        ) from None
    except ValueError:
        return ""


def _difference(written: str, now: Mapping[str, Any]) -> str:
    """Return the first difference between the settings of a folder and those of a command, in words."""
    try:
        was = json_value(written)
        return _of_settings(was["settings"], now["settings"]) or _of_files(was, now)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {SETTINGS} is of another version, or damaged"


def _of_settings(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if was["tokenizer"] != now["tokenizer"]:
        return f"another tokenizer: {was['tokenizer']}, now {now['tokenizer']}"
    if was["tokenizer_hash"] != now["tokenizer_hash"]:
        return f"the files of the tokenizer {now['tokenizer']} have changed since"
    if (was["column"], was["chats"]) != (now["column"], now["chats"]):
        return f"another --column: {_column(was)}, now {_column(now)}"
    if was["after"] != list(now["after"]):
        return f"another --end: {_tokens(was['after'])}, now {_tokens(now['after'])}"
    return ""


def _column(settings: Mapping[str, Any]) -> str:
    return "conversations" if settings["chats"] else str(settings["column"])


def _tokens(numbers: Sequence[int]) -> str:
    return f"token {' '.join(map(str, numbers))}" if numbers else "none"


def _files(preparation: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the kind and the size of each file."""
    found: dict[str, tuple[str, int]] = {}
    for shard in preparation["shards"]:
        for one in shard:
            _, size = found.get(one["path"], ("", 0))
            found[one["path"]] = one["kind"], size + one["size"]
    return found


def _of_files(preparation_was: Mapping[str, Any], preparation_now: Mapping[str, Any]) -> str:
    was, now = _files(preparation_was), _files(preparation_now)
    if was.keys() != now.keys():
        extra = next(iter([*(was.keys() - now.keys()), *(now.keys() - was.keys())]))
        return f"another source: {extra} is {'no longer' if extra in was else 'newly'} among the files"
    for path, (kind, size) in now.items():
        if kind != was[path][0]:
            return f"{'without' if kind == 'lines' else 'with'} --lines"
        if size != was[path][1]:
            return f"{path} has another size"
        if preparation_was["changed"][path] != preparation_now["changed"][path]:
            return f"{path} was written again since"
    return "another --shard, or another order of the files"
