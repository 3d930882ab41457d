"""The settings of a preparation, by which a repeated command is recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.app.data.corpus_index import SETTINGS
from plait.app.data.document_sources import SourceRange
from plait.app.data.encoded_documents import TextEncoding
from plait.app.data.folder_lock import LOCK
from plait.app.data.whole_files import partial_path, write_text
from plait.errors import DataError
from plait.files import json_value, read_text


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
