"""The data of a run: tokenizer, batches of one corpus or of several, read ahead, validations, the prompt."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from plait.app.config.config import RANDOM, Config, check_steps
from plait.app.data.batches import (
    NO_TARGET,
    Batches,
    ConcatenatedRows,
    InputsAndTargets,
    MixedBatches,
    RandomBatches,
    Rows,
    ShuffledBatches,
    TokenWindows,
    ValidationBatches,
    description,
    row_total,
)
from plait.app.data.chat_encoder import ChatEncoder
from plait.app.data.document_sources import read_documents
from plait.app.data.recorded_tokenizer import require_tokens_of_transformers
from plait.app.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from plait.app.train.data_sources import OpenSource, is_tokenized, open_source, prepared_folder
from plait.errors import ConfigError, DataError
from plait.plan.decoder_sizes import MOST_SIZE


class ReadAhead:
    """Wrapper of `batches` that reads the next step's batch in a background thread; for one caller thread."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        """The batches that are read."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="plait-read-ahead")
        self._next: tuple[int, slice, Future[InputsAndTargets]] | None = None

    @property
    def size(self) -> int:
        """The number of rows of a global batch."""
        return self.batches.size

    @property
    def rows(self) -> int | None:
        """The number of rows of the batches; None for endless ones."""
        return row_total(self.batches)

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the samples of each step, as JSON values."""
        return description(self.batches)

    def batch(self, step: int, rows: slice) -> InputsAndTargets:
        """Return `rows` of the global batch of `step`, and start to read the same rows of the next one."""
        if self._next is not None and self._next[:2] == (step, rows):
            made = self._next[2].result()
        else:
            made = self.batches.batch(step, rows)
        self._next = step + 1, rows, self._reader.submit(self.batches.batch, step + 1, rows)
        return made


@dataclass(frozen=True)
class ValidationSet:
    """The data of one validation: all held-out sequences, or as many as `train.validate_batches` says."""

    name: str
    """That of the source; "" for a single one."""
    batches: Batches
    count: int | None = None
    """Batches in a validation; None: as many as `batches` has."""
    summary: str = ""
    """Which sequences are validated; "" for random tokens."""


def opened_validations(config: Config, tokenizer: Tokenizer) -> tuple[ValidationSet, ...]:
    """Return the sources of `data.validation_source`, opened. Raises `DataError` or `ConfigError`."""
    named = config.data.validation_sources.items()
    opened = {name: open_source(config, source, tokenizer, 0.0) for name, source in named}
    return tuple(
        _validation_set(config, name, [one.training], one.holds_chats) for name, one in opened.items()
    )


def held_out_validation(config: Config, opened: list[OpenSource]) -> tuple[ValidationSet, ...]:
    """Return the rows held out of the training data as one validation set; () if there are none."""
    rows = [one.held_out for one in opened if one.held_out is not None]
    return (_validation_set(config, "", rows, all(one.holds_chats for one in opened)),) if rows else ()


def _validation_set(config: Config, name: str, rows: list[Rows], only_chats: bool) -> ValidationSet:
    """Return batches of rows. Raises `DataError` where they are of conversations, and no target counts."""
    every = rows[0] if len(rows) == 1 else ConcatenatedRows(rows)
    batches = ValidationBatches(every, config.train.batch, config.train.validate_batches)
    if only_chats:
        _require_targets(config, batches)
    if batches.rows < every.count:
        summary = (
            f"{batches.rows:,} of {every.count:,} sequences, evenly spaced (train.validate_batches = "
            f"{config.train.validate_batches})"
        )
    else:
        left = sum(one.left for one in rows if isinstance(one, TokenWindows))
        count = "the only sequence" if every.count == 1 else f"all {every.count:,} sequences"
        summary = count + (f", without {left:,} tokens that fill none" if left else "")
    return ValidationSet(name, batches, summary=summary)


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
        """Return how many times `steps` steps take the rows of each source, by name; {} if endless."""
        training = self.training
        if isinstance(training, ReadAhead) and isinstance(training.batches, MixedBatches):
            names = (f" of {source}" for source in self.sources)
            return dict(zip(names, training.batches.epochs(steps), strict=True))
        rows = row_total(training)
        return {"": steps * training.size / rows} if rows else {}


def load_data(config: Config) -> Data:
    """Open a run's corpora; without validation data, hold out the end of each corpus for validation.

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
    """Return the configuration with `train.epochs` converted to `train.steps`, rounded up.

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
    """Raise the errors of `load_data` before ranks are started; tokenize records not yet tokenized.

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


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, and tokens that end a continuation."""

    tokens: list[int]
    stop: tuple[int, ...] = ()
    is_question: bool = False
    """Whether they are a user's message in the chat template, of which the text is not shown."""


def encode_prompt(config: Config, tokenizer: Tokenizer, *, is_question: bool) -> Prompt:
    """Return `train.sample` in tokens; a question is a user's message in the tokenizer's chat template.

    Raises `ConfigError` where the tokenizer has no chat template.
    """
    text = config.train.sample
    if not is_question or not text:
        return Prompt(tokenizer.prompt(text))
    encoder = ChatEncoder(config.tokenizer)
    return Prompt(encoder.question(text).tolist(), encoder.end_of_answer, True)


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
