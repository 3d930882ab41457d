"""Load the data of a run: corpus, tokenizer and batches, as the `data` section describes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.data.batches import Batches, RandomBatches, ShuffledBatches, TokenWindows, ValidationBatches
from plait.data.corpus import read_documents
from plait.data.token_files import holds_tokens, open_tokens
from plait.data.token_shards import Corpus, corpus_of, is_prepared, open_corpus
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
    tokenizer = open_tokenizer(config.data.tokenizer)
    vocab = config.model.vocab or tokenizer.vocab
    if source == "random":
        return _random(config, tokenizer, vocab)
    if is_prepared(source):
        corpus, index = open_corpus(Path(source).expanduser())
        return _split(
            config, corpus, tokenizer, config.model.vocab or index.vocab, tokenizer.name == index.tokenizer
        )
    if holds_tokens(source):
        corpus = open_tokens(source, config.data.dtype)
        readable = not (isinstance(tokenizer, ByteTokenizer) and vocab > tokenizer.vocab)
    else:
        corpus, readable = corpus_of(tokenizer.encode(read_documents(source))), True
    return _split(config, corpus, tokenizer, vocab, readable)


def check_data(config: Config) -> None:
    """Raise the same errors as `load_data`, before ranks are started.

    Only encoding text with a `tokenizer.json` is left to the ranks, since it may take long.
    """
    source = config.data.source
    if config.data.tokenizer == "bytes" or holds_tokens(source) or is_prepared(source):
        data = load_data(config)
        vocab, tokenizer, readable = data.vocab, data.tokenizer, data.readable
    else:
        tokenizer = open_tokenizer(config.data.tokenizer)
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


def _split(config: Config, corpus: Corpus, tokenizer: Tokenizer, vocab: int, readable: bool) -> Data:
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
