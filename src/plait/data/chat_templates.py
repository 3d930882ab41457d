"""A tokenizer's chat template: what it reads of a conversation, and the text that it makes of one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import signature
from typing import Any

from plait.data.chat_records import ANSWERS, Message, joined_parts, part_texts
from plait.data.json_records import whole_characters
from plait.errors import ConfigError, DataError

Span = tuple[int, int]
"""Characters of a text: the first one, and the one after the last."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?P<end>end)?generation\s*[-+]?%\}")
"""The marks around what the assistant generates, which are no tags of jinja2's own."""
_NOT_SPOKEN = frozenset({"system", "developer"})
"""Roles whose messages stand before a conversation."""
_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})
"""Names of one field: transformers gives a template the name that it reads."""


class ChatTemplate:
    """A chat template of a tokenizer of transformers; `name`: its folder, for errors."""

    def __init__(self, tokenizer: Any, name: str, tools: Any) -> None:
        """Choose the template, by whether there are `tools`. Raises ConfigError where there is none."""
        self._tokenizer, self._name = tokenizer, name
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {name} has no chat template: add chat_template.jinja to that folder."
            )
        try:
            self._source: str = tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise ConfigError(
                f"the tokenizer in {name} has the chat templates {', '.join(tokenizer.chat_template)}, and "
                "none is named default: add chat_template.jinja to that folder."
            ) from None

    @property
    def marks_answers(self) -> bool:
        """Whether the template says what the assistant generates."""
        return _GENERATION.search(self._source) is not None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of what the template reads, but those that transformers' own function takes."""
        own = signature(self._tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
        return frozenset(_undeclared(self._source) - own)

    @cached_property
    def _words(self) -> frozenset[str]:
        """The names and texts in the template's code."""
        import jinja2

        tokens = jinja2.Environment().lex(self._source)
        return frozenset(word.strip("'\"") for _, kind, word in tokens if kind in ("name", "string"))

    def reads(self, name: str) -> bool:
        """Return whether the template may read a field of messages."""
        return bool(self._words & (_REASONING if name in _REASONING else {name}))

    def text(self, messages: Sequence[Message], variables: Mapping[str, Any], *, asks: bool = False) -> str:
        """Return the text of messages; `asks`: and the beginning of an answer to them.

        Raises DataError for messages that the template refuses.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=asks, **variables
            )
        except Exception as error:  # templates raise their own
            raise self._refused(error, messages, variables) from None
        return whole_characters(text)

    def marked_text(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and where the template marks it as generated.

        By the function that `apply_chat_template` calls, which gives these places as tokens only.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self._tokenizer.special_tokens_map, **variables}
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._source,
                return_assistant_tokens_mask=True,
                **given,
            )
        except Exception as error:  # templates raise their own
            raise self._refused(error, messages, variables) from None
        return whole_characters(texts[0]), [(begin, end) for begin, end in spans[0]]

    def readable(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Sequence[Message]:
        """Return messages whose content the template can read: as parts where it does, else as one text."""
        given = [one["content"] for one in messages if isinstance(one.get("content"), list)]
        if not given:
            return messages
        values = [value for parts in given for value in (parts, *parts) if not isinstance(value, str)]
        printed = [show(value) for value in values for show in (str, json.dumps)]
        try:
            text = self.text(messages, variables)
        except DataError:
            text = ""
        is_read = (
            text and all(_shows(text, one) for one in messages) and not any(one in text for one in printed)
        )
        return messages if is_read else [joined_parts(one) for one in messages]

    def left_out(self, messages: Sequence[Message], text: str) -> tuple[str, ...]:
        """Return the roles of messages whose content is not in the text that the template makes of them."""
        roles = dict.fromkeys(str(one["role"]) for one in messages if not _shows(text, one))
        return tuple(roles)

    def _refused(
        self, error: Exception, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> DataError:
        """Return the error for messages that the template refuses, by what would be accepted."""
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        first = next((at for at, one in enumerate(messages) if one["role"] not in _NOT_SPOKEN), None)
        if first is not None and messages[first]["role"] == ANSWERS:
            asked = [*messages[:first], {"role": "user", "content": "?"}, *messages[first:]]
            with suppress(Exception):  # templates raise their own
                self._tokenizer.apply_chat_template(asked, tokenize=False, **variables)
                return DataError(
                    f"begins with the {ANSWERS}, which the chat template of {self._name} refuses ({reason}): "
                    "put a message of the user before its first answer, or leave that answer out"
                )
        return DataError(f"is refused by the chat template of {self._name}: {reason}")


def _shows(text: str, message: Message) -> bool:
    """Return whether a text has a message's content, without reasoning, as JSON or spaced otherwise too."""
    given = message.get("content") or ""
    return all(_has(text, one.strip()) for one in (part_texts(given) if isinstance(given, list) else [given]))


def _has(text: str, content: str) -> bool:
    forms = content, content.rpartition("</think>")[2].strip(), json.dumps(content, ensure_ascii=False)[1:-1]
    return any(one in text for one in forms) or all(line.strip() in text for line in content.splitlines())


def _undeclared(template: str) -> set[str]:
    """Return the names that a template reads and does not set itself."""
    import jinja2
    from jinja2 import meta

    plain = _GENERATION.sub(lambda found: "{% endif %}" if found["end"] else "{% if true %}", template)
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(plain))
    except jinja2.TemplateError:  # which transformers reports when it renders
        return set()
