"""Mutations of a file, as failing disks and strangers make them, and what a reader may do with each.

    for what, found in outcomes(folder, "run.json", "json", read, 24, tmp_path):
        ...                            # what `read` returned of the folder's copy, or the PlaitError

First come other things in the file's place, such as a pipe, then changes of its bytes, in an order and at
places that the seed draws; each kind comes once before any comes again. The same seed gives the same
mutations of the same file.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from plait.errors import PlaitError

Kind = Literal["json", "text", "binary"]
Random = random.Random
QUICK, ALL = 24, 200
"""Mutations of each kind of file in the quick run, and in the full one."""
MOST_SECONDS = 10
MOST_MEMORY = 1 << 30
"""Address space beyond what the process has already that a reader may take, in bytes."""
ELSEWHERE = str(Path(os.sep, "etc", "passwd"))
"""A file of this host that no folder of a stranger may name or link to."""
DEEP = 100_000
"""More levels of nesting than any parser's stack takes."""
_FOREIGN = (
    b"\x89PNG\r\n\x1a\n" + bytes(range(64)),
    b"\x1f\x8b\x08\x00" + bytes(60),
    b"PK\x03\x04" + bytes(60),
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.",
    b"PAR1" + bytes(40) + b"PAR1",
    b'{"weight_map": {}}',
    b"[1, 2, 3]\n",
    b"a b c\n",
    b"\x7fELF" + bytes(60),
)
"""Beginnings of files of other kinds: a picture, archives, a pickle, a table, JSON, text, a program."""


def mutations(kind: Kind, seed: int = 0) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield, without end, names of mutations of a file of this kind and functions that make them in place."""
    changes = _OF_CONTENT | (_OF_TEXT if kind != "binary" else {}) | (_OF_JSON if kind == "json" else {})
    yield from _OF_PATH.items()
    for turn in count(1):
        names = list(changes)
        Random(f"{seed} {turn}").shuffle(names)
        for name in names:
            yield f"{name} {turn}", _in_place(changes[name], f"{seed} {turn} {name}")


def outcomes(
    source: Path, name: str, kind: Kind, read: Callable[[Path], Any], number: int, work: Path
) -> Iterator[tuple[str, Any]]:
    """Yield for `number` mutations of the file `name` in the folder `source` what `read` returns of its copy.

    Of each: the mutation's name, and the result or the PlaitError. `work`: an empty folder for the copies.
    """
    shutil.copytree(source, copy := work / source.name)
    for what, mutate in islice(mutations(kind, zlib.crc32(name.encode())), number):
        remove(copy / name)
        shutil.copyfile(source / name, copy / name)
        mutate(copy / name)
        try:
            found = outcome(lambda: read(copy))
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
        yield what, found


def outcome(read: Callable[[], Any]) -> Any:
    """Return what `read` returns, or the PlaitError that it raises.

    Fails where it raises anything else, takes more than `MOST_SECONDS` or `MOST_MEMORY`.
    """
    with _bounded():
        try:
            return read()
        except PlaitError as error:
            if "MemoryError" in str(error) or "TimeoutError" in str(error):
                raise AssertionError(f"beyond its bounds: {error}") from error
            return error


@contextmanager
def _bounded() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"the reader took more than {MOST_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, give_up)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def _in_place(change: Callable[[bytes, Random], bytes], seed: str) -> Callable[[Path], None]:
    def mutate(path: Path) -> None:
        path.write_bytes(change(path.read_bytes(), Random(seed)))

    return mutate


def _position(data: bytes, draw: Random) -> int:
    """Return a position in the file: half of all are in its first 512 bytes, where headers are."""
    most = max(1, len(data))
    return draw.randrange(min(most, 512) if draw.random() < 0.5 else most)


def _bit(data: bytes, draw: Random) -> bytes:
    at = _position(data, draw)
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :] if data else b"\x01"


def _bytes(data: bytes, draw: Random) -> bytes:
    at = _position(data, draw)
    return data[:at] + draw.randbytes(draw.randint(1, 16)) + data[at + draw.randint(0, 16) :]


def _removed(data: bytes, draw: Random) -> bytes:
    at = _position(data, draw)
    return data[:at] + data[at + draw.randint(1, 64) :]


def _zeros(data: bytes, draw: Random) -> bytes:
    at = _position(data, draw)
    zeroed = min(draw.choice((8, 512, 4096)), len(data) - at)
    return data[:at] + bytes(zeroed) + data[at + zeroed :]


def _twice(data: bytes, draw: Random) -> bytes:
    at = _position(data, draw)
    chunk = data[at : at + draw.randint(1, 256)]
    return data[:at] + chunk + chunk + data[at + len(chunk) :]


def _huge_length(data: bytes, draw: Random) -> bytes:
    """Replace eight bytes, the first ones or others, by a huge number."""
    at = draw.choice((0, 0, _position(data, draw)))
    number = draw.choice((2**63 - 1, 2**64 - 1, 2**40, 2**31, 100_000_000))
    return data[:at] + number.to_bytes(8, "little") + data[at + 8 :]


_OF_CONTENT: dict[str, Callable[[bytes, Random], bytes]] = {
    "bit flipped": _bit,
    "cut short": lambda data, draw: data[: _position(data, draw)],
    "bytes replaced": _bytes,
    "bytes removed": _removed,
    "zeros": _zeros,
    "written twice": _twice,
    "huge length": _huge_length,
    "bytes appended": lambda data, draw: data + draw.randbytes(draw.randint(1, 64)),
    "another kind of file": lambda data, draw: draw.choice(_FOREIGN),
}


def _inserted(data: bytes, draw: Random, inserted: bytes) -> bytes:
    at = _position(data, draw)
    return data[:at] + inserted + data[at:]


_OF_TEXT: dict[str, Callable[[bytes, Random], bytes]] = {
    "half a character": lambda data, draw: _inserted(data, draw, b"\xed\xa0\x80"),
    "no UTF-8": lambda data, draw: _inserted(data, draw, b"\xff\xfe\xc3"),
    "control characters": lambda data, draw: _inserted(data, draw, b"\x00\x1b[31m\x07\x9b"),
    "UTF-16": lambda data, draw: data.decode("utf-8", "replace").encode("utf-16"),
    "byte order mark": lambda data, draw: b"\xef\xbb\xbf" + data,
    "line twice": lambda data, draw: b"".join(
        line * (1 + (draw.random() < 0.2)) for line in data.splitlines(True)
    ),
    "lines in disorder": lambda data, draw: b"".join(_shuffled(data.splitlines(True), draw)),
    "long line": lambda data, draw: _inserted(data, draw, b"x" * 1_000_000),
    "blank": lambda data, draw: draw.choice((b"\n", b"  \n\n", b"\r\n\t")),
}


def _shuffled(items: list[bytes], draw: Random) -> list[bytes]:
    draw.shuffle(items)
    return items


_VALUES: dict[str, Callable[[Random], str]] = {
    "another type": lambda draw: draw.choice(
        ('"text"', "[]", "{}", "null", "true", "[[1]]", '{"a": 1}', "1.5")
    ),
    "huge number": lambda draw: draw.choice(
        ("1e999", "-1e308", "9" * 30, "9" * 5000, str(2**63), str(2**31))
    ),
    "no number": lambda draw: draw.choice(("NaN", "Infinity", "-Infinity")),
    "negative number": lambda draw: draw.choice(("-1", "-0.0", str(-(2**63)))),
    "zero": lambda draw: "0",
    "deep nesting": lambda draw: draw.choice(("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP)),
    "lone surrogate": lambda draw: draw.choice(('"\\ud800"', '"a\\udfffb"', '"\\u0000"')),
    "escape sequence": lambda draw: '"\\u001b]0;title\\u0007\\u001b[2J<script>alert(1)</script>"',
    "path elsewhere": lambda draw: draw.choice((json.dumps(ELSEWHERE), '"../../x"', '"."', '""', '"a/b"')),
}
_VALUE = re.compile(rb'(?<=[:\[,])\s*(?:-?\d[-+.\deE]*|true|false|null|"(?:[^"\\]|\\.)*"(?!\s*:))')
_PAIR = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:\s*(?:-?\d[-+.\deE]*|true|false|null|"(?:[^"\\]|\\.)*")')
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"(?=\s*:)')


def _value_replaced(new: Callable[[Random], str]) -> Callable[[bytes, Random], bytes]:
    def change(data: bytes, draw: Random) -> bytes:
        found = list(_VALUE.finditer(data))
        value = new(draw).encode()
        if not found or draw.random() < 0.1:
            return value
        one = draw.choice(found)
        return data[: one.start()] + value + data[one.end() :]

    return change


def _key_twice(data: bytes, draw: Random) -> bytes:
    """Repeat a key of an object with another value."""
    found = list(_PAIR.finditer(data))
    if not found:
        return b'{"a": 1, "a": 2}'
    one = draw.choice(found)
    key = one[0][: one[0].index(b":", _KEY.match(one[0]).end())]  # type: ignore[union-attr]
    return data[: one.end()] + b", " + key + b": " + draw.choice((b"1", b'"b"', b"null")) + data[one.end() :]


def _key_removed(data: bytes, draw: Random) -> bytes:
    found = list(_PAIR.finditer(data))
    if not found:
        return b"{}"
    one = draw.choice(found)
    before, rest = data[: one.start()].rstrip(), data[one.end() :].lstrip()
    return before + rest[1:] if rest.startswith(b",") else before.removesuffix(b",") + rest


def _key_renamed(data: bytes, draw: Random) -> bytes:
    found = list(_KEY.finditer(data))
    if not found:
        return b'{"": 1}'
    one = draw.choice(found)
    return (
        data[: one.start(1)] + draw.choice((b"", b"x" * 300, b"\\ud800", b"__class__")) + data[one.end(1) :]
    )


def _items(data: bytes, draw: Random) -> bytes:
    """Repeat an item of a list or a value of an object, or a line: an entry that is there twice."""
    try:
        tree = json.loads(data)
    except ValueError:
        return _twice(data, draw)
    lists = [one for one in _nodes(tree) if isinstance(one, list) and one]
    if not lists:
        return data + data
    chosen = draw.choice(lists)
    chosen.insert(draw.randrange(len(chosen) + 1), draw.choice(chosen))
    return json.dumps(tree).encode()


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for one in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(one)


_OF_JSON: dict[str, Callable[[bytes, Random], bytes]] = {
    **{name: _value_replaced(new) for name, new in _VALUES.items()},
    "key twice": _key_twice,
    "key removed": _key_removed,
    "key renamed": _key_renamed,
    "item twice": _items,
}


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(target: str | None) -> Callable[[Path], None]:
    """Return a function that puts a link in a file's place: to `target`, or to itself."""

    def mutate(path: Path) -> None:
        path.unlink()
        path.symlink_to(target or path.name)

    return mutate


_OF_PATH: dict[str, Callable[[Path], None]] = {
    "missing": _missing,
    "empty": _empty,
    "pipe": _pipe,
    "folder": _folder,
    "link to itself": _link(None),
    "link to nothing": _link("/nowhere/at/all"),
    "link elsewhere": _link(ELSEWHERE),
    "endless device": _link("/dev/zero"),
}


def remove(path: Path) -> None:
    """Remove a file, link, pipe or folder; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
