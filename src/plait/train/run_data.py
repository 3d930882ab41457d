"""Load the data of a run: tokenizer, and batches of one corpus or of several."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.data.batches import (
    NO_TARGET,
    Batches,
    ConcatenatedRows,
    RandomBatches,
    Rows,
    ShuffledBatches,
    TokenWindows,
    ValidationBatches,
    row_total,
)
from plait.data.corpus import read_documents
from plait.data.mixture import MixedBatches
from plait.data.read_ahead import ReadAhead
from plait.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from plait.data.tokenizer_match import require_tokens_of_transformers
from plait.errors import ConfigError, DataError
from plait.train.config import Config
from plait.train.data_sources import open_source
from plait.train.prepared_sources import is_tokenized, prepared_folder
from plait.train.sample import encode_prompt

RANDOM_VALIDATION = 8
"""Batches of random tokens, which have no end, in a validation."""


@dataclass(frozen=True)
class Data:
    """The training and validation batches of a run, and the tokenizer that encoded them.

    `validation` has each held-out sequence once, or those of `train.validate_batches`. `vocab` is the
    model's. `unreadable`: why `tokenizer` cannot turn these tokens into text, or "". `holds_chats`: whether
    all sources are conversations.
    """

    training: Batches
    validation: Batches | None
    tokenizer: Tokenizer
    vocab: int
    unreadable: str
    summary: str
    holds_chats: bool = False
    validation_batches: int | None = None
    """Batches in a validation; None: as many as `validation` has."""
    validation_summary: str = ""
    """Which sequences are validated; "" for random tokens."""
    sources: tuple[str, ...] = ()
    """Of `training`, if it is a mixture."""

    def epochs(self, steps: int) -> dict[str, float]:
        """Return how many times each source is taken in so many steps, by its name as text; {} if endless."""
        training = self.training
        if isinstance(training, ReadAhead) and isinstance(training.batches, MixedBatches):
            names = (f" of {source}" for source in self.sources)
            return dict(zip(names, training.batches.epochs(steps), strict=True))
        rows = row_total(training)
        return {"": steps * training.size / rows} if rows else {}


def load_data(config: Config) -> Data:
    """Open the corpora, and hold the end of each out for validation, unless there is another source for that.

    Every rank gets the same result, without communication. Raises `DataError` or `ConfigError` that
    names the field when a corpus is missing, empty, binary or too short, or a token is beyond the
    vocabulary.
    """
    data, settings = config.data, config.train
    tokenizer = open_tokenizer(config.tokenizer)
    if data.source == "random":
        return _random(config, tokenizer, config.model.vocab or tokenizer.vocab)
    fraction = 0.0 if data.validation_source else data.validation
    opened = [open_source(config, source, tokenizer, fraction) for source in data.sources]
    vocab = max(one.vocab for one in opened)
    rows = [one.training for one in opened]
    training: Batches
    if len(rows) == 1:
        training = ShuffledBatches(rows[0], settings.batch, settings.seed)
    else:
        training = MixedBatches(rows, list(data.sources.values()), settings.batch, settings.seed)
    held_out = [(one.held_out, one.holds_chats) for one in opened if one.held_out is not None]
    if data.validation_source:
        other = open_source(config, data.validation_source, tokenizer, 0.0)
        held_out = [(other.training, other.holds_chats)]
    validation, validated = _validation(config, held_out)
    return Data(
        training=ReadAhead(training),
        validation=validation,
        tokenizer=tokenizer,
        vocab=vocab,
        unreadable=next((one.unreadable for one in opened if one.unreadable), ""),
        summary="; ".join(one.summary for one in opened),
        holds_chats=all(one.holds_chats for one in opened),
        validation_summary=validated,
        sources=tuple(data.sources),
    )


def _validation(config: Config, held_out: list[tuple[Rows, bool]]) -> tuple[Batches | None, str]:
    """Return batches of the rows that are held out, each with whether they are of conversations; and which.

    Raises `DataError` where no target of conversations counts.
    """
    if not held_out:
        return None, ""
    rows = [one for one, _ in held_out]
    every = rows[0] if len(rows) == 1 else ConcatenatedRows(rows)
    batches = ValidationBatches(every, config.train.batch, config.train.validate_batches)
    if all(holds_chats for _, holds_chats in held_out):
        _require_targets(config, batches)
    if batches.rows < every.count:
        return batches, (
            f"{batches.rows:,} of {every.count:,} sequences, evenly spaced (train.validate_batches = "
            f"{config.train.validate_batches})"
        )
    left = sum(one.left for one in rows if isinstance(one, TokenWindows))
    count = "the only sequence" if every.count == 1 else f"all {every.count:,} sequences"
    return batches, count + (f", without {left:,} tokens that fill none" if left else "")


def _require_targets(config: Config, validation: ValidationBatches) -> None:
    """Raise `DataError` where no target of the validation data counts, as where all answers are cut off."""
    numbers = range(math.ceil(validation.rows / validation.size))
    targets = (validation.batch(number, slice(0, validation.size))[1] for number in numbers)
    if not any(bool((one != NO_TARGET).any()) for one in targets):
        raise DataError(
            "none of the conversations for validation has an answer that is to be predicted, within "
            f"model.context = {config.model.context}: raise data.validation = {config.data.validation:g} or "
            "model.context, or give data.validation_source."
        )


def check_data(config: Config) -> None:
    """Raise the same errors as `load_data`, before ranks are started; tokenize records, unless they are.

    Only encoding text with a `tokenizer.json` is left to the ranks, since it may take long.
    """
    data = config.data
    sources = [*data.sources, *([data.validation_source] if data.validation_source else [])]
    texts = [one for one in sources if not is_tokenized(one)]
    for source in set(sources) - set(texts):
        prepared_folder(config, source)
    holds_chats = False
    if config.tokenizer == "bytes" or not texts:
        loaded = load_data(config)
        vocab, tokenizer, readable = loaded.vocab, loaded.tokenizer, not loaded.unreadable
        holds_chats = loaded.holds_chats
    else:
        tokenizer = open_tokenizer(config.tokenizer)
        if isinstance(tokenizer, FileTokenizer):
            require_tokens_of_transformers(tokenizer)
        vocab, readable = config.model.vocab or tokenizer.vocab, data.source != "random"
        for source in texts if readable else ():
            read_documents(source)
    if config.train.sample and readable:
        largest = max(encode_prompt(config, tokenizer, is_question=holds_chats).tokens, default=0)
        if largest >= vocab:
            raise ConfigError(
                f"train.sample = {config.train.sample!r} holds token {largest}, outside the "
                f"vocabulary of {vocab}: choose another prompt, or leave model.vocab to the tokenizer."
            )


def _random(config: Config, tokenizer: Tokenizer, vocab: int) -> Data:
    context, batch, seed = config.model.context, config.train.batch, config.train.seed
    validation = RandomBatches(vocab, context, batch, seed, stream=1) if config.data.validation else None
    return Data(
        training=RandomBatches(vocab, context, batch, seed),
        validation=validation,
        validation_batches=config.train.validate_batches or RANDOM_VALIDATION,
        tokenizer=tokenizer,
        vocab=vocab,
        unreadable="the tokens are drawn uniformly",
        summary=f"uniformly drawn tokens of a vocabulary of {vocab:,}",
    )
