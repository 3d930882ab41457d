"""What the rows of JSON lines and tables are, by their fields: conversations, or texts."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.chat_records import holds_chats
from plait.data.document_sources import SourceFile, field_names
from plait.errors import DataError

_COLUMN = "text"


def are_chats(files: Sequence[SourceFile]) -> bool:
    """Return whether files are conversations, by the first row of each, and not texts.

    Raises DataError where some are and others are not, and for rows that have none of the fields that are
    read.
    """
    chats = other = None
    for file in files:
        if not file.size:
            continue
        fields = field_names(file)
        if holds_chats(fields):
            chats = chats or file
            continue
        other = other or file
        if fields and _COLUMN not in fields:
            raise DataError(
                f"{file.path} has rows of {', '.join(sorted(fields)[:8])}, and of none of the fields that "
                "are read: messages (each with role and content), prompt and completion, or text; rename "
                "them, or name the one that holds the text by `plait data prepare --column`."
            )
    if chats and other:
        raise DataError(
            f"{chats.path} holds conversations, and {other.path} does not: give them as two sources "
            "(data.mixture)."
        )
    return chats is not None
