"""`index.json` of a prepared corpus: how its tokens were made, the counts and checksums of its shards' files.

    {"format": 3, "checksum": "9f3ac2d1", "tokenizer": …, "shards": […]}

It is written last. The checksum is the CRC-32 of its content, and each shard has those of its files; corpora
of earlier versions have none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from plait.app.data.array_file import ArrayFile
from plait.app.data.checksummed_files import file_checksum, read_json_object, write_text
from plait.app.data.tokenizer_json import files_hash
from plait.errors import DataError
from plait.files import validated

T = TypeVar("T")

INDEX = "index.json"
SETTINGS = "preparation.json"
"""Sources and settings of the preparation, finished or not."""
TOKENIZER_FOLDER = "tokenizer"
"""The folder of the tokenizer's files; it is not there for bytes."""
FORMAT = 3
SHOWN_NAMES = 8
"""The most roles and fields that are named."""
REMEDY = "repeat its `plait data prepare`, which writes what is damaged again, or prepare another folder"
_CHECKSUM = "checksum"
Count = Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
Names = tuple[StrictStr, ...]


@dataclass(frozen=True)
class ShardEntry:
    """What `index.json` says of one shard (file of tokens): counts of tokens and documents, checksums."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    tokens: Count
    documents: Count
    """The number of documents that end in the shard."""
    answers: Count = 0
    """Of chats: the number of tokens in answers."""
    unanswered: Count = 0
    """Of chats: the number of conversations without any."""
    left_out: Count = 0
    """The number of documents of less than two tokens, of which none can be predicted."""
    largest: Annotated[StrictInt, Field(ge=-1, lt=1 << 32)] = -1
    """The largest token; −1 where there is none."""
    unread: Names = ()
    """Fields of rows and messages that nothing reads, a few of them."""
    unknown_roles: Names = ()
    """Of conversations without an answer: roles that are neither the assistant's nor others known."""
    left_out_roles: Names = ()
    """The roles of messages that the chat template leaves out."""
    checksums: Annotated[Names, Field(max_length=4)] = ()
    """The CRC-32 of each of the shard's files; empty in corpora of earlier versions."""


@dataclass(frozen=True)
class CorpusIndex:
    """The contents of a prepared corpus's `index.json`: its tokenizer, dtype and shards (files of tokens)."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    tokenizer: StrictStr
    """Its file's name, or bytes."""
    vocab: Annotated[StrictInt, Field(ge=0, le=1 << 32)]
    dtype: Literal["uint16", "uint32"]
    end: Count | None
    """The token after each document, if any."""
    chats: StrictBool
    """Whether the documents are conversations, whose answers are known."""
    shards: tuple[ShardEntry, ...]
    tokenizer_hash: StrictStr = ""
    """Of the content of the tokenizer's files, see `files_hash`; empty for bytes and in earlier versions."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """The number of documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    def count(self, name: str) -> int:
        """Return the sum over all shards of the count `name` in their entries, such as `answers`."""
        return sum(getattr(shard, name) for shard in self.shards)

    @property
    def largest(self) -> int:
        """The largest token of all shards."""
        return max((shard.largest for shard in self.shards), default=-1)

    def names(self, name: str) -> str:
        """Return as text the first few distinct names in all shards' field `name`, such as `unread`."""
        found = dict.fromkeys(one for shard in self.shards for one in getattr(shard, name))
        return ", ".join(map(repr, [*found][:SHOWN_NAMES])) + (", …" if len(found) > SHOWN_NAMES else "")

    def notes(self) -> list[str]:
        """Return notes on documents and fields of the sources that are not used for training."""
        notes = []
        if left_out := self.count("left_out"):
            documents, are = ("document", "is") if left_out == 1 else ("documents", "are")
            notes.append(f"{left_out:,} {documents} of less than two tokens {are} left out")
        if roles := self.names("left_out_roles"):
            notes.append(f"the chat template leaves out messages of the roles {roles}")
        if unread := self.names("unread"):
            notes.append(f"not read: {unread}")
        return notes


def shard_paths(folder: Path, number: int, chats: bool) -> list[Path]:
    """Return the paths of a shard's files: tokens and ends of documents; with `chats`, its answers too."""
    names = ("tokens", "documents", "answers", "first_answers") if chats else ("tokens", "documents")
    return [folder / f"{number:05}.{name}.bin" for name in names]


def shard_arrays(folder: Path, number: int, entry: ShardEntry, dtype: str, chats: bool) -> list[ArrayFile]:
    """Return the arrays in a shard's files, whose lengths are the counts in `entry`."""
    kinds = (dtype, entry.tokens), ("<i8", entry.documents), ("u1", entry.tokens), ("<u4", entry.documents)
    return [
        ArrayFile(path, kind, count, ends_of=entry.tokens if kind == "<i8" else None)
        for path, (kind, count) in zip(shard_paths(folder, number, chats), kinds, strict=False)
    ]


def write_index(folder: Path, index: CorpusIndex) -> None:
    """Write the `index.json` of a prepared corpus, the last file of its preparation. Raises OSError."""
    content = asdict(index)
    whole = {"format": FORMAT, _CHECKSUM: _content_checksum(content), **content}
    write_text(folder / INDEX, json.dumps(whole, indent=1))


def is_prepared(source: str) -> bool:
    """Return whether `data.source` names a folder that `plait data prepare` has written, or begun."""
    folder = Path(source).expanduser()
    return (folder / INDEX).is_file() or (folder / SETTINGS).is_file()


def read_index(folder: Path) -> CorpusIndex:
    """Read the `index.json` of the prepared corpus in `folder`. Raises DataError if missing or damaged."""
    path = folder / INDEX
    if not path.exists():
        raise DataError(f"{folder} has no {INDEX}: give a folder that `plait data prepare` has finished.")
    found = read_json_object(path, REMEDY)
    if found.pop("format", None) != FORMAT:
        raise DataError(f"{path} is of another version of plait: prepare the corpus again.")
    checksum = found.pop(_CHECKSUM, None)
    index = _valid(CorpusIndex, found, path)
    has_checksums = checksum is not None or any(shard.checksums for shard in index.shards)
    if has_checksums and checksum != _content_checksum(found):
        raise DataError(f"{path} is not what was written, by its checksum: {REMEDY}.")
    if reason := _contradiction(index):
        raise DataError(f"{path} is damaged ({reason}): {REMEDY}.")
    return index


def read_entry(path: Path) -> ShardEntry:
    """Read the counts of a finished shard of a corpus. Raises DataError if the file is missing or damaged."""
    return _valid(ShardEntry, read_json_object(path, REMEDY), path)


def _valid(kind: type[T], found: object, path: Path) -> T:
    try:
        return validated(kind, json.dumps(found))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): {REMEDY}.") from None


def _content_checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _contradiction(index: CorpusIndex) -> str:
    """Return in words how the counts of an index contradict each other, "" where they do not."""
    if index.vocab > 1 << (16 if index.dtype == "uint16" else 32):
        return f"vocab: {index.vocab} is more than {index.dtype} can count"
    if index.end is not None and index.end >= index.vocab:
        return f"end: {index.end} is no token of {index.vocab}"
    for number, shard in enumerate(index.shards):
        if shard.answers > shard.tokens:
            return f"shards.{number}: it has more answers than tokens"
        if shard.checksums and len(shard.checksums) != (4 if index.chats else 2):
            return f"shards.{number}: it has {len(shard.checksums)} checksums"
    return ""


def require_intact(folder: Path, index: CorpusIndex, most: int | None = None) -> None:
    """Raise DataError for the first damaged file of a corpus, by the checksums in its index.

    `most`: the bytes that are read; None: all. Files of earlier versions have no checksums.
    """
    if index.tokenizer_hash and files_hash(str(folder / TOKENIZER_FOLDER)) != index.tokenizer_hash:
        raise DataError(
            f"{folder / TOKENIZER_FOLDER} has not the files of the tokenizer that were written: {REMEDY}."
        )
    read = 0
    for number, entry in enumerate(index.shards):
        for path, checksum in zip(shard_paths(folder, number, index.chats), entry.checksums, strict=False):
            read += path.stat().st_size if path.is_file() else 0
            if most is not None and read > most:
                return
            if reason := _difference(path, checksum):
                raise DataError(f"{path} {reason}: {REMEDY}.")


def damaged_shards(folder: Path, index: CorpusIndex) -> Iterator[int]:
    """Yield the numbers of shards with a missing or damaged file, found by size and checksum."""
    for number, entry in enumerate(index.shards):
        arrays = shard_arrays(folder, number, entry, index.dtype, index.chats)
        known = zip(arrays, entry.checksums, strict=False)
        if not all(one.is_whole() for one in arrays) or any(_difference(one.path, crc) for one, crc in known):
            yield number


def _difference(path: Path, checksum: str) -> str:
    """Return in words how a file differs from what was written, "" where it does not."""
    try:
        return "" if file_checksum(path) == checksum else "is not what was written, by its checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
