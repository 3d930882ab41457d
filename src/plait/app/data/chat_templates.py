"""A tokenizer's chat template: the fields of a conversation that it reads, and the text it renders.

A template is a program, and strangers write them. transformers runs it without access to Python's objects;
here that is done in a process of its own, which is ended where it takes too long or too much memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import signature
from typing import Any

from plait.app.data.bounded_process import BoundedProcess, CallFailedError
from plait.app.data.chat_records import ANSWERS, Message, joined_parts, part_texts
from plait.app.data.json_records import whole_characters
from plait.errors import ConfigError, DataError

Span = tuple[int, int]
"""Characters of a text: the first one, and the one after the last."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?P<end>end)?generation\s*[-+]?%\}")
"""The marks around what the assistant generates, which are no tags of jinja2's own."""
_SECONDS, _MEMORY = 5.0, 1 << 29
"""What a template may take for one conversation: seconds, and bytes beyond those that plait has."""
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
            source = tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise ConfigError(
                f"the tokenizer in {name} has the chat templates {', '.join(tokenizer.chat_template)}, and "
                "none is named default: add chat_template.jinja to that folder."
            ) from None
        if not isinstance(source, str):
            raise ConfigError(f"the tokenizer in {name} has a chat template that is no text: mend it.")
        self._source = source
        self._process = BoundedProcess(self._computed, _SECONDS, _MEMORY)

    def _call(self, what: str, *arguments: Any) -> Any:
        """Return the result of the method `what`, called in the bounded child process."""
        try:
            return self._process.call(what, *arguments)
        except CallFailedError as error:
            raise DataError(f"is refused by the chat template of {self._name}: {error}") from None

    def _computed(self, what: str, *arguments: Any) -> Any:
        """Return the result of the method `what`; runs in the bounded child process."""
        return getattr(self, what)(*arguments)

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the text that the assistant generates."""
        return _GENERATION.search(self._source) is not None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the template's variables that are not arguments of `apply_chat_template`."""
        own = signature(self._tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
        return frozenset(self._call("_undeclared")) - own

    @cached_property
    def _words(self) -> frozenset[str]:
        """The names and texts in the template's code."""
        return frozenset(self._call("_lexed"))

    def reads(self, name: str) -> bool:
        """Return whether the template may read a field of messages."""
        return bool(self._words & (_REASONING if name in _REASONING else {name}))

    def text(self, messages: Sequence[Message], variables: Mapping[str, Any], *, asks: bool = False) -> str:
        """Return the rendered text of messages, and with `asks` the start of an answer. Raises DataError."""
        return whole_characters(self._rendering("_rendered", messages, variables, asks))

    def marked_text(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and where the template marks it as generated."""
        text, spans = self._rendering("_marked", messages, variables)
        return whole_characters(text), [(begin, end) for begin, end in spans]

    def _rendered(self, messages: list[Message], variables: dict[str, Any], asks: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks, **variables
        )
        return text

    def _marked(self, messages: list[Message], variables: dict[str, Any]) -> tuple[str, list[list[int]]]:
        """Compute `marked_text` by the function that `apply_chat_template` calls, which gives tokens only."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **variables},
        )
        return texts[0], [list(span) for span in spans[0]]

    def _lexed(self) -> list[str]:
        import jinja2

        tokens = jinja2.Environment().lex(self._source)
        return [word.strip("'\"") for _, kind, word in tokens if kind in ("name", "string")]

    def _undeclared(self) -> list[str]:
        """Return the names that the template reads and does not set itself."""
        import jinja2
        from jinja2 import meta

        plain = _GENERATION.sub(
            lambda found: "{% endif %}" if found["end"] else "{% if true %}", self._source
        )
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            return list(meta.find_undeclared_variables(environment.parse(plain)))
        except jinja2.TemplateError:  # which transformers reports when it renders
            return []

    def readable(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Sequence[Message]:
        """Return the messages with content that the template can read: a list of parts, or else one text."""
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
        """Return the roles of messages whose content is missing in the rendered `text`."""
        roles = dict.fromkeys(str(one["role"]) for one in messages if not _shows(text, one))
        return tuple(roles)

    def _rendering(
        self, what: str, messages: Sequence[Message], variables: Mapping[str, Any], *more: Any
    ) -> Any:
        """Return the result of the method `what` for messages. DataError if the template refuses them."""
        try:
            return self._process.call(what, list(messages), dict(variables), *more)
        except CallFailedError as error:
            raise self._refused(error, messages, variables) from None

    def _refused(
        self, error: CallFailedError, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> DataError:
        """Return the error for messages that the template refuses, saying which it would accept."""
        first = next((at for at, one in enumerate(messages) if one["role"] not in _NOT_SPOKEN), None)
        if first is not None and messages[first]["role"] == ANSWERS:
            asked = [*messages[:first], {"role": "user", "content": "?"}, *messages[first:]]
            with suppress(CallFailedError):
                self._process.call("_rendered", asked, dict(variables), False)
                return DataError(
                    f"begins with the {ANSWERS}, which the chat template of {self._name} refuses ({error}): "
                    "put a message of the user before its first answer, or leave that answer out"
                )
        return DataError(f"is refused by the chat template of {self._name}: {error}")


def _shows(text: str, message: Message) -> bool:
    """Return whether a text contains a message's content, also as JSON, or with other spaces."""
    given = message.get("content") or ""
    return all(_has(text, one.strip()) for one in (part_texts(given) if isinstance(given, list) else [given]))


def _has(text: str, content: str) -> bool:
    forms = content, content.rpartition("</think>")[2].strip(), json.dumps(content, ensure_ascii=False)[1:-1]
    return any(one in text for one in forms) or all(line.strip() in text for line in content.splitlines())
