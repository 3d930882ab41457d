"""Texts as transformers tokenizes them, with tokenizers of each kind: what it gives is what is meant."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import in_one_process

from parity import tokenizers_of_all_kinds as kinds
from parity.pairs import in_quick
from plait.app.data.preparation import prepare_corpus
from plait.app.data.recorded_tokenizer import require_tokens_of_transformers
from plait.app.data.token_shards import open_corpus
from plait.app.data.tokenizer import open_tokenizer
from plait.errors import ConfigError, DataError

pytestmark = pytest.mark.transformers
POSTS = ("", "<bos> $A", "<bos> $A <eos>")
TEXTS = (kinds.TEXT, " x", "\nx ", "a<eos>b <wide> c", "fox foxes", "<wide>x  ", "a<new>b", "")


def transformers_tokenizer(folder: Path) -> Any:
    pytest.importorskip("tokenizers")
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def cut_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut documents after some hundred characters, and write shards in this process."""
    in_one_process(monkeypatch)
    for module in ("encoded_documents", "token_safe_cuts"):
        monkeypatch.setattr(f"plait.app.data.{module}.PART", 1000)
    for module in ("text_files", "token_safe_cuts"):
        monkeypatch.setattr(f"plait.app.data.{module}.AHEAD", 200)
    monkeypatch.setattr("plait.app.data.token_safe_cuts._WINDOW", 2400)


def learnt(source: Path, tokenizer: Path, portion: int | None = None, **options: Any) -> list[list[int]]:
    """The tokens of each document that is prepared from a source."""
    folder = source.parent / f"{source.name} {tokenizer.name} {portion}"
    prepare_corpus([str(source)], folder, str(tokenizer), portion=portion, **options)
    corpus, index = open_corpus(folder)
    ends = corpus.document_ends(0, index.documents)
    return [part.tolist() for part in np.split(corpus.read(0, len(corpus)), ends[:-1])] if len(ends) else []


def shuffled(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    words, gaps = kinds.TEXT.split(" "), ["", "", "", "\n", "\n\n", " ", "<eos>", " <wide> "]
    return " ".join(draw.choice(words) + draw.choice(gaps) for _ in range(count))


def draw_of(letters: list[str] | str, count: int) -> str:
    draw = random.Random(1)
    return "".join(draw.choice(letters) for _ in range(count))


HARD = {
    "one letter": "a" * 5001,
    "digits": draw_of("0123456789", 5000),
    "spaces": " " * 5001 + "x",
    "line ends": "\n" * 5001 + "x",
    "Chinese": draw_of("\u6f22\u5b57\u304b\u306a\u3002", 5000),
    "combining": "e\u0301" * 2500,
    "words": draw_of("ab  ", 5000),
    "line ends of Windows": draw_of(["a\r\n", "b\r\n", "\r\n"], 2000),
    "added tokens": draw_of(["a <wide> ", "<wide>", "b "], 1000),
    "whole words": draw_of(["fox", "es", "fox "], 1500),
    "indented": draw_of(["\n    ", "x", "=", "y ", "  "], 2500),
    "sigma": draw_of("\u03a3\u03c3\u03c2 ", 5000),
}


@pytest.mark.parametrize(
    "kind", in_quick(kinds.KINDS, "byte level, Llama 3", "Metaspace first, Unigram", "Prepend")
)
def test_a_document_has_the_tokens_of_its_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also where it is cut into parts and portions; with the tokens around it once."""
    cut_often(monkeypatch)
    for number, post in enumerate(POSTS):
        folder = kinds.save(tmp_path / str(number), kind, post=post)
        theirs, ours = transformers_tokenizer(folder), open_tokenizer(str(folder))
        assert [ours.reader.encode(one).ids for one in TEXTS] == [theirs(one)["input_ids"] for one in TEXTS]  # type: ignore[union-attr]
        text = shuffled(600, number)
        expected = theirs(text)["input_ids"]
        expected += [] if expected[-1] == theirs.eos_token_id else [theirs.eos_token_id]
        (tmp_path / "a.txt").write_text(text)
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
        for source, portion in (("a.txt", None), ("a.txt", 1500), ("a.jsonl", None)):
            assert learnt(tmp_path / source, folder, portion) == [expected]


@pytest.mark.full
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_texts_without_safe_places_to_cut_have_the_tokens_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cut_often(monkeypatch)
    folder = kinds.save(tmp_path / "tokenizer", kind, post="<bos> $A")
    theirs = transformers_tokenizer(folder)
    for name, text in HARD.items():
        (tmp_path / f"{name}.txt").write_bytes(text.encode())
        for portion in (None, 1500):
            found = learnt(tmp_path / f"{name}.txt", folder, portion)
            assert found == [theirs(text + "<eos>")["input_ids"]], (name, portion)


def test_a_text_that_can_be_cut_nowhere_and_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_often(monkeypatch)
    monkeypatch.setattr("plait.app.data.token_safe_cuts.LARGEST", 4000)
    (tmp_path / "a.txt").write_text("a" * 5000)
    folder = kinds.save(tmp_path / "tokenizer", "byte level")
    with pytest.raises(DataError, match=r"a\.txt has a document of more than .*divide it into documents"):
        learnt(tmp_path / "a.txt", folder)


def test_begin_and_end_tokens_already_in_the_text_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the text has them, as that of a chat template; `--end` stands in place of the tokenizer's."""
    in_one_process(monkeypatch)
    folder = kinds.save(tmp_path / "tokenizer", "byte level", post="<bos> $A <eos>")
    theirs = transformers_tokenizer(folder)
    bos, eos = theirs.bos_token_id, theirs.eos_token_id
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "{one}"}}\n' for one in ("x", "<bos>x", "x<eos>", "<bos>x<eos>"))
    )
    x = theirs("x", add_special_tokens=False)["input_ids"]
    assert learnt(tmp_path / "a.jsonl", folder) == [[bos, *x, eos]] * 4
    assert learnt(tmp_path / "a.jsonl", folder, 1 << 20, end="")[0] == [bos, *x]
    assert learnt(tmp_path / "a.jsonl", folder, 1 << 21, end="fox")[0] == [
        bos,
        *x,
        theirs("fox")["input_ids"][1],
    ]


def test_added_tokens_in_tokenizer_config_are_read_and_padding_is_ignored(tmp_path: Path) -> None:
    """Tokens that only they name are added; batches that are cut and filled up are none of documents."""
    config = {
        "pad_token": "<pad>",
        "extra_special_tokens": ["<new>"],
        "added_tokens_decoder": {"320": {"content": "<later>", "special": False, "lstrip": True}},
    }
    folder = kinds.save(tmp_path / "tokenizer", "byte level", post="<bos> $A", config=config)
    written = json.loads((folder / "tokenizer.json").read_text())
    written["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    written["padding"] = {
        **{"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(written))
    theirs, ours = transformers_tokenizer(folder), open_tokenizer(str(folder))
    for text in (*TEXTS, "a<pad>b <later> c<new>"):
        assert ours.reader.encode(text).ids == theirs(text)["input_ids"]  # type: ignore[union-attr]
    assert ours.vocab == len(theirs)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no JSON"):
        open_tokenizer(str(folder))


def test_a_class_that_builds_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """The remedy that it names gives a folder whose tokens are the same."""
    folder = kinds.save(tmp_path / "llama", "Prepend", config={"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(ConfigError, match="gives other tokens than transformers' LlamaTokenizer does"):
        require_tokens_of_transformers(open_tokenizer(str(folder)))  # type: ignore[arg-type]
    transformers_tokenizer(folder).save_pretrained(tmp_path / "again")
    require_tokens_of_transformers(open_tokenizer(str(tmp_path / "again")))  # type: ignore[arg-type]


def test_token_ids_may_have_gaps_and_exceed_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the count of tokens, and of 16 bits."""
    in_one_process(monkeypatch)
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("a b")
    for largest in (65_541, 2**32 - 1):
        model = {"type": "WordLevel", "vocab": {"a": 5, "b": largest, "<unk>": 0}, "unk_token": "<unk>"}
        written = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": model,
        }
        (tmp_path / f"{largest}.json").write_text(json.dumps(written))
        assert learnt(tmp_path / "a.txt", tmp_path / f"{largest}.json") == [[5, largest]]
        assert open_tokenizer(str(tmp_path / f"{largest}.json")).vocab == largest + 1


def test_a_text_that_the_tokenizer_cannot_divide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_process(monkeypatch)
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    (tmp_path / "a.txt").write_text("b")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot divide a text into tokens: .*UNK"):
        learnt(tmp_path / "a.txt", tmp_path / "tokenizer.json")
