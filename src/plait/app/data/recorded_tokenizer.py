"""The tokenizer of a prepared corpus, copied into its folder, and whether another tokenizer is the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.app.data.checksummed_files import read_json_object, whole_file
from plait.app.data.corpus_manifest import INDEX, TOKENIZER_FOLDER, CorpusIndex
from plait.app.data.tokenizer import FileTokenizer, Tokenizer
from plait.app.data.tokenizer_json import CONFIG, TOKENIZER, tokenizer_config, tokenizer_files
from plait.errors import ConfigError, DataError
from plait.files import read_bytes

_GENERAL = ("", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take a `tokenizer.json` as it is; none is named."""
_PROBE = " Hello  world,\n\n  it's 12345 o'clock.\tNaïve ﬁ e\u0301 漢字🙂 don't\r\n"
_PROBED_TOKENS = 8
"""The most special tokens that are tried within a text."""


def record_tokenizer(folder: Path, tokenizer: str) -> None:
    """Copy the files of a tokenizer into the folder of a corpus; the tokenizer "bytes" has no files."""
    for name, path in tokenizer_files(tokenizer).items():
        copy = folder / TOKENIZER_FOLDER / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = read_bytes(path)
        with whole_file(copy) as file:
            file.write(data)


def recorded_tokenizer(source: str) -> str | None:
    """Return the tokenizer of a prepared corpus: bytes, or its folder; None where it is not recorded."""
    folder = Path(source).expanduser()
    if (folder / TOKENIZER_FOLDER / TOKENIZER).is_file() and (folder / INDEX).is_file():
        return str(folder / TOKENIZER_FOLDER)
    try:
        name = read_json_object(folder / INDEX, "prepare it again").get("tokenizer")
    except DataError:  # which whoever reads all of it reports
        return None
    return "bytes" if name == "bytes" else None


def tokenizer_mismatch(folder: Path, index: CorpusIndex, tokenizer: Tokenizer) -> str:
    """Return in words how a tokenizer differs from that of the corpus in `folder`, "" where it does not.

    Where the corpus does not record its tokenizer, only the size of the vocabulary is compared.
    """
    is_file = isinstance(tokenizer, FileTokenizer)
    if is_file != (index.tokenizer != "bytes") or tokenizer.vocab != index.vocab:
        return (
            f"{folder} was prepared with {index.tokenizer} (vocabulary {index.vocab:,}), and the tokenizer "
            f"given is {tokenizer.name} (vocabulary {tokenizer.vocab:,})"
        )
    known = recorded_tokenizer(str(folder))
    if known is None or not isinstance(tokenizer, FileTokenizer) or tokenizer.path.parent == Path(known):
        return ""
    own = FileTokenizer(Path(known))
    was = f"{folder} was prepared with another tokenizer than {tokenizer.path}"
    if own.reader.get_vocab() != tokenizer.reader.get_vocab():
        return f"{was}, which gives its tokens other numbers"
    if own.reader.to_str() != tokenizer.reader.to_str():
        return f"{was}, which divides texts into tokens by other rules"
    if index.chats and _templates(known) != _templates(str(tokenizer.path)):
        return f"{was}, which has another chat template"
    return ""


def other_numbers(tokenizer: FileTokenizer, than: FileTokenizer) -> str:
    """Return a token that two tokenizers number differently, as "gives 'a' the number 2, not 1", or ""."""
    known = tokenizer.reader.get_vocab()
    for token, number in than.reader.get_vocab().items():
        if known.get(token, number) != number:
            return f"gives {token!r} the number {known[token]}, not {number}"
    return ""


def require_tokens_of_transformers(tokenizer: FileTokenizer) -> None:
    """Raise ConfigError where transformers, if it is installed, gives other tokens for the same folder.

    Some of its classes build a tokenizer of their own from the vocabulary in a `tokenizer.json`.
    """
    folder = tokenizer.path.parent
    name = str(tokenizer_config(tokenizer.path).get("tokenizer_class", ""))
    is_general = name in _GENERAL and not (folder / "config.json").is_file()
    if not (folder / CONFIG).is_file() or tokenizer.path.name != TOKENIZER or is_general:
        return
    if find_spec("transformers") is None:
        return
    from transformers import AutoTokenizer

    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # many types; a tokenizer.json is enough for texts
        return
    special = [token.content for token in tokenizer.reader.get_added_tokens_decoder().values()]
    for text in (_PROBE, *(f"a{token}b {token} c" for token in special[:_PROBED_TOKENS])):
        if theirs(text)["input_ids"] != tokenizer.reader.encode(text).ids:
            raise ConfigError(
                f"{tokenizer.path} gives other tokens than transformers' {type(theirs).__name__} does for "
                f"this folder, such as for {text!r}: write a tokenizer.json of the latter by "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(FOLDER), and give "
                "that FOLDER."
            )


def _templates(tokenizer: str) -> tuple[object, ...]:
    """Return the chat templates among the files of a tokenizer."""
    files = tokenizer_files(tokenizer)
    texts = [path.read_bytes() for name, path in files.items() if name.endswith(".jinja")]
    return *texts, None if texts else tokenizer_config(files[TOKENIZER]).get("chat_template")
