"""Load the data of a run: corpus, tokenizer and batches, as the `data` section describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from plait.data.batches import Batches, RandomBatches, ShuffledBatches, TokenWindows, ValidationBatches
from plait.data.chats import first_record, holds_chats
from plait.data.corpus import read_documents
from plait.data.document_rows import DocumentRows
from plait.data.preparation import prepare_corpus
from plait.data.token_files import holds_tokens, open_tokens
from plait.data.token_shards import INDEX, Corpus, CorpusIndex, corpus_of, is_prepared, open_corpus
from plait.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from plait.errors import ConfigError, DataError
from plait.train.config import Config

# Tokens that are checked against the vocabulary when a corpus is opened (a fraction of a second); later ones
# are checked with their batch, so that a huge array opens at once.
_CHECKED_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Data:
    """The training and validation batches of a run, and the tokenizer that encoded them.

    `validation`, if any, repeats after `train.validate_batches` batches. `vocab` is the model's. `readable`:
    whether `tokenizer` can turn these tokens into text.
    """

    training: Batches
    validation: Batches | None
    tokenizer: Tokenizer
    vocab: int
    readable: bool
    summary: str


def load_data(config: Config) -> Data:
    """Open the corpus, and split it into training data and, from its end, validation data.

    Every rank gets the same result, without communication. Raises `DataError` or `ConfigError` that
    names the field when the corpus is missing, empty, binary or too short, or a token is beyond the
    vocabulary.
    """
    source = config.data.source
    tokenizer = open_tokenizer(config.tokenizer)
    vocab = config.model.vocab or tokenizer.vocab
    if source == "random":
        return _random(config, tokenizer, vocab)
    folder = chats_folder(config) if is_chats(source) else Path(source).expanduser()
    if is_chats(source) or is_prepared(source):
        corpus, index = open_corpus(folder)
        readable = tokenizer.name == index.tokenizer
        return _split(config, corpus, tokenizer, config.model.vocab or index.vocab, readable, index)
    if holds_tokens(source):
        corpus = open_tokens(source, config.data.dtype)
        readable = not (isinstance(tokenizer, ByteTokenizer) and vocab > tokenizer.vocab)
    else:
        corpus, readable = corpus_of(tokenizer.encode(read_documents(source))), True
    return _split(config, corpus, tokenizer, vocab, readable)


def check_data(config: Config, *, prepares: bool = False) -> None:
    """Raise the same errors as `load_data`, before ranks are started.

    `prepares`: tokenize conversations into `run.dir`, where they have not been yet. Only encoding text with a
    `tokenizer.json` is left to the ranks, since it may take long.
    """
    source = config.data.source
    if is_chats(source):
        _require_chats(config, prepares=prepares)
    if config.tokenizer == "bytes" or holds_tokens(source) or is_prepared(source) or is_chats(source):
        data = load_data(config)
        vocab, tokenizer, readable = data.vocab, data.tokenizer, data.readable
    else:
        tokenizer = open_tokenizer(config.tokenizer)
        vocab, readable = config.model.vocab or tokenizer.vocab, source != "random"
        if readable:
            read_documents(source)
    if config.train.sample and readable:
        prompt = tokenizer.encode([config.train.sample.encode()])
        if len(prompt) and int(prompt.max()) >= vocab:
            raise ConfigError(
                f"train.sample = {config.train.sample!r} holds token {int(prompt.max())}, outside the "
                f"vocabulary of {vocab}: choose another prompt, or leave model.vocab to the tokenizer."
            )


def is_chats(source: str) -> bool:
    """Return whether `data.source` names a file of conversations."""
    path = Path(source).expanduser()
    return path.suffix in (".jsonl", ".ndjson") and holds_chats(first_record(path))


def chats_folder(config: Config) -> Path:
    """Return the folder in `run.dir` of the tokenized conversations of `data.source`, as they are now."""
    path = Path(config.data.source).expanduser().resolve()
    state = path.stat()
    text = f"{path} {state.st_size} {state.st_mtime_ns} {Path(config.tokenizer).resolve()}"
    return config.run.dir / f"chats-{sha256(text.encode()).hexdigest()[:12]}"


def _require_chats(config: Config, *, prepares: bool) -> None:
    """Tokenize the conversations of `data.source`, unless they are; DataError if not `prepares`."""
    folder, source = chats_folder(config), config.data.source
    if (folder / INDEX).is_file():
        return
    if not prepares:
        raise DataError(
            f"data.source = {source!r} holds conversations, which no rank of an external launcher tokenizes: "
            f"run `plait data prepare {source} FOLDER --tokenizer {config.tokenizer}` once, and set "
            "data.source to FOLDER."
        )
    prepare_corpus([source], folder, config.tokenizer, processes=os.cpu_count() or 1)


def _random(config: Config, tokenizer: Tokenizer, vocab: int) -> Data:
    context, batch, seed = config.model.context, config.train.batch, config.train.seed
    validation = RandomBatches(vocab, context, batch, seed, stream=1) if config.data.validation else None
    return Data(
        training=RandomBatches(vocab, context, batch, seed),
        validation=validation,
        tokenizer=tokenizer,
        vocab=vocab,
        readable=False,
        summary=f"uniformly drawn tokens of a vocabulary of {vocab:,}",
    )


def _split(
    config: Config,
    corpus: Corpus,
    tokenizer: Tokenizer,
    vocab: int,
    readable: bool,
    index: CorpusIndex | None = None,
) -> Data:
    if index is not None and index.chats:
        return _split_chats(config, corpus, index, tokenizer, vocab, readable)
    source, context, fraction = config.data.source, config.model.context, config.data.validation
    size = len(corpus)
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
    batch, count = config.train.batch, config.train.validate_batches
    title = "Python's standard library" if source == "stdlib" else source
    share = f", {fraction:.1%} of them for validation" if fraction else ""
    return Data(
        training=ShuffledBatches(training, batch, config.train.seed),
        validation=ValidationBatches(held_out, batch, count) if fraction else None,
        tokenizer=tokenizer,
        vocab=vocab,
        readable=readable,
        summary=f"{title}, {size:,} tokens ({tokenizer.name}){share}",
    )


def _split_chats(
    config: Config, corpus: Corpus, index: CorpusIndex, tokenizer: Tokenizer, vocab: int, readable: bool
) -> Data:
    """Return rows of whole conversations; the last ones are for validation."""
    source, context, fraction = config.data.source, config.model.context, config.data.validation
    kept = index.documents - (max(1, int(index.documents * fraction)) if fraction else 0)
    training = DocumentRows(corpus, context, vocab, source, stop=kept)
    held_out = DocumentRows(corpus, context, vocab, source, first=kept)
    if kept < 1:
        raise DataError(
            f"data.source = {source!r} has {index.documents} conversations, of which data.validation = "
            f"{fraction:g} leaves none for training: give more, or set it to 0."
        )
    unanswered = sum(shard.unanswered for shard in index.shards)
    notes = [f"{index.tokens:,} tokens, {sum(shard.answers for shard in index.shards):,} of them in answers"]
    if cut := training.cut + held_out.cut:
        notes.append(f"{cut:,} conversations longer than model.context = {context} are cut")
    if unanswered:
        notes.append(f"{unanswered:,} without an answer")
    batch = config.train.batch
    return Data(
        training=ShuffledBatches(training, batch, config.train.seed),
        validation=ValidationBatches(held_out, batch, config.train.validate_batches) if fraction else None,
        tokenizer=tokenizer,
        vocab=vocab,
        readable=readable,
        summary=f"{source}, {index.documents:,} conversations in {training.count:,} rows, {'; '.join(notes)}",
    )
