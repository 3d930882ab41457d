import json
import sys
from pathlib import Path

import pytest

from plait.data.tokenizer import ByteTokenizer, open_tokenizer, printable
from plait.errors import ConfigError, DataError


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = open_tokenizer("bytes")
    tokens = tokenizer.encode(["naïve ".encode(), b"text"])
    assert tokens.tolist() == list("naïve text".encode())
    assert tokenizer.decode(tokens.tolist()) == "naïve text"
    assert tokenizer.vocab == 256


def test_what_is_no_text_is_replaced() -> None:
    assert ByteTokenizer().decode([65, 255, 66, 5000, 67]) == "A�B�C"
    assert printable("a\n\tb\x1b[31m\x00") == "a\n\tb�[31m�"


def test_tokenizer_file(word_tokenizer: Path) -> None:
    tokenizer = open_tokenizer(str(word_tokenizer))
    assert tokenizer.encode([b"a b", b"c what"]).tolist() == [1, 2, 3, 0]
    assert tokenizer.decode([1, 3, 99]) == "a c"
    assert tokenizer.vocab == 4
    assert tokenizer.encode([]).tolist() == []


def test_missing_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .* is no file"):
        open_tokenizer(str(tmp_path / "none.json"))


def test_broken_tokenizer_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"hello": 1}))
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        open_tokenizer(str(path))


def test_without_the_tokenizers_package(word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ConfigError, match=r"the extra tokenizers of plait brings: .* -m pip install tokenizers"
    ):
        open_tokenizer(str(word_tokenizer))
