import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.app.data.corpus_manifest import CorpusIndex, write_index
from plait.app.data.recorded_tokenizer import record_tokenizer, recorded_tokenizer, tokenizer_mismatch
from plait.app.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer, printable
from plait.app.data.tokenizer_json import SurroundingTokens, files_hash, tokenizer_files
from plait.errors import ConfigError, DataError


def test_the_byte_tokenizer_gives_each_byte_as_its_token() -> None:
    tokenizer = open_tokenizer("bytes")
    tokens = tokenizer.encode(["naïve ".encode(), b"text"])
    assert tokens.tolist() == list("naïve text".encode())
    assert tokenizer.decode(tokens.tolist()) == "naïve text"
    assert tokenizer.vocab == 256
    assert [one.tolist() for one in tokenizer.encode_each(["ab", ""])] == [[97, 98], []]
    assert (tokenizer.prompt("é"), tokenizer.token(65)) == ([0xC3, 0xA9], "A")
    assert tokenizer.surrounding("") == tokenizer.surrounding(None) == SurroundingTokens()
    with pytest.raises(ConfigError, match="--end 'x': bytes have no such token"):
        tokenizer.surrounding("x")


def test_invalid_bytes_and_control_characters_are_replaced_in_decoded_text() -> None:
    assert ByteTokenizer().decode([65, 255, 66, 5000, 67]) == "A�B�C"
    assert printable("a\n\tb\x1b[31m\x00") == "a\n\tb�[31m�"


def test_a_tokenizer_json_encodes_and_decodes(word_tokenizer: Path) -> None:
    tokenizer = open_tokenizer(str(word_tokenizer))
    assert tokenizer.encode([b"a b", b"c what"]).tolist() == [1, 2, 3, 0]
    assert tokenizer.decode([1, 3, 99]) == "a c"
    assert tokenizer.vocab == 4
    assert tokenizer.encode([]).tolist() == []


def test_surrounding_tokens_are_added_once_around_a_document() -> None:
    around = SurroundingTokens((7, 8), (5, 6))
    for inner, whole in {
        (): [],
        (1,): [7, 8, 1, 5, 6],
        (7,): [7, 5, 6],
        (8, 1): [7, 8, 8, 1, 5, 6],
        (1, 5): [7, 8, 1, 5, 6],
        (1, 5, 6): [7, 8, 1, 5, 6],
        (1, 6): [7, 8, 1, 6, 5, 6],
        (6, 5): [7, 8, 6, 5, 6],
        (5,): [7, 8, 5, 6],
    }.items():
        completed = around.complete(np.array(inner, dtype=np.uint32))
        assert (completed.tolist(), completed.dtype) == (whole, np.uint32), inner
    assert around.ending_with(None) == around.ending_with(5) == around
    assert around.ending_with(9) == SurroundingTokens((7, 8), (5, 6, 9))
    assert SurroundingTokens().complete(np.array([3])).tolist() == [3]


def test_a_tokenizer_that_changes_texts_and_adds_tokens_around_them(word_tokenizer: Path) -> None:
    """With a normalizer, a post-processor, added tokens and names of tokens beside it."""
    folder = word_tokenizer.parent
    written = json.loads(word_tokenizer.read_text())
    post = {"type": "TemplateProcessing", "pair": [], "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
    post["single"][:0] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}]  # type: ignore[index]
    post["special_tokens"] = {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}  # type: ignore[assignment]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [added | {"id": 4, "content": "<s>", "special": True}]
    written |= {"normalizer": {"type": "Lowercase"}, "post_processor": post, "added_tokens": tokens}
    word_tokenizer.write_text(json.dumps(written))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(
        '{"additional_special_tokens": ["<new>", {"content": "<x>"}]}'
    )
    tokenizer = FileTokenizer(folder)
    special = [token.content for token in tokenizer.reader.get_added_tokens_decoder().values()]
    assert special == ["<s>", "</s>", "<new>", "<x>"]
    assert (tokenizer.vocab, tokenizer.name, tokenizer.token(5)) == (8, "tokenizer.json", "</s>")
    assert [one.tolist() for one in tokenizer.encode_each(["A b", "<s>a", ""])] == [[1, 2], [4, 1], []]
    assert tokenizer.encode([b"A b", b"<s>C", b"a</s>", b""]).tolist() == [4, 1, 2, 5, 4, 3, 5, 4, 1, 5]
    assert tokenizer.reader.encode("a<x>").ids == [4, 1, 7]
    assert (tokenizer.prompt("a"), tokenizer.prompt("<s>a"), tokenizer.prompt("")) == ([4, 1], [4, 1], [4])
    assert tokenizer.surrounding(None) == SurroundingTokens((4,), (5,))
    assert tokenizer.surrounding("") == SurroundingTokens((4,), ())
    assert tokenizer.surrounding("c") == SurroundingTokens((4,), (3,))
    assert tokenizer.decode([4, 1, 5, 3, 8]) == "a c"
    assert tokenizer.decode([4, 1, 5], special=True) == "<s> a </s>"
    assert tokenizer.unwritten_start() == "", "it is written"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"split_special_tokens": True}))
    assert FileTokenizer(folder).encode_each(["<s>"])[0].tolist() == [0, 0, 0]
    post["single"].insert(0, post["single"][1])  # type: ignore[attr-defined]
    word_tokenizer.write_text(json.dumps(written))
    with pytest.raises(DataError, match="post_processor that changes the tokens of a text: give one without"):
        FileTokenizer(folder).surrounding(None)
    written["post_processor"] = None
    word_tokenizer.write_text(json.dumps(written))
    assert FileTokenizer(folder).unwritten_start() == "<s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert FileTokenizer(folder).unwritten_start() == ""
    for wrong, told in (
        ({"eos_token": 3}, "has eos_token = 3: give the token's text"),
        ({"add_bos_token": "yes"}, 'has add_bos_token = "yes": give true or false'),
        ({"added_tokens_decoder": {"9": {"content": 5}}}, "has tokens that cannot be read"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=told):
            FileTokenizer(folder)


def test_a_corpus_keeps_the_files_of_its_tokenizer(word_tokenizer: Path, tmp_path: Path) -> None:
    own, folder = word_tokenizer.parent, tmp_path / "corpus"
    (own / "additional_chat_templates").mkdir()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (own / name).write_text("{}")
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja", "other.txt"):
        (own / name).write_text(name)
    renamed = own / "words.json"
    renamed.write_bytes(word_tokenizer.read_bytes())
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
    names.append("additional_chat_templates/tools.jinja")
    assert [*tokenizer_files(str(own))] == [*tokenizer_files(str(renamed))] == names
    assert tokenizer_files("bytes") == tokenizer_files(str(own / "none")) == {}
    record_tokenizer(folder, str(renamed))
    kept = {str(one.relative_to(folder / "tokenizer")) for one in (folder / "tokenizer").rglob("*.j*")}
    assert kept == {*names}
    digest = files_hash(str(own))
    assert digest == files_hash(str(renamed)) == files_hash(str(folder / "tokenizer"))
    assert (len(digest), files_hash("bytes")) == (16, "")

    assert recorded_tokenizer(str(folder)) is None, "without an index"
    index = CorpusIndex("tokenizer.json", 4, "uint16", None, True, (), digest)
    write_index(folder, index)
    assert recorded_tokenizer(str(folder)) == str(folder / "tokenizer")
    write_index(tmp_path, replace(index, tokenizer="bytes"))
    assert recorded_tokenizer(str(tmp_path)) == "bytes"

    tokenizer = open_tokenizer(str(renamed))
    assert tokenizer_mismatch(folder, index, tokenizer) == ""
    other = replace(index, vocab=5)
    assert tokenizer_mismatch(folder, other, tokenizer) == (
        f"{folder} was prepared with tokenizer.json (vocabulary 5), and the tokenizer given is words.json "
        "(vocabulary 4)"
    )
    assert "the tokenizer given is bytes (vocabulary 256)" in tokenizer_mismatch(
        folder, index, ByteTokenizer()
    )
    was = f"{folder} was prepared with another tokenizer than {renamed}, which"
    (own / "chat_template.jinja").write_text("another")
    assert files_hash(str(own)) != digest
    assert tokenizer_mismatch(folder, index, tokenizer) == f"{was} has another chat template"
    assert tokenizer_mismatch(folder, replace(index, chats=False), tokenizer) == ""
    written = renamed.read_text()
    renamed.write_text(written.replace('"Whitespace"', '"WhitespaceSplit"'))
    rules = tokenizer_mismatch(folder, index, open_tokenizer(str(renamed)))
    assert rules == f"{was} divides texts into tokens by other rules"
    renamed.write_text(written.replace('"a"', '"z"'))
    numbers = tokenizer_mismatch(folder, index, open_tokenizer(str(renamed)))
    assert numbers == f"{was} gives its tokens other numbers"


def test_a_missing_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .* is no file"):
        open_tokenizer(str(tmp_path / "none.json"))


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"hello": 1}))
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        open_tokenizer(str(path))


def test_a_tokenizer_json_without_the_tokenizers_package_is_refused(
    word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ConfigError, match=r"the extra tokenizers of plait brings: .* -m pip install tokenizers"
    ):
        open_tokenizer(str(word_tokenizer))
