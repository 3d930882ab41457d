"""Chat templates of strangers: neither endless nor without bounds, and no way to Python's objects."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from parity.chats import PLAIN, save_tokenizer
from plait.app.data import chat_templates
from plait.app.data.bounded_process import BoundedProcess, CallFailedError
from plait.app.data.chat_encoder import ChatEncoder
from plait.errors import DataError

pytestmark = pytest.mark.transformers
CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
_LOOP = "{% for i in range(99999) %}"
_DOUBLED = (
    "{% set n = namespace(s='abc' * 1000) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
STRANGE = {
    "range": ("{% for i in range(10 ** 12) %}a{% endfor %}", "Range too big"),
    "loops": (_LOOP * 4 + "a" + "{% endfor %}" * 4, r"more than 0\.1 seconds"),
    "doubled": (_DOUBLED + "{{ n.s }}", r"too much memory|more than 0\.1 seconds"),
    "repeated": ("{{ ('a' * (6 * 10 ** 8)) | length }}", "too much memory"),
    "centred": ("{{ 'a' | center(10 ** 11) }}", "too much memory"),
    "format": ("{{ '%99999999999d' % 1 }}", "too much memory|too (big|large)"),
    "power": ("{{ 10 ** (10 ** 9) }}", r"more than 0\.1 seconds"),
    "macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    "change": ("{{ messages.append(1) }}", "unsafe"),
    "syntax": ("{% for %}", "Expected|expected"),
    "include": ("{% include 'other.jinja' %}", "no loader"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_template_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    template, reason = STRANGE[name]
    if "seconds" in reason:  # where another reason is expected, a busy machine must not give this one
        monkeypatch.setattr(chat_templates, "_SECONDS", 0.1)
    save_tokenizer(tmp_path, template)
    encoder = ChatEncoder(str(tmp_path))
    with pytest.raises(DataError, match=rf"is refused by the chat template of .*({reason})"):
        encoder.encode({"messages": CHAT})


def test_the_conversation_after_a_refused_one_is_rendered(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(chat_templates, "_SECONDS", 60.0)
    endless = "{% if messages | length > 2 %}" + _LOOP * 4 + "{% endfor %}" * 4 + "{% endif %}" + PLAIN
    save_tokenizer(tmp_path, endless)
    encoder = ChatEncoder(str(tmp_path))
    before = encoder.encode({"messages": CHAT})
    encoder._template._process._seconds = 0.1
    with pytest.raises(DataError, match="more than"):
        encoder.encode({"messages": CHAT * 2})
    encoder._template._process._seconds = 60.0
    assert encoder.encode({"messages": CHAT}).tokens.tolist() == before.tokens.tolist()


def test_a_process_that_ends_is_named_and_another_one_goes_on() -> None:
    """None of them stays, nor its connection: whether it ended, took too long or nobody needs it."""
    calls: dict[str, Any] = {"number": os.getpid, "end": lambda: os._exit(1), "sleep": lambda: time.sleep(60)}
    handles = [*os.pipe(), os.dup2(0, 200)]
    calls["open"] = lambda: [one for one in handles if os.path.exists(f"/proc/self/fd/{one}")]
    process = BoundedProcess(lambda name: calls[name](), seconds=60, memory=1 << 28)
    for call, told in (("end", "its process was ended"), ("sleep", r"it takes more than 0\.1 seconds")):
        process._seconds = 60
        number, connection = process.call("number"), process._connection
        assert number == process.call("number") != os.getpid()
        process._seconds = 0.1 if call == "sleep" else 60
        with pytest.raises(CallFailedError, match=told):
            process.call(call)
        assert connection.closed
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    process._seconds = 60
    number = process.call("number")
    with pytest.raises(CallFailedError, match="'none'"):
        process.call("none")
    assert process.call("number") == number, "an error ends nothing"
    assert process.call("open") == [], "it has neither files nor locks of the other process"
    for one in handles:
        os.close(one)
    del process
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_call_that_its_own_alarm_has_ended_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that the waiting process looks only then."""
    monkeypatch.setattr(Connection, "poll", lambda connection, seconds: wait([connection]) != [])
    process = BoundedProcess(lambda: time.sleep(60), seconds=0.1, memory=1 << 28)
    with pytest.raises(CallFailedError, match=r"it takes more than 0\.1 seconds"):
        process.call()
