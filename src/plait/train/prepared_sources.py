"""Sources that a run tokenizes once before its first step: conversations, JSON lines, tables, data sets."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from plait.data.chats import holds_chats
from plait.data.document_sources import field_names, files_of
from plait.data.preparation import PreparationProgress, prepare_corpus
from plait.data.tables import is_dataset
from plait.data.token_files import holds_tokens
from plait.data.token_shards import INDEX, is_prepared
from plait.train.config import Config

_RECORDS = (".jsonl", ".ndjson", ".parquet")
_SECONDS_BETWEEN_LINES = 5.0


def holds_records(source: str) -> bool:
    """Return whether `data.source` names conversations or texts in JSON lines, a table or a data set."""
    path = Path(source).expanduser()
    if path.suffix not in _RECORDS or not path.is_file():
        return is_dataset(source)
    fields = [name for file in files_of(source) for name in field_names(file)]
    return "text" in fields or holds_chats(fields)


def is_tokenized(source: str) -> bool:
    """Return whether a run reads `data.source` as tokens: it has them, or tokenizes them once."""
    return holds_tokens(source) or is_prepared(source) or holds_records(source)


def prepared_folder(config: Config, source: str) -> Path | None:
    """Return the folder of a source's token shards; None for a source that is not prepared.

    Records are tokenized into `run.dir`, unless they have been. Of the processes of an external launcher one
    does it, where `run.dir` is a host's own one for each host; the others wait while it makes progress, at
    most `run.timeout` seconds without any. Raises DataError and ConfigError.
    """
    if is_prepared(source):
        return Path(source).expanduser()
    if not holds_records(source):
        return None
    text = f"{_version(source)} {Path(config.tokenizer).resolve()}"
    folder = config.run.dir / f"prepared-{sha256(text.encode()).hexdigest()[:12]}"
    if not (folder / INDEX).is_file():
        prepare_corpus(
            [source],
            folder,
            config.tokenizer,
            processes=os.cpu_count() or 1,
            patience=config.run.timeout,
            report=_printing(source),
        )
    return folder


def _version(source: str) -> str:
    """Return a text that changes with the files of a source; of a data set by name only its name."""
    path = Path(source).expanduser()
    if not path.exists():
        return source
    state = path.stat()
    return f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"


def _printing(source: str) -> Callable[[PreparationProgress, int], None]:
    """Return a function that prints the progress every few seconds."""
    printed_at = time.monotonic()

    def report(done: PreparationProgress, total: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at > _SECONDS_BETWEEN_LINES:
            printed_at = time.monotonic()
            print(f"Tokenizing {source}: {done.size / 1e6:,.1f} of {total / 1e6:,.1f} MB", file=sys.stderr)

    return report
