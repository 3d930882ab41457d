"""Conversations as training data: tokens by a tokenizer's own chat template, and which of them are answers.

A record has `messages`, each with `role` and `content`, of which those of the assistant are to be learnt; or
a `prompt` and a `completion`, as text or as messages, of which the completion is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.data.tokenizer import Tokens
from plait.errors import ConfigError, DataError

Message = Mapping[str, Any]
FIELDS = ("messages", "prompt", "completion")
_ANSWERS = "assistant"
_OTHER_ROLES = frozenset({"user", "system", "developer", "tool", "function", "ipython"})
_MARKS_ANSWERS = "{% generation"


class EncodedChat(NamedTuple):
    """A conversation in tokens."""

    tokens: Tokens
    answers: NDArray[np.bool_]
    """Whether each token belongs to an answer, and so is to be predicted."""


def holds_chats(fields: Collection[str]) -> bool:
    """Return whether records with these fields are conversations."""
    return "messages" in fields or {"prompt", "completion"} <= set(fields)


def unknown_roles(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the roles in a conversation that are neither the assistant's nor others that are usual."""
    fields = [(name, record[name]) for name in FIELDS if isinstance(record.get(name), list | Mapping)]
    roles = [str(message["role"]) for name, found in fields for message in _messages_of(found, name)]
    return tuple(dict.fromkeys(role for role in roles if role not in {_ANSWERS, *_OTHER_ROLES}))


class ChatEncoder:
    """Encodes conversations with the tokenizer and chat template in a folder; needs transformers."""

    def __init__(self, folder: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError(
                "chats need the package transformers: pip install 'plait[huggingface]'."
            ) from None
        path = Path(folder).expanduser()
        path = path.parent if path.is_file() else path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # the library raises many types
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{path} holds no tokenizer that transformers can read: {reason}") from None
        self._name = str(path)
        end = self._tokenizer.eos_token
        self._end = "" if end is None else end

    def encode(self, record: Mapping[str, Any]) -> EncodedChat:
        """Return a conversation in tokens. Raises DataError for a record that is none, by what is missing."""
        if record.get("messages") is not None:
            return self._messages([], _messages_of(record["messages"], "messages"))
        if not {"prompt", "completion"} <= record.keys():
            raise DataError(f"has neither messages nor prompt and completion (it has: {', '.join(record)})")
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + completion + self._end
            return self._marked(text, [(len(prompt), len(text))])
        before = _messages_of(prompt, "prompt")
        return self._messages(before, _messages_of(completion, "completion"))

    def question(self, text: str) -> Tokens:
        """Return a user's message in tokens, up to where the answer begins."""
        asked = self._rendered([{"role": "user", "content": text}], add_generation_prompt=True)
        return np.array(self._tokenizer(asked, add_special_tokens=False)["input_ids"], dtype=np.uint32)

    @property
    def end_of_answer(self) -> tuple[int, ...]:
        """The token that ends an answer, if the tokenizer has one."""
        number = self._tokenizer.eos_token_id
        return () if number is None else (int(number),)

    def _messages(self, before: Sequence[Message], rest: Sequence[Message]) -> EncodedChat:
        """Return messages in tokens; answers are those of the assistant in `rest`, not in `before`."""
        messages, first = [*before, *rest], len(before)
        template = self._template()
        if not first and _MARKS_ANSWERS in template.replace("{%-", "{%"):
            found = self._tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            return EncodedChat(
                np.array(found["input_ids"], dtype=np.uint32), np.array(found["assistant_masks"], dtype=bool)
            )
        whole = self._rendered(messages)
        spans = []
        for number in range(first, len(messages)):
            if messages[number]["role"] == _ANSWERS:
                asked = self._rendered(messages[:number], add_generation_prompt=True)
                answered = self._rendered(messages[: number + 1])
                if not (whole.startswith(answered) and answered.startswith(asked)):
                    raise DataError(
                        f"has answers whose place in the text cannot be found, since the chat template of "
                        f"{self._name} changes earlier messages: give one with generation marks"
                    )
                spans.append((len(asked), len(answered)))
        return self._marked(whole, spans)

    def _template(self) -> str:
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ConfigError(
                f"the tokenizer in {self._name} has no chat template: add chat_template.jinja to that folder."
            )
        return template

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        if not messages:
            options = {}
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # templates raise their own
            reason = " ".join(str(error).split()).rstrip(".")[:200]
            raise DataError(f"is refused by the chat template of {self._name}: {reason}") from None
        return text

    def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> EncodedChat:
        """Encode a text; answers are the tokens that overlap `spans` of characters."""
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        answers = np.zeros(len(offsets), dtype=bool)
        for begin, end in spans:
            answers |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
        return EncodedChat(np.array(found["input_ids"], dtype=np.uint32), answers)


def _messages_of(found: Any, name: str) -> list[Message]:
    """Return a field of a record as messages; DataError where it is none.

    In some tables a conversation is a list for each field. Fields that are null, as tables have them where
    only other messages have one, are left out by transformers.
    """
    if isinstance(found, Mapping) and all(isinstance(one, list) for one in found.values()):
        found = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    is_list = isinstance(found, list) and all(isinstance(one, Mapping) and "role" in one for one in found)
    if not is_list:
        raise DataError(f"has {name} that are no list of messages with role and content")
    messages: list[Message] = found
    return messages
