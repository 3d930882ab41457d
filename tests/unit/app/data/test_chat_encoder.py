"""Conversations: which tokens are answers, by the tokenizer's own template, and how rows hold them whole."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import in_one_process

from parity.chats import PLAIN, WORDS, save_tokenizer
from plait.app.data.chat_encoder import ChatEncoder
from plait.app.data.chat_records import holds_chats
from plait.app.data.document_rows import DocumentRows
from plait.app.data.document_sources import divided, files_of
from plait.app.data.encoded_documents import TextEncoding
from plait.app.data.preparation import prepare_corpus, write_shard
from plait.app.data.token_shards import Corpus, TokenShard, open_corpus
from plait.errors import ConfigError, DataError

MARKED = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}{% else %}{{ m['content'] + '<end>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
FORGETFUL = "{{ messages[-1]['content'] }}"
CHAT = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "de"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "ghi"},
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: Any) -> Path:
    """A folder for a tokenizer of single characters."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return folder


def encoder(folder: Path, template: str | None) -> ChatEncoder:
    save_tokenizer(folder, template)
    return ChatEncoder(str(folder))


def answered(folder: Path, template: str, record: Any) -> tuple[str, str]:
    """The text of a conversation, and of its answers, each token in brackets if it has several letters."""
    made = encoder(folder, template)
    names = made._tokenizer.convert_ids_to_tokens
    found = made.encode(record)
    return "".join(names(found.tokens.tolist())), "".join(names(found.tokens[found.answers].tolist()))


pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_the_assistants_turns_are_answers(tokenizer_folder: Path, template: str) -> None:
    text, answers = answered(tokenizer_folder, template, {"messages": CHAT})
    assert text == "[user]abc<end>[assistant]de<end>[user]f<end>[assistant]ghi<end>"
    assert answers == "de<end>ghi<end>"


def test_completions_are_answers_and_prompts_are_not(tokenizer_folder: Path) -> None:
    text, answers = answered(tokenizer_folder, PLAIN, {"prompt": "abc ", "completion": "de"})
    assert (text, answers) == ("abc de<end>", "de<end>")
    text, answers = answered(tokenizer_folder, PLAIN, {"prompt": CHAT[:3], "completion": CHAT[3:]})
    assert answers == "ghi<end>"


@pytest.mark.parametrize(
    ("template", "record", "error", "message"),
    [
        (PLAIN, {"id": "a"}, DataError, "prompt and completion, nor text .it has: id"),
        (PLAIN, {"messages": "a"}, DataError, "has messages that are no list of messages"),
        (None, {"messages": CHAT}, ConfigError, "has no chat template: add chat_template.jinja"),
        (
            FORGETFUL,
            {"messages": CHAT},
            DataError,
            "changes what it wrote of the first 2 messages",
        ),
        ("{{ nothing.at.all }}", {"messages": CHAT}, DataError, "is refused by the chat template"),
    ],
)
def test_malformed_conversations_and_templates_are_refused(
    tokenizer_folder: Path, template: str | None, record: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        encoder(tokenizer_folder, template).encode(record)


def test_a_conversation_that_is_none_is_named_by_its_place(tokenizer_folder: Path, tmp_path: Path) -> None:
    encoder(tokenizer_folder, PLAIN)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + '\n\n{"messages": 3}\n')
    settings = TextEncoding(str(tokenizer_folder), "text", (), (), 99, "uint16", chats=True)
    with pytest.raises(DataError, match=r"chats\.jsonl:3 has messages that are no list"):
        write_shard(tmp_path, 0, list(divided(files_of(str(path))[0], 1 << 20)), settings)


def _in_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as the name of a file says: JSON lines, a list in JSON, Parquet, or a saved data set."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        names = {name: None for row in rows for name in row}
        table = pytest.importorskip("datasets").Dataset.from_list([names | row for row in rows])
        table.to_parquet(path) if path.suffix == ".parquet" else table.save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", *(pytest.param(name, marks=pytest.mark.full) for name in ("a.parquet", "a"))],
)
def test_a_file_may_mix_messages_sharegpt_prompts_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path, name: str
) -> None:
    in_one_process(monkeypatch)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    encoder(folder, PLAIN)
    turns = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"}]
    rows = [
        {"text": "gh"},
        {"messages": CHAT[:2]},
        {"conversations": turns},
        {"prompt": "ab", "completion": "c"},
        {"text": "i"},
    ]
    sources = [str(_in_file(tmp_path / name, rows))]
    with pytest.raises(
        ConfigError, match="--end 'x': conversations end as the tokenizer's chat template says"
    ):
        prepare_corpus(sources, tmp_path / "out", str(folder), end="x")
    prepare_corpus(sources, tmp_path / "out", str(folder))
    corpus, index = open_corpus(tmp_path / "out")
    assert (index.chats, index.notes()) == (True, [])
    ends = [0, *corpus.document_ends(0, index.documents).tolist()]
    said = "[user]abc<end>[assistant]de<end>", "de<end>"
    expected = [("gh<end>",) * 2, said, said, ("abc<end>", "c<end>"), ("i<end>",) * 2]
    for (begin, end), texts in zip(pairwise(ends), expected, strict=True):
        tokens, answers = corpus.read(begin, end - begin), corpus.answers(begin, end - begin)
        assert ("".join(WORDS[n] for n in tokens), "".join(WORDS[n] for n in tokens[answers])) == texts


@pytest.mark.full
@pytest.mark.parametrize("kind", ["parquet", "dataset", "lists"])
def test_conversations_of_tables_are_those_of_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path, kind: str
) -> None:
    """A field that only other messages have is null in a table: the template must not see it."""
    datasets = pytest.importorskip("datasets")
    in_one_process(monkeypatch)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")  # a process opens a folder once
    encoder(folder, PLAIN.replace("'<end>' }}", "('a' if 'name' in m else 'b') + '<end>' }}"))
    chats = [CHAT, [*CHAT[:3], CHAT[3] | {"name": "x"}]] * 8
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    records: list[Any] = [{"number": number, "messages": chat} for number, chat in enumerate(chats)]
    if kind == "lists":
        fields = ("role", "content", "name")
        records = [{"messages": {key: [one.get(key) for one in chat] for key in fields}} for chat in chats]
    table, source = datasets.Dataset.from_list(records), tmp_path / "table.parquet"
    if kind == "dataset":
        source = tmp_path / "table"
        table.save_to_disk(source)
    else:
        table.to_parquet(source)
    for one in (tmp_path / "chats.jsonl", source):
        index = prepare_corpus([str(one)], tmp_path / f"{one.stem} prepared", str(folder))
        assert (index.chats, index.documents) == (True, 16)
    for name in ("00000.tokens.bin", "00000.answers.bin", "00000.documents.bin"):
        first, second = (tmp_path / f"{one} prepared" / name for one in ("chats", "table"))
        assert first.read_bytes() == second.read_bytes()


def test_an_empty_file_beside_chats_does_not_change_the_kind(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_process(monkeypatch)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    encoder(folder, PLAIN)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_text("")
    (source / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    index = prepare_corpus([str(source)], tmp_path / "out", str(folder))
    assert (index.chats, index.documents) == (True, 1)


def test_a_record_with_messages_conversations_or_prompt_and_completion_is_a_chat() -> None:
    assert holds_chats({"messages": []})
    assert holds_chats({"conversations": []})
    assert holds_chats({"prompt": "", "completion": ""})
    assert not holds_chats({"text": ""})
    assert not holds_chats([])


def rows_of(lengths: list[int], context: int, answers: list[int] | None = None) -> DocumentRows:
    tokens = np.arange(1, sum(lengths) + 1)
    marks = None if answers is None else np.array(answers, dtype=np.uint8)
    shard = TokenShard(tokens, np.cumsum(lengths, dtype=np.int64), marks)
    return DocumentRows(Corpus([shard]), context, 1000, "some")


def test_rows_of_conversations_hold_whole_documents() -> None:
    made = rows_of([3, 2, 4, 9, 1], 6)
    inputs, targets = made.take(np.arange(made.count))
    assert (made.count, made.cut, made.left_out) == (3, 1, 1)
    assert inputs["tokens"].tolist() == [  # type: ignore[index]
        [1, 2, 3, 4, 5, 0],
        [6, 7, 8, 9, 0, 0],
        [10, 11, 12, 13, 14, 15],
    ]
    assert inputs["document_ids"].tolist() == [  # type: ignore[index]
        [0, 0, 0, 1, 1, -1],
        [2, 2, 2, 2, -1, -1],
        [3, 3, 3, 3, 3, 3],
    ]
    assert targets.tolist() == [
        [2, 3, -100, 5, -100, -100],
        [7, 8, 9, -100, -100, -100],
        [11, 12, 13, 14, 15, -100],
    ]


def test_only_answers_are_targets() -> None:
    _, targets = rows_of([4, 2], 6, answers=[0, 0, 1, 1, 1, 0]).take(np.arange(1))
    assert targets.tolist() == [[-100, 3, 4, -100, -100, -100]]


def test_a_tokenizer_comes_from_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked: list[dict[str, Any]] = []

    class Stub:
        @staticmethod
        def from_pretrained(path: Path, **options: Any) -> None:
            asked.append({"path": path, **options})

    monkeypatch.setattr(transformers, "AutoTokenizer", Stub)
    (tmp_path / "tokenizer.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "tokenizer.json"):
        ChatEncoder(str(folder))
    assert asked == [{"path": tmp_path, "local_files_only": True, "trust_remote_code": False}] * 2
