"""Reads regular files, valid JSON and TOML only; writes and locks through no link: anyone may have made them.

Opening a pipe blocks for ever, reading a device never ends, and writing through a link changes a file
elsewhere: these are an OSError here, whose `strerror` says what the path is. Bad content is a ValueError.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
import tomllib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError


T = TypeVar("T")
MOST_BYTES = 1 << 31
"""The largest file that is read at once."""
MOST_LEVELS = 200
"""Most nested dictionaries and lists of JSON: functions that walk them are recursive."""
_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
)
_MOST_SHOWN = 80


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises OSError, also for pipes and devices."""
    return os.fdopen(_opened(path, os.O_RDONLY), "rb")


def require_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file, or a link to one, that can be read."""
    os.close(_opened(path, os.O_RDONLY))


def open_to_write(path: Path, *, append: bool = False) -> BinaryIO:
    """Open a regular file, which need not exist, for unbuffered writing; empty unless `append`.

    Raises OSError, also where `path` is a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if append else 0)
    handle = _opened(path, flags)
    if not append:
        os.truncate(handle, 0)
    return os.fdopen(handle, "ab" if append else "wb", buffering=0)


def write_bytes(path: Path, data: bytes, *, synchronised: bool = False) -> None:
    """Write a file; if `synchronised`, block until it is on the disk. Raises OSError, also for a link."""
    with open_to_write(path) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        if synchronised:
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Block until a folder's entries are on the disk, where the file system supports it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a regular file. Raises OSError, also where `target` is a link."""
    with open_file(source) as read, open_to_write(target) as written:
        while chunk := read.read(1 << 22):
            view = memoryview(chunk)
            while view:
                view = view[written.write(view) :]


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if they are missing. Raises OSError where `path` itself is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))
    path.mkdir(parents=True, exist_ok=True)


def try_lock(path: Path) -> BinaryIO | None:
    """Lock a file (flock) without waiting, and return it open; None if another process holds the lock.

    The file then contains this process's id and host, and the time; the lock ends with the process, also
    where processes that it has forked go on, such as workers of a `DataLoader`. Raises OSError where the
    folder of `path` takes no files or locks, and where `path` is a link.
    """
    while True:
        file = os.fdopen(_opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW), "a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        except FileNotFoundError:  # its former owner has removed it meanwhile
            pass
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            file.close()
            raise
        file.close()
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {os.uname().nodename} since {since}".encode())
    file.flush()
    _files_closed_in_children().add(file)
    return file


@cache
def _files_closed_in_children() -> weakref.WeakSet[BinaryIO]:
    """Return the set of lock files that every process forked from this one closes when it starts.

    One set for all: what is registered with the system's fork cannot be taken back.
    """
    found = weakref.WeakSet[BinaryIO]()
    os.register_at_fork(after_in_child=lambda: [file.close() for file in [*found]])
    return found


def unlock(path: Path, file: BinaryIO) -> None:
    """Release the lock that `try_lock` returned, and remove its file."""
    path.unlink(missing_ok=True)
    file.close()


def owner_of(path: Path) -> str:
    """Return a lock file's text: its process, host and time; "another process" if it cannot be read."""
    try:
        return read_text(path) or "another process"
    except (OSError, ValueError):
        return "another process"


def is_plain_name(name: object) -> bool:
    """Return whether `name` is a file's name: printable text, not empty, no path, neither `.` nor `..`."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return False
    return Path(name).name == name and name != ".."


def is_within(folder: Path, name: str) -> bool:
    """Return whether `name` is a plain file name, and in `folder` no link to another folder's content."""
    if not is_plain_name(name):
        return False
    path = folder / name
    return not path.is_symlink() or os.path.realpath(path.parent) == os.path.dirname(os.path.realpath(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError, also for more than 2 GiB (`MOST_BYTES`)."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", str(path))
        return file.read(size)


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raises OSError, and ValueError where it is not UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; OSError where it cannot be read, ValueError where it is not JSON."""
    return json_value(read_text(path))


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """Return pydantic's `TypeAdapter` of a type, which reads and writes it; made once, since that is slow."""
    hashable: Any = kind  # as every class is; mypy asks the metaclass
    return _adapter_of(hashable)


@cache
def _adapter_of(kind: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def validated(kind: type[T], text: str | bytes) -> T:
    """Return the object of class `kind` that a JSON text describes. ValueError names the first fault."""
    from pydantic import ValidationError

    try:
        return adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """Return the first fault that pydantic found in data, as text: "KEY: …"."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part)[:_MOST_SHOWN] for part in first["loc"]) or "content"
    return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def json_value(text: str, *, strict: bool = True) -> Any:
    """Return the value of a JSON text. Raises ValueError, also where an object has a key twice.

    `strict`: also for more than `MOST_LEVELS` levels, and for what Python writes and JSON lacks: NaN and
    infinity, numbers beyond the range of floats, and half characters.
    """
    numbers: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite}
    try:
        found = json.loads(text, object_pairs_hook=_without_twice, **(numbers if strict else {}))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if strict:
        require_levels(found)
        _require_whole_characters(found, text)
    return found


_TOO_DEEP = f"it is nested more than {MOST_LEVELS} times"


def require_levels(content: object) -> None:
    """Raise ValueError for JSON data that are nested more than `MOST_LEVELS` (200) levels deep."""
    level = [content]
    for _ in range(MOST_LEVELS):
        inner: list[Sequence[object]] = [
            [*one.values()] if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [one for values in inner for one in values]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _opened(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file. O_NONBLOCK: opening a pipe would wait for its other end."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise OSError(errno.EPERM, "it is a pipe or socket", str(path)) from None
        if error.errno == errno.EISDIR:
            raise OSError(errno.EISDIR, "it is a folder", str(path)) from None
        raise
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    what = next((told for holds, told in _KINDS if holds(mode)), "it is no file")
    raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EPERM, what, str(path))


def _require_whole_characters(found: object, text: str) -> None:
    if "\\u" not in text:
        return
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has half a character (a lone surrogate)") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:_MOST_SHOWN]} is beyond the range of numbers")
    return number


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has the key {twice[:_MOST_SHOWN]!r} twice")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError if it is unreadable, ValueError for bad content."""
    return toml_value(read_text(path))


def toml_value(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises ValueError, also for integers that take more than 64 bits."""
    try:
        found = tomllib.loads(text)
        require_levels(found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for name, one in _values(found):
        if isinstance(one, int) and one.bit_length() > 63:
            raise ValueError(f"{name} is a whole number that takes more than 64 bits")
    return found


def _values(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values in tables and lists, with their names."""
    if isinstance(content, dict):
        for key, one in content.items():
            yield from _values(one, f"{name}.{key}" if name else key)
    elif isinstance(content, list):
        for one in content:
            yield from _values(one, name)
    else:
        yield name, content
