"""`prepare_corpus`: tokenize a corpus into token shards, in several processes, restartable at any point.

Consecutive portions of the sources become a shard, whatever process does it and when. A shard is finished
when the file with its counts is there, which is written last; so another call goes on after the finished
ones, and gives the same files as a call that was never interrupted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.app.data.chat_encoder import EncodedPart, are_chats
from plait.app.data.checksummed_files import whole_file, write_text
from plait.app.data.corpus_manifest import (
    SHOWN_NAMES,
    CorpusIndex,
    ShardEntry,
    damaged_shards,
    read_entry,
    read_index,
    shard_arrays,
    shard_paths,
    write_index,
)
from plait.app.data.document_sources import SourceFile, SourceRange, divided, files_of
from plait.app.data.encoded_documents import TextEncoding, encoded_documents
from plait.app.data.preparation_folder import begin_preparation, locked_preparation
from plait.app.data.recorded_tokenizer import record_tokenizer, require_tokens_of_transformers
from plait.app.data.tokenizer import FileTokenizer, open_tokenizer
from plait.app.data.tokenizer_json import SurroundingTokens, files_hash
from plait.errors import ConfigError, DataError

SMALLEST_PORTION, LARGEST_PORTION = 1 << 20, 1 << 26
"""Bytes of text in a shard."""
_SHARDS = 64
"""The shards of a corpus of middle size: enough that all processes have work until the end."""
_AHEAD = 2
"""Portions that wait for each process, so that none is idle."""


def write_shard(
    folder: Path, number: int, ranges: Sequence[SourceRange], settings: TextEncoding
) -> ShardEntry:
    """Tokenize ranges of sources and write them as one shard; return its counts, which are written last."""
    ends, first_answers, counts = array("q"), array("I"), _Counts()
    paths = shard_paths(folder, number, settings.chats)
    with ExitStack() as files:
        writers = [files.enter_context(whole_file(path)) for path in paths]
        for part in encoded_documents(ranges, settings):
            writers[0].write(part.tokens.astype(settings.dtype).data)
            counts.add(part)
            _require_known(counts.largest, settings)
            if part.answers is not None:
                writers[2].write(part.answers.data)
                first_answers.append(first_answer(part.answers))
            if part.ends:
                ends.append(counts.tokens)
        writers[1].write(ends)
        if settings.chats:
            writers[3].write(first_answers)
    entry = counts.entry(len(ends), tuple(one.checksum for one in writers))
    write_text(counts_file(folder, number), json.dumps(asdict(entry)))
    return entry


def first_answer(answers: NDArray[np.bool_]) -> int:
    """Return the index of a conversation's first target token, or 0 (never a target) if there is none."""
    return int(np.argmax(answers[1:])) + 1 if answers[1:].any() else 0


def _require_known(largest: int, settings: TextEncoding) -> None:
    """Raise DataError for a token that the tokenizer's vocabulary does not have."""
    if largest >= settings.vocab:
        raise DataError(
            f"{settings.tokenizer} gives token {largest} to a text, and its tokenizer.json has the tokens up "
            f"to {settings.vocab - 1} only: save the tokenizer again by transformers' save_pretrained."
        )


class _Counts:
    """Accumulates the counts of a shard for `index.json`."""

    def __init__(self) -> None:
        self.tokens = self._left_out = self._answers = self._unanswered = 0
        self.largest = -1
        self._names: dict[str, dict[str, None]] = {"unread": {}, "unknown_roles": {}, "left_out_roles": {}}
        """In the order of the fields of `ShardEntry`."""

    def add(self, part: EncodedPart) -> None:
        """Count a part of a document."""
        self.tokens += len(part.tokens)
        self._left_out += part.left_out
        self.largest = max(self.largest, int(part.tokens.max(initial=0)))
        if part.answers is not None:
            self._answers += (found := int(part.answers.sum()))
            self._unanswered += not found
        for name, known in self._names.items():
            if len(known) < SHOWN_NAMES:
                known.update(dict.fromkeys(getattr(part, name)))

    def entry(self, documents: int, checksums: tuple[str, ...]) -> ShardEntry:
        """Return a shard's entry in the index: counts so far, `documents` that end in it, and checksums."""
        unread, unknown, left_out = (tuple(known)[:SHOWN_NAMES] for known in self._names.values())
        counts = self.tokens, documents, self._answers, self._unanswered, self._left_out, self.largest
        return ShardEntry(*counts, unread, unknown, left_out, checksums)


def counts_file(folder: Path, number: int) -> Path:
    """Return the path of the counts of a finished shard, which is there until all are finished."""
    return folder / f"{number:05}.counts.json"


@dataclass(frozen=True)
class PreparationProgress:
    """The bytes, documents and tokens of the shards that are finished."""

    size: int
    """Bytes of the source."""
    documents: int
    tokens: int


def prepare_corpus(
    sources: Sequence[str],
    folder: Path,
    tokenizer: str,
    *,
    processes: int = 1,
    column: str | None = None,
    lines: bool = False,
    end: str | None = None,
    portion: int | None = None,
    patience: float = 0.0,
    report: Callable[[PreparationProgress, int], None] = lambda done, total: None,
) -> CorpusIndex:
    """Tokenize `sources` into `folder`, and return its index; goes on where an earlier call was interrupted.

    `tokenizer`: bytes, or the path of a `tokenizer.json`. `column`: field of JSON lines, column of tables
    that holds the text; None: text, but for conversations. `lines`: each line of a text file is a document,
    instead of the file. `end`: the token after each document; None: see `FileTokenizer.surrounding`.
    `portion`: bytes of text in a shard; None: by the size of the sources. `patience`: see
    `locked_preparation`, where another process prepares the same folder. `report` gets the progress and the
    bytes of all sources. Raises DataError and ConfigError.
    """
    files = [file for source in sources for file in files_of(source, lines=lines)]
    _require_used(files, column, lines=lines)
    chats = column is None and _are_chats(files, tokenizer)
    if chats and end is not None:
        raise ConfigError(
            f"--end {end!r}: conversations end as the tokenizer's chat template says; leave it out."
        )
    reader = open_tokenizer(tokenizer)
    around = SurroundingTokens() if chats else reader.surrounding(end)
    if isinstance(reader, FileTokenizer):
        require_tokens_of_transformers(reader)
    size = portion or portion_size(sum(file.size for file in files))
    encode = reader.encode_each if isinstance(reader, FileTokenizer) else None
    shards = _shards(chain.from_iterable(divided(file, size, encode) for file in files), size)
    dtype: Literal["uint16", "uint32"] = "uint16" if reader.vocab <= 1 << 16 else "uint32"
    found = files_hash(tokenizer)
    settings = TextEncoding(tokenizer, column or "text", *around, reader.vocab, dtype, chats, found)
    last = around.after[-1] if around.after else None
    empty = CorpusIndex(reader.name, reader.vocab, dtype, last, chats, (), found)
    with locked_preparation(folder, patience), _one_sentence(folder):
        begin_preparation(folder, shards, settings)
        known = _intact_shards(folder, empty, len(shards))
        entries = _all_written(folder, shards, settings, processes, report, known)
        record_tokenizer(folder, tokenizer)
        index = replace(empty, shards=entries)
        if len(known) < len(entries) or _index_in(folder) != index:
            write_index(folder, index)
        for number in range(len(entries)):  # they stand in the index now
            counts_file(folder, number).unlink(missing_ok=True)
        return index


def _require_used(files: Sequence[SourceFile], column: str | None, *, lines: bool) -> None:
    """Raise ConfigError for an option of rows, or of text files, where there are none."""
    kinds = {file.kind for file in files}
    if column is not None and kinds <= {"text", "lines"}:
        raise ConfigError(f"--column {column!r}: the sources are text, without fields; leave it out.")
    if lines and "lines" not in kinds:
        raise ConfigError("--lines: the sources hold rows, each a document already; leave it out.")


def _index_in(folder: Path) -> CorpusIndex | None:
    """Return the index of a folder; None where it has none, or a damaged one."""
    try:
        return read_index(folder)
    except DataError:
        return None


def _intact_shards(folder: Path, empty: CorpusIndex, count: int) -> dict[int, ShardEntry]:
    """Return the undamaged of the `count` shards in a folder whose index is `empty` but for its shards."""
    index = _index_in(folder)
    if index is None or len(index.shards) != count:
        return {}
    if replace(index, shards=(), tokenizer_hash=empty.tokenizer_hash) != empty:
        return {}
    damaged = set(damaged_shards(folder, index))
    return {number: entry for number, entry in enumerate(index.shards) if number not in damaged}


@contextmanager
def _one_sentence(folder: Path) -> Iterator[None]:
    """Context manager that raises DataError where a file cannot be written, such as on a full disk."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or folder} cannot be written ({error.strerror or error}): make room or choose "
            "another folder; the same command goes on after the shards that are finished."
        ) from None


def _are_chats(files: Sequence[SourceFile], tokenizer: str) -> bool:
    """Return whether files are conversations. Raises DataError as `are_chats`, ConfigError for bytes."""
    chats = are_chats(files)
    if chats and tokenizer == "bytes":
        raise ConfigError(
            f"{files[0].path} holds conversations, and conversations need a tokenizer with a chat template: "
            "set model.name or data.tokenizer (of `plait data prepare`: --tokenizer) to a folder with one."
        )
    return chats


def portion_size(total: int) -> int:
    """Return how many bytes of text go into each shard of a corpus of `total` bytes."""
    return min(max(total // _SHARDS, SMALLEST_PORTION), LARGEST_PORTION)


def _all_written(
    folder: Path,
    shards: Sequence[tuple[SourceRange, ...]],
    settings: TextEncoding,
    processes: int,
    report: Callable[[PreparationProgress, int], None],
    known: Mapping[int, ShardEntry],
) -> tuple[ShardEntry, ...]:
    """Write the shards that are neither in `known` nor finished; return the counts of all."""
    sizes = [sum(one.size for one in shard) for shard in shards]
    found = {
        number: known.get(number) or _finished(folder, number, settings) for number in range(len(shards))
    }
    done = {number: entry for number, entry in found.items() if entry is not None}

    def tell() -> None:
        size, entries = sum(sizes[number] for number in done), done.values()
        documents, tokens = sum(one.documents for one in entries), sum(one.tokens for one in entries)
        report(PreparationProgress(size, documents, tokens), sum(sizes))

    tell()
    waiting = {number: one for number, one in enumerate(shards) if number not in done}
    for number, entry in _written(folder, waiting, settings, processes) if waiting else ():
        done[number] = entry
        tell()
    return tuple(done[number] for number in range(len(shards)))


def _shards(portions: Iterable[SourceRange], size: int) -> list[tuple[SourceRange, ...]]:
    """Return the portions of each shard: consecutive ones, together of about `size` bytes."""
    found: list[tuple[SourceRange, ...]] = []
    held = 0
    for one in portions:
        if not found or held + one.size > size:
            found.append(())
            held = 0
        found[-1] += (one,)
        held += one.size
    return found


def _finished(folder: Path, number: int, settings: TextEncoding) -> ShardEntry | None:
    """Return the counts of a shard that an earlier call has finished; None of one that is not whole."""
    try:
        entry = read_entry(counts_file(folder, number))
    except DataError:
        return None
    arrays = shard_arrays(folder, number, entry, settings.dtype, settings.chats)
    return entry if all(one.is_whole() for one in arrays) else None


def _written(
    folder: Path, waiting: dict[int, tuple[SourceRange, ...]], settings: TextEncoding, processes: int
) -> Iterator[tuple[int, ShardEntry]]:
    """Write shards in `processes` processes; yield the number and counts of each when it is finished."""
    if processes == 1 or len(waiting) <= 1:  # this one is enough, and need not be started
        for number, shard in sorted(waiting.items()):
            yield number, write_shard(folder, number, shard, settings)
        return
    left, running = sorted(waiting, reverse=True), dict[Future[ShardEntry], int]()
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(waiting)), spawn, initializer=_end_with_parent)
    try:
        while left or running:
            while left and len(running) < processes * _AHEAD:
                number = left.pop()
                running[pool.submit(write_shard, folder, number, waiting[number], settings)] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise DataError(
            f"a process that writes {folder} was killed, perhaps for lack of memory: repeat the command to "
            "go on, with fewer --processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Make this process end when its parent does, also where the parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
