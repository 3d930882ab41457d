"""Sources that a run tokenizes once before its first step: conversations, JSON lines, tables, data sets."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from plait.app.config.config import Config
from plait.app.data.corpus import source_files
from plait.app.data.corpus_index import FORMAT, is_prepared
from plait.app.data.document_sources import files_of
from plait.app.data.preparation import PreparationProgress, prepare_corpus
from plait.app.data.record_fields import require_known_fields
from plait.app.data.recorded_tokenizer import tokenizer_files
from plait.app.data.tables import HUB, dataset_files, is_dataset
from plait.app.data.token_files import holds_tokens
from plait.app.data.token_shards import open_corpus
from plait.errors import DataError

_RECORDS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json", ".json.gz", ".parquet", ".arrow")
_KINDS_OF_RECORDS = ("jsonl", "json", "table")
_NO_FILES = ("stdlib", "random")
_SECONDS_BETWEEN_LINES = 5.0


def holds_records(source: str) -> bool:
    """Return whether `data.source` names conversations or texts in JSON lines, tables or a data set.

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
    """Return the folder of a source's token shards; None for a source that is not prepared.

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
    """Return whether a folder has an index, and files of the sizes that it gives."""
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
