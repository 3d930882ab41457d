"""The data of a run's validations: held-out parts of its corpora, or sources of their own, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.app.config.config import Config
from plait.app.data.batches import NO_TARGET, Batches, ConcatenatedRows, Rows, TokenWindows, ValidationBatches
from plait.app.data.tokenizer import Tokenizer
from plait.app.train.run_sources import OpenSource, open_source
from plait.errors import DataError


@dataclass(frozen=True)
class ValidationSet:
    """The data of one validation: each held-out sequence once, or those of `train.validate_batches`."""

    name: str
    """That of the source; "" for a single one."""
    batches: Batches
    count: int | None = None
    """Batches in a validation; None: as many as `batches` has."""
    summary: str = ""
    """Which sequences are validated; "" for random tokens."""


def opened_validations(config: Config, tokenizer: Tokenizer) -> tuple[ValidationSet, ...]:
    """Return the sources of `data.validation_source`, opened. Raises `DataError` or `ConfigError`."""
    opened = {
        name: open_source(config, source, tokenizer, 0.0)
        for name, source in config.data.validation_sources.items()
    }
    return tuple(
        _validation_set(config, name, [(one.training, one.holds_chats)]) for name, one in opened.items()
    )


def held_out_validation(config: Config, opened: list[OpenSource]) -> tuple[ValidationSet, ...]:
    """Return the rows that are held out of the training data, as one set; none where there are none."""
    rows = [(one.held_out, one.holds_chats) for one in opened if one.held_out is not None]
    return (_validation_set(config, "", rows),) if rows else ()


def _validation_set(config: Config, name: str, held_out: list[tuple[Rows, bool]]) -> ValidationSet:
    """Return batches of rows, each given with whether they are of conversations.

    Raises `DataError` where no target of conversations counts.
    """
    rows = [one for one, _ in held_out]
    every = rows[0] if len(rows) == 1 else ConcatenatedRows(rows)
    batches = ValidationBatches(every, config.train.batch, config.train.validate_batches)
    if all(holds_chats for _, holds_chats in held_out):
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
