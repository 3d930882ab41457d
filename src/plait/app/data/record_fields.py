"""Recognises by their fields whether rows of JSON lines and tables are conversations or texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from plait.app.data.chat_records import holds_chats
from plait.app.data.document_sources import SourceFile, SourceRange, field_names, read_records
from plait.app.data.json_records import LinePlace, read_lines, read_record
from plait.errors import DataError

_COLUMN = "text"
_OF_CHATS = re.compile(rb'"(messages|conversations|completion)"\s*:')
_RECORDS = ("jsonl", "json", "table")


def require_known_fields(files: Sequence[SourceFile]) -> None:
    """Raise DataError for a file whose first row has none of the fields that are read."""
    for file in files:
        fields = field_names(file) if file.size else []
        if not fields or holds_chats(fields) or _COLUMN in fields:
            continue
        remedy = "rename them, or name the one that holds the text by `plait data prepare --column`"
        if {"chosen", "rejected"} <= set(fields):
            remedy = "preferences are learnt in a loop of your own, with plait.dpo_loss"
        raise DataError(
            f"{file.path} has rows of {', '.join(sorted(fields)[:8])}, and of none of the fields that are "
            "read: "
            "messages (each with role and content), conversations (each with from and value), prompt and "
            f"completion, or text; {remedy}."
        )


def are_chats(files: Sequence[SourceFile]) -> bool:
    """Return whether any row of the files is a conversation; other rows may be texts.

    Raises DataError as `require_known_fields`, and where one file holds conversations and another is text.
    """
    require_known_fields(files)
    chats = next((file for file in files if file.size and _has_chat(file)), None)
    other = next((file for file in files if file.size and file.kind not in _RECORDS), None)
    if chats and other:
        raise DataError(
            f"{chats.path} holds conversations, and {other.path} does not: give them as two sources "
            "(data.mixture)."
        )
    return chats is not None


def _has_chat(file: SourceFile) -> bool:
    """Return whether a file has conversations: by a table's columns, or by any row of JSON."""
    if file.kind not in _RECORDS or holds_chats(field_names(file)):
        return file.kind in _RECORDS
    if file.kind == "json":
        whole = SourceRange(file.path, file.kind, 0, file.size, file.size)
        return any(holds_chats(record.keys()) for _, record in read_records(whole, None))
    lines = read_lines(file.path, 0, file.size) if file.kind == "jsonl" else ()
    return any(
        holds_chats(read_record(line, LinePlace(file.path, at)).keys())
        for at, line in lines
        if _OF_CHATS.search(line)
    )
