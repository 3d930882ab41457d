"""Small tokenizers of each kind, written to a folder as transformers and plait read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BOS, EOS = "<bos>", "<eos>"
TEXT = (
    "The  quick brown fox's 12345 don't stop,\n\n  it'll go on.\tNa\u00efve \ufb01 e\u0301 \u00e9\r\n"
    "\u6f22\u5b57\u304b\u306a \U0001f642 LATIN \u03a3\u0391\u03a3 \u03c3  \n"
    "def f(x):\n    return x  # one\n\n\nI am. a b c d e f g\n"
)


def byte_level(add_prefix_space: bool = False, pattern: str | None = None) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=add_prefix_space, use_regex=pattern is None
    )
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, made.pre_tokenizer])
    return made


def metaspace(prepend: str, *, unigram: bool = False, split: bool = True) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=split)
    return made


def prepended() -> Any:
    """As Llama 2: a space before each text, and no division into words."""
    from tokenizers import Tokenizer, models, normalizers

    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


def word_pieces() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


def normalized(*names: str) -> Any:
    """A byte-level tokenizer of normalized text."""
    from tokenizers import normalizers

    made = byte_level()
    made.normalizer = normalizers.Sequence([getattr(normalizers, name)() for name in names])
    return made


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte level, prefix": lambda: byte_level(True),
    "byte level, Llama 3": lambda: byte_level(False, LLAMA_3),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace first, Unigram": lambda: metaspace("first", unigram=True),
    "Metaspace undivided": lambda: metaspace("first", split=False),
    "Prepend": prepended,
    "WordPiece": word_pieces,
    "NFKC, lower case": lambda: normalized("NFKC", "Lowercase"),
    "NFC, stripped": lambda: normalized("NFC", "Strip"),
}


def save(
    folder: Path, kind: str, *, post: str = "", config: dict[str, Any] | None = None, vocab: int = 320
) -> Path:
    """Train a tokenizer on `TEXT` and write it; `post`: the post-processor's template, such as "<bos> $A"."""
    from tokenizers import AddedToken, pre_tokenizers, processors, trainers

    made = KINDS[kind]()
    special = ["<unk>", BOS, EOS]
    options: dict[str, Any] = {"vocab_size": vocab, "special_tokens": special, "show_progress": False}
    name = type(made.model).__name__.replace("BPE", "Bpe")
    trainer = getattr(trainers, f"{name}Trainer")
    if trainer is trainers.UnigramTrainer:
        options["unk_token"] = "<unk>"
    if trainer is trainers.BpeTrainer and kind.startswith(("byte", "NF")):
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 3, trainer(**options))
    made.add_tokens([AddedToken("<wide>", lstrip=True, rstrip=True), AddedToken("fox", single_word=True)])
    if post:
        made.post_processor = processors.TemplateProcessing(
            single=post, special_tokens=[(one, made.token_to_id(one)) for one in (BOS, EOS)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    given = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        **(config or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder
