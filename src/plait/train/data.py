"""The data of a run: corpus, tokenizer and batches, as the configuration's `data` section asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import ConfigError, DataError
from plait.train.batches import Batches, Corpus, Shuffled, Spread, Uniform
from plait.train.config import Config
from plait.train.corpus import holds_tokens, open_tokens, read_documents
from plait.train.tokenizer import ByteTokenizer, Tokenizer, Tokens, open_tokenizer

# So many tokens are looked through for one beyond the vocabulary when a corpus is opened (a fraction of a
# second); those after it are looked at when their batch is made, so that a huge array opens at once.
_LOOK_THROUGH = 1 << 26


@dataclass(frozen=True)
class Data:
    """What a run learns from.

    `validation` is None where there is none; it repeats after `train.validate_batches` batches. `vocab` is
    the model's. `readable`: whether `tokenizer` turns these tokens into text.
    """

    training: Batches
    validation: Batches | None
    tokenizer: Tokenizer
    vocab: int
    readable: bool
    summary: str


def load_data(config: Config) -> Data:
    """Open the corpus and cut it into training and validation, the latter from its end.

    Every rank calls it and gets the same; nothing is communicated. Raises `DataError` or `ConfigError` that
    names the field when the corpus is missing, empty, binary or too short, or a token is beyond the
    vocabulary.
    """
    source = config.data.source
    tokenizer = open_tokenizer(config.data.tokenizer)
    vocab = config.model.vocab or tokenizer.vocab
    if source == "random":
        return _random(config, tokenizer, vocab)
    if holds_tokens(source):
        tokens = open_tokens(source, config.data.dtype)
        readable = not (isinstance(tokenizer, ByteTokenizer) and vocab > tokenizer.vocab)
    else:
        tokens = tokenizer.encode(read_documents(source))
        readable = True
    return _split(config, tokens, tokenizer, vocab, readable)


def check_data(config: Config) -> None:
    """Check what one process can before any rank is started; raises what `load_data` raises, or nothing.

    The one thing left to the ranks is to encode text with a `tokenizer.json`, which may take long.
    """
    if config.data.tokenizer == "bytes" or holds_tokens(config.data.source):
        data = load_data(config)
        vocab, tokenizer, readable = data.vocab, data.tokenizer, data.readable
    else:
        tokenizer = open_tokenizer(config.data.tokenizer)
        vocab, readable = config.model.vocab or tokenizer.vocab, config.data.source != "random"
        if readable:
            read_documents(config.data.source)
    if config.train.sample and readable:
        prompt = tokenizer.encode([config.train.sample.encode()])
        if len(prompt) and int(prompt.max()) >= vocab:
            raise ConfigError(
                f"train.sample = {config.train.sample!r} holds token {int(prompt.max())}, outside the "
                f"vocabulary of {vocab}: choose another prompt, or leave model.vocab to the tokenizer."
            )


def _random(config: Config, tokenizer: Tokenizer, vocab: int) -> Data:
    context, batch, seed = config.model.context, config.train.batch, config.train.seed
    validation = Uniform(vocab, context, batch, seed, stream=1) if config.data.validation else None
    return Data(
        training=Uniform(vocab, context, batch, seed),
        validation=validation,
        tokenizer=tokenizer,
        vocab=vocab,
        readable=False,
        summary=f"uniformly drawn tokens of a vocabulary of {vocab:,}",
    )


def _split(config: Config, tokens: Tokens, tokenizer: Tokenizer, vocab: int, readable: bool) -> Data:
    source, context, fraction = config.data.source, config.model.context, config.data.validation
    Corpus(tokens, context, vocab, source).check(_LOOK_THROUGH)
    cut = len(tokens) - int(len(tokens) * fraction)
    training = Corpus(tokens[:cut], context, vocab, source)
    held_out = Corpus(tokens[cut:], context, vocab, source, start=cut)
    if not training.windows:
        raise DataError(
            f"data.source = {source!r} has {cut} tokens for training, fewer than the {context + 1} of one "
            f"sequence (model.context = {context} and the next one): give more data or lower model.context."
        )
    if fraction and not held_out.windows:
        raise DataError(
            f"data.validation = {fraction:g} leaves {len(tokens) - cut} tokens of data.source = {source!r} "
            f"for validation, fewer than the {context + 1} of one sequence (model.context = {context} and "
            "the next one): raise it, or set it to 0 for none."
        )
    batch, count = config.train.batch, config.train.validate_batches
    share = f", {fraction:.1%} of them for validation" if fraction else ""
    return Data(
        training=Shuffled(training, batch, config.train.seed),
        validation=Spread(held_out, batch, count) if fraction else None,
        tokenizer=tokenizer,
        vocab=vocab,
        readable=readable,
        summary=f"{_title(source)}, {len(tokens):,} tokens ({tokenizer.name}){share}",
    )


def _title(source: str) -> str:
    return "Python's standard library" if source == "stdlib" else source
