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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.data.chats import FIELDS, ChatEncoder, EncodedChat, holds_chats
from plait.data.document_sources import (
    PIECE,
    SourceRange,
    TextPiece,
    divided,
    field_names,
    files_of,
    read_pieces,
    read_records,
)
from plait.data.folder_lock import LOCK, locked_folder
from plait.data.token_shards import (
    INDEX,
    SETTINGS,
    CorpusIndex,
    ShardEntry,
    read_index,
    shard_files,
    write_index,
)
from plait.data.tokenizer import Tokenizer, Tokens, open_tokenizer
from plait.errors import DataError

SMALLEST_PORTION, LARGEST_PORTION = 1 << 20, 1 << 26
"""Bytes of text in a shard."""
_SHARDS = 64
"""The shards of a corpus of middle size: enough that all processes have work until the end."""
_AHEAD = 2
"""Portions that wait for each process, so that none is idle."""


@dataclass(frozen=True)
class TextEncoding:
    """How text becomes tokens."""

    tokenizer: str
    """bytes, or the path of a `tokenizer.json`."""
    column: str
    end: int | None
    """The token that is written after each document."""
    dtype: str
    chats: bool = False
    """Whether the sources hold conversations."""


@dataclass(frozen=True)
class PreparationProgress:
    """The counts of the finished shards."""

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
    instead of the file. `end`: the token after each document; None: the end token of a
    `tokenizer_config.json` beside the tokenizer, if any. `portion`: bytes of text in a shard; None: by the
    size of the sources. `patience`: see `locked_folder`, where another process prepares the same folder.
    `report` gets the progress and the bytes of all sources. Raises DataError and ConfigError.
    """
    reader = open_tokenizer(tokenizer)
    files = [file for source in sources for file in files_of(source, lines=lines)]
    size = portion or portion_size(sum(file.size for file in files))
    shards = _shards(chain.from_iterable(divided(file, size) for file in files), size)
    chats = column is None and all(holds_chats(field_names(file)) for file in files)
    settings = TextEncoding(
        tokenizer,
        column or "text",
        None if chats else reader.end_token(end),
        "uint16" if reader.vocab <= 1 << 16 else "uint32",
        chats,
    )
    with locked_folder(folder, patience):
        _begin(folder, shards, settings)
        if (folder / INDEX).is_file():
            return _end(folder, read_index(folder))
        entries = _all_written(folder, shards, settings, processes, report)
        index = CorpusIndex(reader.name, reader.vocab, settings.dtype, settings.end, chats, entries)
        write_index(folder, index)
        return _end(folder, index)


def portion_size(total: int) -> int:
    """Return the bytes of text in a shard, of sources of `total` bytes."""
    return min(max(total // _SHARDS, SMALLEST_PORTION), LARGEST_PORTION)


def _all_written(
    folder: Path,
    shards: Sequence[tuple[SourceRange, ...]],
    settings: TextEncoding,
    processes: int,
    report: Callable[[PreparationProgress, int], None],
) -> tuple[ShardEntry, ...]:
    """Write the shards that are not finished; return the counts of all."""
    sizes = [sum(one.size for one in shard) for shard in shards]
    done: dict[int, ShardEntry] = {}
    size = documents = tokens = 0

    def count(number: int, entry: ShardEntry) -> None:
        nonlocal size, documents, tokens
        done[number] = entry
        size, documents, tokens = size + sizes[number], documents + entry.documents, tokens + entry.tokens

    for number in range(len(shards)):
        if entry := _finished(folder, number, settings.dtype):
            count(number, entry)
    report(PreparationProgress(size, documents, tokens), sum(sizes))
    waiting = {number: one for number, one in enumerate(shards) if number not in done}
    for number, entry in _written(folder, waiting, settings, processes):
        count(number, entry)
        report(PreparationProgress(size, documents, tokens), sum(sizes))
    return tuple(done[number] for number in range(len(shards)))


def write_shard(
    folder: Path, number: int, ranges: Sequence[SourceRange], settings: TextEncoding
) -> ShardEntry:
    """Tokenize ranges of sources and write them as one shard; return its counts, which are written last."""
    dtype = settings.dtype
    paths = shard_files(folder, number)
    ends = array("q")
    total = answers = unanswered = 0
    with _partial(paths.tokens).open("wb") as file, _partial(paths.answers).open("wb") as marks:
        for piece in _encoded(ranges, settings):
            piece.tokens.astype(dtype).tofile(file)
            total += len(piece.tokens)
            if piece.answers is not None:
                piece.answers.tofile(marks)
                answers += (found := int(piece.answers.sum()))
                unanswered += not found
            if piece.ends:
                ends.append(total)
    with _partial(paths.ends).open("wb") as file:
        ends.tofile(file)
    for path in (paths.tokens, paths.ends, *([paths.answers] if settings.chats else [])):
        _partial(path).replace(path)
    _partial(paths.answers).unlink(missing_ok=True)
    entry = ShardEntry(total, len(ends), answers, unanswered)
    _write(_counts(folder, number), json.dumps(asdict(entry)))
    return entry


class _EncodedPiece(NamedTuple):
    """Tokens of one document, or of a part of it."""

    tokens: Tokens
    answers: NDArray[np.bool_] | None
    """Whether each is part of an answer; None but for chats."""
    ends: bool
    """Whether the document ends with them."""


def _encoded(ranges: Sequence[SourceRange], settings: TextEncoding) -> Iterator[_EncodedPiece]:
    """Yield the documents of some ranges in tokens."""
    if settings.chats:
        for one in ranges:
            yield from (_EncodedPiece(*chat, True) for chat in _encoded_chats(one, settings.tokenizer))
        return
    reader = _tokenizer(settings.tokenizer)
    end = np.array([] if settings.end is None else [settings.end], dtype=settings.dtype)
    for pieces in _batches(ranges, settings.column):
        encoded = reader.encode_each([piece.text for piece in pieces])
        for piece, tokens in zip(pieces, encoded, strict=True):
            yield _EncodedPiece(np.concatenate([tokens, end]) if piece.ends else tokens, None, piece.ends)


def _encoded_chats(one: SourceRange, tokenizer: str) -> Iterator[EncodedChat]:
    """Yield the conversations of a range. Raises DataError, which names the place of one that is none."""
    encoder = _chat_encoder(tokenizer)
    for place, record in read_records(one, FIELDS):
        try:
            yield encoder.encode(record)
        except DataError as error:
            raise DataError(f"{one.path} has a conversation {place} that {error}.") from None


@lru_cache(maxsize=1)
def _chat_encoder(folder: str) -> ChatEncoder:
    """Return the tokenizer and chat template of a folder, which a process opens once."""
    return ChatEncoder(folder)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer, which a process opens once."""
    return open_tokenizer(name)


def _shards(portions: Iterable[SourceRange], size: int) -> list[tuple[SourceRange, ...]]:
    """Return the portions of each shard: consecutive ones, together of about `size` bytes."""
    found: list[tuple[SourceRange, ...]] = []
    held = size
    for one in portions:
        if held + one.size > size:
            found.append(())
            held = 0
        found[-1] += (one,)
        held += one.size
    return found


def _batches(ranges: Sequence[SourceRange], column: str) -> Iterator[list[TextPiece]]:
    """Yield lists of pieces of about `PIECE` characters together."""
    batch: list[TextPiece] = []
    held = 0
    for piece in chain.from_iterable(read_pieces(one, column) for one in ranges):
        batch.append(piece)
        held += len(piece.text)
        if held >= PIECE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _begin(folder: Path, shards: Sequence[Sequence[SourceRange]], settings: TextEncoding) -> None:
    """Write the settings into a new folder; DataError where the folder has those of another preparation."""
    path = folder / SETTINGS
    asked = {"settings": asdict(settings), "shards": [[asdict(one) for one in shard] for shard in shards]}
    text = json.dumps(asked, indent=1)
    if path.is_file():
        if path.read_text() == text:
            return
        raise DataError(
            f"{folder} holds another preparation: repeat its command to go on (sources, which must not have "
            "changed, tokenizer and options), or choose another folder."
        )
    if any(one.name != LOCK for one in folder.iterdir()):
        raise DataError(f"{folder} holds other files: choose a folder that is empty or does not exist.")
    _write(path, text)


def _end(folder: Path, index: CorpusIndex) -> CorpusIndex:
    """Remove the counts of the shards, which stand in the index now."""
    for number in range(len(index.shards)):
        _counts(folder, number).unlink(missing_ok=True)
    return index


def _finished(folder: Path, number: int, dtype: str) -> ShardEntry | None:
    """Return the counts of a shard that an earlier call has finished."""
    try:
        entry = ShardEntry(**json.loads(_counts(folder, number).read_text()))
    except FileNotFoundError:
        return None
    paths = shard_files(folder, number)
    whole = paths.tokens.is_file() and paths.tokens.stat().st_size == entry.tokens * np.dtype(dtype).itemsize
    return entry if whole and paths.ends.is_file() else None


def _written(
    folder: Path, waiting: dict[int, tuple[SourceRange, ...]], settings: TextEncoding, processes: int
) -> Iterator[tuple[int, ShardEntry]]:
    """Write shards in `processes` processes; yield the number and counts of each when it is finished."""
    if not waiting:
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


def _counts(folder: Path, number: int) -> Path:
    """Return the path of the counts of a finished shard, which is there until all are finished."""
    return folder / f"{number:05}.counts.json"


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _write(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees all of it or no file."""
    _partial(path).write_text(text)
    _partial(path).replace(path)
