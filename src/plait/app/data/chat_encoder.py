"""Conversations as training data: tokens by a tokenizer's chat template, and which of them are answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.app.data.chat_records import (
    ANSWERS,
    ChatRecord,
    chat_record,
    holds_chats,
    message_fields,
    text_record,
    unknown_roles,
)
from plait.app.data.chat_templates import ChatTemplate, Span
from plait.app.data.document_sources import SourceFile, SourceRange, field_names, read_records
from plait.app.data.json_records import LinePlace, read_lines, read_record
from plait.app.data.tokenizer import Tokens
from plait.app.data.tokenizer_json import SurroundingTokens, post_processed
from plait.errors import ConfigError, DataError, missing_package

_CALLS = ("tool_calls", "function_call")
"""Fields of messages that are the answer, where there is no content."""


class EncodedPart(NamedTuple):
    """Tokens of one document, or of a part of it."""

    tokens: Tokens
    answers: NDArray[np.bool_] | None = None
    """Whether each is part of an answer, and so is to be predicted; None but for conversations."""
    ends: bool = True
    """Whether the document ends with them."""
    unread: tuple[str, ...] = ()
    """The fields of its row and messages that nothing reads."""
    unknown_roles: tuple[str, ...] = ()
    """Roles of a conversation that are neither the assistant's nor others that are usual."""
    left_out_roles: tuple[str, ...] = ()
    """Of messages that the chat template leaves out."""
    left_out: int = 0
    """Documents of less than two tokens, of which none can be predicted; 0 or 1."""


class ChatEncoder:
    """Encodes conversations with the tokenizer and chat template in a folder; needs transformers."""

    def __init__(self, folder: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            what = "a corpus of conversations"
            raise ConfigError(f"{missing_package(what, 'transformers', 'huggingface')}.") from None
        path = Path(folder).expanduser()
        path = path.parent if path.is_file() else path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises many types
            reason = " ".join(str(error).split())[:200]
            if "trust_remote_code" in str(error):
                reason = "it needs Python code in that folder (auto_map), which plait does not run"
            raise ConfigError(f"{path} holds no tokenizer that transformers can read: {reason}") from None
        self._path = path

    def encode(self, record: Mapping[str, Any]) -> EncodedPart:
        """Return a conversation's tokens, and which belong to answers. Raises DataError for other records."""
        if (texts := text_record(record)) is not None:
            prompt, completion, unread = texts
            marked = self._marked(prompt + completion, [(len(prompt), len(prompt + completion))])
            return EncodedPart(*self._completed(*marked), unread=unread)
        template = self._template if record.get("tools") is None else self._tool_template
        chat = chat_record(record, template.variables)
        unread = tuple(name for name in message_fields(chat) if not template.reads(name))
        if calls := [name for name in unread if name in _CALLS]:
            raise DataError(
                f"has messages with {calls[0]}, which the chat template of {self._path} does not read: give "
                "a template that does, or leave such conversations out"
            )
        chat = replace(chat, messages=template.readable(chat.messages, chat.variables))
        text, spans = self._answers(template, chat)
        return EncodedPart(
            *self._marked(text, spans),
            unread=(*chat.unread, *(f"messages.{name}" for name in unread)),
            unknown_roles=unknown_roles(chat),
            left_out_roles=template.left_out(chat.messages, text),
        )

    def question(self, text: str) -> Tokens:
        """Return a user's message in tokens, up to where the answer begins."""
        asked = self._template.text([{"role": "user", "content": text}], {}, asks=True)
        return np.array(self._tokenizer(asked, add_special_tokens=False)["input_ids"], dtype=np.uint32)

    @property
    def end_of_answer(self) -> tuple[int, ...]:
        """The token that ends an answer, as a tuple of one; empty if the tokenizer has none."""
        number = self._tokenizer.eos_token_id
        return () if number is None else (int(number),)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, str(self._path), None)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        """The template of conversations with tools, which may be another one."""
        return ChatTemplate(self._tokenizer, str(self._path), [])

    @cached_property
    def _around(self) -> SurroundingTokens:
        """The tokens before and after a prompt with its completion, where both are plain texts."""
        own = post_processed(self._tokenizer.backend_tokenizer, self._path)
        return own.ending_with(self._tokenizer.eos_token_id)

    def _answers(self, template: ChatTemplate, chat: ChatRecord) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the ranges of characters in it that are answers to learn."""
        places = range(chat.first, len(chat.messages))
        if not template.marks_answers:
            text = template.text(chat.messages, chat.variables)
            return text, [self._span(template, chat, text, place) for place in places if chat.learnt[place]]
        text, marked = template.marked_text(chat.messages, chat.variables)
        answers = [place for place in places if chat.messages[place]["role"] == ANSWERS]
        excepted = [self._span(template, chat, text, place) for place in answers if not chat.learnt[place]]
        if chat.first:
            before = template.text(chat.messages[: chat.first], chat.variables)
            self._require_beginning(text, before, chat.first)
            excepted.append((0, len(before)))
        return text, [span for span in marked if not any(a <= span[0] < b for a, b in excepted)]

    def _span(self, template: ChatTemplate, chat: ChatRecord, text: str, place: int) -> Span:
        """Return where an answer stands in the text of a conversation."""
        until = template.text(chat.messages[: place + 1], chat.variables)
        self._require_beginning(text, until, place + 1)
        if not place:  # nothing is asked: the answer begins behind what a template writes to ask for one
            asked = template.text(chat.messages[:1], chat.variables, asks=True).removeprefix(until)
            return until.find(asked) + len(asked) if asked in until else 0, len(until)
        before = template.text(chat.messages[:place], chat.variables, asks=True)
        self._require_beginning(until, before, place)
        return len(before), len(until)

    def _require_beginning(self, text: str, beginning: str, messages: int) -> None:
        """Raise DataError unless the text of a conversation begins with that of its first `messages`."""
        if text.startswith(beginning):
            return
        same = next((at for at, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b), len(text))
        raise DataError(
            f"has an answer whose place in the text cannot be found: the chat template of {self._path} "
            f"changes what it wrote of the first {messages} messages ({beginning[same:][:30]!r}) when a "
            "later one comes, as those of models that think do: give a template with generation marks, or "
            "write a row for each answer, with the messages before it as the prompt and the answer as the "
            "completion"
        )

    def _completed(self, tokens: Tokens, answers: NDArray[np.bool_]) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return a prompt and its completion with the tokens around a text, of which the last are learnt."""
        before, after = self._around.opening(tokens), self._around.closing(tokens)
        whole = np.concatenate([np.array(part, np.uint32) for part in (before, tokens, after)])
        return whole, np.concatenate([np.zeros(len(before), bool), answers, np.ones(len(after), bool)])

    def _marked(self, text: str, spans: Sequence[Span]) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return the tokens of a text, and which of them overlap `spans` of characters: the answers."""
        try:
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"cannot be divided into tokens by the tokenizer in {self._path} ({error})"
            ) from None
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        answers = np.zeros(len(offsets), dtype=bool)
        for begin, end in spans:
            answers |= (offsets[:, 0] < end) & (offsets[:, 1] > begin) & (begin < end)
        return np.array(found["input_ids"], dtype=np.uint32), answers


_COLUMN = "text"
_OF_CHATS = re.compile(rb'"(messages|conversations|completion)"\s*:')
_RECORDS = ("jsonl", "json", "table")


def require_known_fields(files: Sequence[SourceFile]) -> None:
    """Raise DataError for a file whose first row has no field of a conversation or text."""
    for file in files:
        fields = field_names(file) if file.size else []
        if not fields or holds_chats(fields) or _COLUMN in fields:
            continue
        remedy = "rename them, or name the one that holds the text by `plait data prepare --column`"
        if {"chosen", "rejected"} <= set(fields):
            remedy = "preferences are learnt in a loop of your own, with plait.dpo_loss"
        raise DataError(
            f"{file.path} has rows of {', '.join(sorted(fields)[:8])}, and of none of the fields that are "
            "read: messages (each with role and content), conversations (each with from and value), prompt "
            f"and completion, or text; {remedy}."
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
