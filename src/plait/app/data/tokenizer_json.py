"""Reads `tokenizer.json` and the files beside it, as transformers' general tokenizer class does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.app.data.chat_records import short_json
from plait.app.data.checksummed_files import read_json_object
from plait.errors import ConfigError, DataError, missing_package
from plait.files import read_bytes

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's chat templates but the default one."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("split_special_tokens", "add_bos_token")
_PROBES = ("a", "A", "0", ".", "\n")


class SurroundingTokens(NamedTuple):
    """Special tokens to put before and after each document."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def opening(self, tokens: NDArray[Any]) -> tuple[int, ...]:
        """Return the tokens to write before a document; none if its own tokens begin with them."""
        return () if len(tokens) and self.before[:1] == (int(tokens[0]),) else self.before

    def closing(self, tokens: NDArray[Any]) -> tuple[int, ...]:
        """Return the tokens to write after a document, without those that end `tokens` already."""
        ends = tuple(tokens[max(0, len(tokens) - len(self.after)) :].tolist())
        known = max(size for size in range(len(ends) + 1) if ends[len(ends) - size :] == self.after[:size])
        return self.after[known:]

    def ending_with(self, end: int | None) -> SurroundingTokens:
        """Return a copy with `end`, if not None, as the last token after each document."""
        return self if end is None or end in self.after else self._replace(after=(*self.after, end))

    def complete(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return a document's tokens with the surrounding ones added; an empty document stays empty."""
        if not len(tokens):
            return tokens
        before, after = self.opening(tokens), self.closing(tokens)
        return np.concatenate([np.array(before, tokens.dtype), tokens, np.array(after, tokens.dtype)])


def tokenizer_files(tokenizer: str) -> Mapping[str, Path]:
    """Return the existing files of a `tokenizer.json` or its folder, by name; none for bytes."""
    path = Path(tokenizer).expanduser()
    path = path / TOKENIZER if path.is_dir() else path
    if tokenizer == "bytes" or not path.is_file():
        return {}
    beside = {name: path.parent / name for name in (CONFIG, "chat_template.jinja", _SPECIAL_TOKENS)}
    templates = sorted((path.parent / _NAMED_TEMPLATES).glob("*.jinja"))
    beside |= {f"{_NAMED_TEMPLATES}/{one.name}": one for one in templates}
    return {TOKENIZER: path} | {name: one for name, one in beside.items() if one.is_file()}


def files_hash(tokenizer: str) -> str:
    """Return a hash of the contents of a tokenizer's files; "" for bytes. DataError if one cannot be read."""
    files = tokenizer_files(tokenizer)
    try:
        contents = {name: read_bytes(path) for name, path in files.items()}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): mend or remove it.") from None
    hashes = [f"{name} {sha256(data).hexdigest()}" for name, data in contents.items()]
    return sha256(" ".join(hashes).encode()).hexdigest()[:16] if files else ""


def open_reader(path: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a `tokenizer.json`, with the tokens that files beside it add.

    It neither cuts nor pads. Raises ConfigError where the package is missing, DataError for a damaged file.
    """
    try:
        from tokenizers import Tokenizer as Reader
    except ImportError:
        what = f"data.tokenizer = {str(path)!r}"
        raise ConfigError(f"{missing_package(what, 'tokenizers', 'tokenizers')}.") from None
    read_json_object(path, "give a tokenizer.json")
    with library_errors(f"data.tokenizer = {str(path)!r} is no tokenizer.json"):
        reader: Any = Reader.from_file(str(path))
    reader.no_truncation()  # both are for batches of inference, and would cut or fill up documents
    reader.no_padding()
    config = tokenizer_config(path)
    reader.encode_special_tokens = bool(config.get("split_special_tokens", False))
    with library_errors(f"{path.parent / CONFIG} has tokens that cannot be read"):
        _add_tokens(reader, config)
    return reader


@contextmanager
def library_errors(told: str) -> Iterator[None]:
    """Context manager that turns every error of the `tokenizers` library, panics too, into a DataError."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise DataError(f"{told}: {reason or type(error).__name__}.") from None


def tokenizer_config(path: Path) -> Mapping[str, Any]:
    """Return the content of the `tokenizer_config.json` beside a `tokenizer.json`; empty if missing.

    Where it lists no tokens, a `special_tokens_map.json` of earlier versions counts as well. Raises DataError
    for a file that is no JSON object.
    """
    config = _json_object(path.parent / CONFIG)
    if "added_tokens_decoder" not in config:
        config |= _json_object(path.parent / _SPECIAL_TOKENS)
    for name in _NAMED:
        if config.get(name) is not None and token_name(config, name) is None:
            raise DataError(
                f"the configuration in {path.parent} has {name} = {short_json(config[name])}: give the "
                "token's text, or an object with it as content."
            )
    for name in _FLAGS:
        if not isinstance(config.get(name), bool | None):
            raise DataError(
                f"{path.parent / CONFIG} has {name} = {short_json(config[name])}: give true or false."
            )
    return config


def token_name(config: Mapping[str, Any], name: str) -> str | None:
    """Return the text of a token that a configuration names, such as eos_token."""
    found = config.get(name)
    text = found.get("content") if isinstance(found, Mapping) else found
    return text if isinstance(text, str) else None


def post_processed(reader: Any, path: Path) -> SurroundingTokens:
    """Return the tokens that a post-processor adds around each text; DataError if it changes the text's."""
    for text in _PROBES if reader.post_processor is not None else ():
        inner = reader.encode(text, add_special_tokens=False).ids
        whole = reader.encode(text).ids
        if not inner:
            continue
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return SurroundingTokens(tuple(whole[:begin]), tuple(whole[begin + len(inner) :]))
        raise DataError(f"{path} has a post_processor that changes the tokens of a text: give one without.")
    return SurroundingTokens()


def _add_tokens(reader: Any, config: Mapping[str, Any]) -> None:
    """Add the tokens of a configuration that the tokenizer does not have, behind its last one."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder", {})
    known = {repr(token) for token in reader.get_added_tokens_decoder().values()}
    tokens = [AddedToken(**listed[number]) for number in sorted(listed, key=int)]
    reader.add_tokens([token for token in tokens if repr(token) not in known])
    by_text = {token.content: token for token in tokens}
    named = [by_text.get(text, AddedToken(text, special=True, normalized=False)) for text in _special(config)]
    reader.add_special_tokens(named)


def _special(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of the special tokens that a configuration names."""
    yield from filter(None, (token_name(config, name) for name in _NAMED))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, Mapping) else extra
    yield from filter(None, (token_name({"": one}, "") for one in values))


def _json_object(path: Path) -> dict[str, Any]:
    is_there = path.exists() or path.is_symlink()
    return read_json_object(path, "mend or remove it") if is_there else {}
