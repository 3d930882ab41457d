"""Prepares and opens the data sources of a run, and chooses the context length that fits them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from plait.app.config.config import Config
from plait.app.config.config_parser import given_values
from plait.app.config.model_section import USUAL_CONTEXT
from plait.app.data.batches import Rows, TokenWindows
from plait.app.data.chat_encoder import require_known_fields
from plait.app.data.corpus_manifest import FORMAT, CorpusIndex, is_prepared, require_intact
from plait.app.data.document_rows import DocumentRows
from plait.app.data.document_sources import files_of, read_documents, source_files
from plait.app.data.preparation import PreparationProgress, prepare_corpus
from plait.app.data.recorded_tokenizer import other_numbers, recorded_tokenizer, tokenizer_mismatch
from plait.app.data.tables import HUB, dataset_files, is_dataset
from plait.app.data.token_arrays import holds_tokens, open_tokens
from plait.app.data.token_shards import Corpus, corpus_of, open_corpus
from plait.app.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from plait.app.data.tokenizer_json import TOKENIZER, tokenizer_files
from plait.errors import ConfigError, DataError

_RECORDS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json", ".json.gz", ".parquet", ".arrow")
_KINDS_OF_RECORDS = ("jsonl", "json", "table")
_NO_FILES = ("stdlib", "random")
_SECONDS_BETWEEN_LINES = 5.0
MULTIPLE = 64
"""Contexts are multiples of this, so that sequences can be cut over ranks."""
_AT_ONCE = 1 << 20
"""Conversations whose lengths are compared at once."""


def holds_records(source: str) -> bool:
    """Return whether `data.source` has records (texts or conversations, in JSON lines, tables or a data set).

    Also beside text files, in a folder or glob. Raises DataError for rows that have none of the fields that
    are read, and where there are no such files.
    """
    if is_dataset(source):
        return True
    if source in _NO_FILES or not any(path.name.lower().endswith(_RECORDS) for path in source_files(source)):
        return False
    files = files_of(source)
    require_known_fields(files)
    return any(file.kind in _KINDS_OF_RECORDS for file in files)


def is_tokenized(source: str) -> bool:
    """Return whether a run reads `data.source` as tokens: it has them, or tokenizes them once."""
    return holds_tokens(source) or is_prepared(source) or holds_records(source)


def prepared_folder(config: Config, source: str) -> Path | None:
    """Return the folder of a source's token shards, tokenizing JSON or table records first; None for others.

    Records are tokenized into `run.dir`, unless they have been. Of the processes of an external launcher one
    does it, where `run.dir` is a host's own one for each host; the others wait while it makes progress, at
    most `run.timeout` seconds without any. Raises DataError and ConfigError.
    """
    if is_prepared(source):
        return Path(source).expanduser()
    if not holds_records(source):
        return None
    text = f"{FORMAT} {_version(source)} {_states(tokenizer_files(config.tokenizer).values())}"
    name = sha256(text.encode(errors="surrogateescape")).hexdigest()  # files may have names that are no UTF-8
    folder = config.run.dir / f"prepared-{name[:12]}"
    if not _is_whole(folder):
        prepare_corpus(
            [source],
            folder,
            config.tokenizer,
            processes=os.cpu_count() or 1,
            patience=config.run.timeout,
            report=_printing(source),
        )
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has an index, and all files in the sizes that the index lists."""
    try:
        open_corpus(folder)
    except DataError:
        return False
    return True


def _version(source: str) -> str:
    """Return a text that changes with the files of a source; of a data set by name only its name."""
    if source.startswith(HUB):
        return source
    return _states(dataset_files(source) if is_dataset(source) else source_files(source))


def _states(paths: Iterable[Path]) -> str:
    """Return the names, sizes and times of change of files."""
    states = [(path.resolve(), path.stat()) for path in paths]
    return " ".join(f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states)


def _printing(source: str) -> Callable[[PreparationProgress, int], None]:
    """Return a function that prints the progress every few seconds."""
    printed_at = time.monotonic()

    def report(done: PreparationProgress, total: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at > _SECONDS_BETWEEN_LINES:
            printed_at = time.monotonic()
            print(f"Tokenizing {source}: {done.size / 1e6:,.1f} of {total / 1e6:,.1f} MB", file=sys.stderr)

    return report


# Tokens that are checked against the vocabulary when a corpus is opened (a fraction of a second); later ones
# are checked with their batch, so that a huge array opens at once.
_CHECKED_AT_ONCE = 1 << 26
_READ_AT_ONCE = 1 << 26
"""Bytes of a prepared corpus whose checksums are compared at once; `plait data inspect` compares all."""


@dataclass(frozen=True)
class OpenSource:
    """An opened source of a run's data: its rows for training, those held out, and its vocabulary."""

    training: Rows
    held_out: Rows | None
    vocab: int
    unreadable: str
    """Why the run's tokenizer cannot turn its tokens into text, or "" if it can."""
    summary: str
    holds_chats: bool = False


def open_source(config: Config, source: str, tokenizer: Tokenizer, fraction: float) -> OpenSource:
    """Open a source, and hold the last `fraction` of it out. Raises `DataError` or `ConfigError`."""
    vocab, name, unreadable = config.model.vocab or tokenizer.vocab, tokenizer.name, ""
    if (folder := prepared_folder(config, source)) is not None:
        corpus, index = open_corpus(folder)
        require_intact(folder, index, _READ_AT_ONCE)
        vocab, name = config.model.vocab or index.vocab, index.tokenizer
        unreadable = _mismatch(config, folder, index, tokenizer)
        _require_tokens_of_model(config, folder)
        if index.largest >= vocab:
            raise DataError(
                f"data.source = {source!r} holds token {index.largest}, outside the vocabulary of {vocab}: "
                f"set model.vocab to at least {index.largest + 1}, or use the tokenizer the model is meant "
                "for."
            )
        if index.chats:
            rows, held_out, summary = _split_chats(config, source, corpus, index, vocab, fraction)
            return OpenSource(rows, held_out, vocab, unreadable, summary, holds_chats=True)
    elif holds_tokens(source):
        corpus = open_tokens(source, config.data.dtype)
        if isinstance(tokenizer, ByteTokenizer) and vocab > tokenizer.vocab:
            name = "of an unknown tokenizer"
            unreadable = f"the tokens of {source} are {name}: set data.tokenizer to it"
    else:
        corpus = corpus_of(tokenizer.encode(read_documents(source)))
    windows, held_out, summary = _split(config, source, corpus, name, vocab, fraction)
    return OpenSource(windows, held_out, vocab, unreadable, summary)


def _mismatch(config: Config, folder: Path, index: CorpusIndex, tokenizer: Tokenizer) -> str:
    """Return why the tokenizer does not fit a prepared corpus that does not record its own, or "".

    Raises ConfigError where the tokenizer is given, or that of another source.
    """
    found = tokenizer_mismatch(folder, index, tokenizer)
    if found and config.data.tokenizer is not None:
        raise ConfigError(f"{found}: leave data.tokenizer out, or prepare the corpus again, with that one.")
    if found and recorded_tokenizer(str(folder)) is not None:
        raise ConfigError(
            f"{found}, by another source of the run: sources that are mixed need the same tokenizer."
        )
    return f"{found}: set data.tokenizer to the corpus's own" if found else ""


def _require_tokens_of_model(config: Config, folder: Path) -> None:
    """Raise ConfigError where a prepared corpus numbers tokens otherwise than the model's tokenizer.

    Not where `data.tokenizer` is given: then the model is to learn others.
    """
    model, known = config.model.folder, recorded_tokenizer(str(folder))
    if model is None or known is None or config.data.tokenizer is not None:
        return
    if not (model / TOKENIZER).is_file():
        return
    other = "" if known == "bytes" else other_numbers(FileTokenizer(Path(known)), FileTokenizer(model))
    if known == "bytes" or other:
        what = "with bytes as tokens" if known == "bytes" else f"with a tokenizer that {other}"
        raise ConfigError(
            f"{folder} was prepared {what}, unlike that of the model in {model}: prepare it with --tokenizer "
            f"{model}, or set data.tokenizer to {known} for a model that is to learn these."
        )


def _split(
    config: Config, source: str, corpus: Corpus, tokenizer: str, vocab: int, fraction: float
) -> tuple[Rows, Rows | None, str]:
    """Return windows of the training tokens, windows of the held-out last tokens, and a summary."""
    context, size = config.model.context, len(corpus)
    TokenWindows(corpus, context, vocab, source).check(_CHECKED_AT_ONCE)
    cut = size - int(size * fraction)
    training = TokenWindows(corpus, context, vocab, source, stop=cut)
    held_out = TokenWindows(corpus, context, vocab, source, start=cut)
    if not training.count:
        raise DataError(
            f"data.source = {source!r} has {cut} tokens for training, fewer than the {context + 1} of one "
            f"sequence (model.context = {context} and the next one): give more data or lower model.context."
        )
    if fraction and not held_out.count:
        raise DataError(
            f"data.validation = {fraction:g} leaves {size - cut} tokens of data.source = {source!r} "
            f"for validation, fewer than the {context + 1} of one sequence (model.context = {context} and "
            "the next one): raise it, or set it to 0 for none."
        )
    title = "Python's standard library" if source == "stdlib" else source
    share = f", {fraction:.1%} of them for validation" if fraction else ""
    summary = f"{title}, {size:,} tokens ({tokenizer}){share}"
    return training, held_out if fraction else None, summary


def _split_chats(
    config: Config, source: str, corpus: Corpus, index: CorpusIndex, vocab: int, fraction: float
) -> tuple[Rows, Rows | None, str]:
    """Return rows of the conversations to train on, rows of the held-out last ones, and a summary."""
    context = config.model.context
    kept = index.documents - (max(1, int(index.documents * fraction)) if fraction else 0)
    if kept < 1:
        raise DataError(
            f"data.source = {source!r} has {index.documents} conversations, of which data.validation = "
            f"{fraction:g} leaves none for training: give more, or set it to 0."
        )
    training = DocumentRows(corpus, context, vocab, source, stop=kept)
    held_out = DocumentRows(corpus, context, vocab, source, first=kept)
    left_out = training.left_out + held_out.left_out
    late = f"with an answer in its first {context} tokens (model.context)"
    if not training.count:
        raise DataError(
            f"{source!r} has no conversation{' for training' * bool(fraction)} {late}: raise model.context."
        )
    if fraction and not held_out.count:
        raise DataError(
            f"{source!r} has no conversation for validation {late}: raise data.validation = {fraction:g} or "
            "model.context, or give data.validation_source."
        )
    notes = [f"{index.tokens:,} tokens, {index.count('answers'):,} of them in answers"]
    if cut := training.cut + held_out.cut:
        notes.append(f"{cut:,} conversations longer than model.context = {context} are cut")
    if left_out:
        roles = index.names("unknown_roles")
        named = f" (no answers to plait: the roles {roles})" if roles else ""
        notes.append(f"{left_out:,} without an answer in their first {context} tokens are left out{named}")
    notes += index.notes()
    summary = f"{source}, {index.documents:,} conversations in {training.count:,} rows, {'; '.join(notes)}"
    return training, held_out if fraction else None, summary


def with_context_of_data(config: Config, arguments: Sequence[str]) -> tuple[Config, str]:
    """Return the configuration with `model.context` chosen from its data, and a sentence about it.

    Of conversations the longest one, rounded up; of other data 1,024 tokens; at most what the model in the
    folder takes. The same configuration and "" where `arguments` give `model.context`, the model is plait's
    own, or it takes no more. Tokenizes records, unless they are.
    """
    folder = config.model.folder
    if folder is None or "model.context" in given_values(arguments):
        return config, ""
    from plait.models.huggingface.pretrained import sizes_in  # late: with torch

    most = sizes_in(folder)["context"]
    sources = [*config.data.sources, *config.data.validation_sources.values()]
    lengths = [_longest_conversation(config, source) for source in sources]
    longest = max((one for one in lengths if one is not None), default=0)
    usual = USUAL_CONTEXT if None in lengths else 0
    context = min(most, max(usual, -(-longest // MULTIPLE) * MULTIPLE))
    changed = config.model_copy(update={"model": config.model.model_copy(update={"context": context})})
    if context == most:
        return changed, ""
    why = f" for conversations of up to {longest:,}" if longest else ""
    return changed, (
        f"Context: {context:,} tokens a sequence{why}, of the {most:,} that the model takes; "
        "set model.context for another."
    )


def _longest_conversation(config: Config, source: str) -> int | None:
    """Return the number of tokens of the longest conversation in a source; None for other data."""
    folder = prepared_folder(config, source)
    if folder is None:
        return None
    corpus, index = open_corpus(folder)
    if not index.chats:
        return None
    longest, before = 0, 0
    for first in range(0, index.documents, _AT_ONCE):
        ends = corpus.document_ends(first, min(first + _AT_ONCE, index.documents))
        longest, before = max(longest, int(np.diff(ends, prepend=before).max())), int(ends[-1])
    return longest
