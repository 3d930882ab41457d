"""Load the data of a run: tokenizer, and batches of one corpus or of several."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.app.config.config import RANDOM, Config, check_steps
from plait.app.data.batches import Batches, RandomBatches, ShuffledBatches, row_total
from plait.app.data.corpus import read_documents
from plait.app.data.mixture import MixedBatches
from plait.app.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from plait.app.data.tokenizer_match import require_tokens_of_transformers
from plait.app.train.prepared_sources import is_tokenized, prepared_folder
from plait.app.train.read_ahead import ReadAhead
from plait.app.train.run_sources import open_source
from plait.app.train.sample import encode_prompt
from plait.app.train.validation_sets import ValidationSet, held_out_validation, opened_validations
from plait.errors import ConfigError
from plait.plan.model_sizes import MOST_SIZE

RANDOM_VALIDATION = 8
"""Batches of random tokens, which have no end, in a validation."""


@dataclass(frozen=True)
class Data:
    """The training and validation batches of a run, and the tokenizer that encoded them.

    `vocab` is the model's. `unreadable`: why `tokenizer` cannot turn these tokens into text, or "".
    `holds_chats`: whether all sources are conversations.
    """

    training: Batches
    validations: tuple[ValidationSet, ...]
    tokenizer: Tokenizer
    vocab: int
    unreadable: str
    summary: str
    holds_chats: bool = False
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
    if data.source == RANDOM and not data.mixture:
        return _random(config, tokenizer, config.model.vocab or tokenizer.vocab)
    fraction = 0.0 if data.validation_sources else data.validation
    opened = [open_source(config, source, tokenizer, fraction) for source in data.sources]
    vocab = max(one.vocab for one in opened)
    rows = [one.training for one in opened]
    training: Batches
    if len(rows) == 1:
        training = ShuffledBatches(rows[0], settings.batch, settings.seed)
    else:
        training = MixedBatches(rows, list(data.sources.values()), settings.batch, settings.seed)
    named = data.validation_sources
    return Data(
        training=ReadAhead(training),
        validations=opened_validations(config, tokenizer) if named else held_out_validation(config, opened),
        tokenizer=tokenizer,
        vocab=vocab,
        unreadable=next((one.unreadable for one in opened if one.unreadable), ""),
        summary="; ".join(one.summary for one in opened),
        holds_chats=all(one.holds_chats for one in opened),
        sources=tuple(data.sources),
    )


def with_steps_of_epochs(config: Config, data: Data) -> Config:
    """Return the configuration with the steps of `train.epochs`, the last one rounded up, in its place.

    Raises `ConfigError` where a field names a step that the run will not have.
    """
    epochs, rows = config.train.epochs, row_total(data.training)
    if epochs is None or rows is None:
        return config
    exact = epochs * rows / config.train.batch
    if exact > MOST_SIZE:
        raise ConfigError(
            f"train.epochs = {epochs:g} are {exact:g} steps, more than {MOST_SIZE}, the most that plait "
            "takes: give fewer."
        )
    steps = max(1, math.ceil(round(exact, 9)))
    known = config.train.model_copy(update={"steps": steps, "epochs": None})
    changed = config.model_copy(update={"train": known})
    check_steps(changed)
    return changed


def check_data(config: Config) -> None:
    """Raise the same errors as `load_data`, before ranks are started; tokenize records, unless they are.

    Only encoding text with a `tokenizer.json` is left to the ranks, since it may take long.
    """
    data = config.data
    sources = [*data.sources, *data.validation_sources.values()]
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
    validations = opened_validations(config, tokenizer)
    if config.data.validation and not validations:
        drawn = RandomBatches(vocab, context, batch, seed, stream=1)
        count = config.train.validate_batches or RANDOM_VALIDATION
        validations = (ValidationSet("", drawn, count),)
    return Data(
        training=RandomBatches(vocab, context, batch, seed),
        validations=validations,
        tokenizer=tokenizer,
        vocab=vocab,
        unreadable="the tokens are drawn uniformly",
        summary=f"uniformly drawn tokens of a vocabulary of {vocab:,}",
    )
