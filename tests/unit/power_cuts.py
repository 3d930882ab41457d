"""The states in which a power cut can leave a folder while something is written to it.

What a file holds is on the disk when the file has been synchronised, its name when its folder has. What has
not been synchronised may be there or not, but of changes to one name a later one only with the earlier.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir")
Change = dict[str, int | None]
"""What each name of a folder stands for after it: the number of a file or folder, None: nothing."""
State = Mapping[str, bytes | None]
"""By path: what a file holds; None: a folder."""


@dataclass
class _Entry:
    """A file or folder, kept open, so that no later one gets its number."""

    handle: int
    synchronised: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    """Of a folder: those on the disk."""
    changes: list[Change] = field(default_factory=list)
    """Of a folder: those since."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self.handle).st_mode)

    def content(self) -> bytes:
        return os.pread(self.handle, os.fstat(self.handle).st_size, 0)

    def latest(self) -> dict[str, int]:
        return _after(self.names, self.changes)


class PowerCuts:
    """Context manager that follows what this process does in a folder, for the states after a power cut."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._entries, self._root = folder, dict[int, _Entry](), 0
        self._patch = pytest.MonkeyPatch()
        self.states: list[State] = []
        """All that were possible at some time, each once."""
        self.last: list[State] = []
        """Those that are possible at the end."""

    def __enter__(self) -> PowerCuts:
        self._root = self._see(self._folder)
        self._observe()
        for entry in self._entries.values():  # what was there is on the disk
            entry.names, entry.changes = entry.latest(), []
            entry.synchronised = b"" if entry.is_folder else entry.content()
        for name in _CALLS:
            self._patch.setattr(os, name, self._followed(getattr(os, name)))
        self._patch.setattr(os, "fsync", self._synchronised(os.fsync))
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
        self._observe()
        self.last = [*self._collect()]
        for entry in self._entries.values():
            os.close(entry.handle)

    def _followed(self, call: Callable[..., None]) -> Callable[..., None]:
        def followed(*arguments: object, **options: object) -> None:
            self._observe()  # files that were opened since
            call(*arguments, **options)
            self._observe()
            self._collect()

        return followed

    def _synchronised(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def synchronised(handle: int) -> None:
            call(handle)
            self._observe()
            self._collect()
            entry = self._entries.get(os.fstat(handle).st_ino)
            if entry is not None and entry.is_folder:
                entry.names, entry.changes = entry.latest(), []
            elif entry is not None:
                entry.synchronised = entry.content()
            self._collect()

        return synchronised

    def _see(self, path: Path) -> int:
        handle = os.open(path, os.O_RDONLY)
        number = os.fstat(handle).st_ino
        if number in self._entries:
            os.close(handle)
        else:
            self._entries[number] = _Entry(handle)
        return number

    def _observe(self) -> None:
        """Note what has changed in the folders."""
        seen = [(self._root, self._folder)]
        for number, folder in seen:
            entry = self._entries[number]
            now = {path.name: self._see(path) for path in folder.iterdir()}
            before = entry.latest()
            moved = {new: name for name, new in now.items() if before.get(name) != new}
            for name, old in before.items():
                if name not in now:
                    to = moved.pop(old, None)
                    entry.changes.append({name: None} | ({} if to is None else {to: old}))
            entry.changes += ({name: new} for new, name in moved.items())
            seen += ((one, folder / name) for name, one in now.items() if self._entries[one].is_folder)

    def _collect(self) -> list[State]:
        """Add the states that are possible: of what is not synchronised nothing, all, one, or all but one."""
        things = [(number, at) for number, one in self._entries.items() for at in range(len(one.changes))]
        things += [
            (number, -1)
            for number, one in self._entries.items()
            if not one.is_folder and one.content() != one.synchronised
        ]
        choices = [set[tuple[int, int]](), set(things)]
        choices += (self._with_earlier(one) for one in things)
        choices += ({other for other in things if one not in self._with_earlier(other)} for one in things)
        found = []
        for chosen in choices:
            state = dict(self._files(self._root, "", chosen))
            found.append(state)
            if state not in self.states:
                self.states.append(state)
        return found

    def _with_earlier(self, thing: tuple[int, int]) -> set[tuple[int, int]]:
        """The thing and the changes to the same names before it."""
        number, at = thing
        found, names = {thing}, set[str]()
        for place in range(at, -1, -1):
            change = self._entries[number].changes[place]
            if place == at or names & {*change}:
                found.add((number, place))
                names |= {*change}
        return found

    def _files(
        self, number: int, path: str, chosen: set[tuple[int, int]]
    ) -> Iterator[tuple[str, bytes | None]]:
        entry = self._entries[number]
        if not entry.is_folder:
            yield path, entry.content() if (number, -1) in chosen else entry.synchronised
            return
        if path:
            yield path, None
        changes = [change for at, change in enumerate(entry.changes) if (number, at) in chosen]
        for name, one in _after(entry.names, changes).items():
            yield from self._files(one, f"{path}/{name}" if path else name, chosen)


def _after(names: Mapping[str, int], changes: list[Change]) -> dict[str, int]:
    found: dict[str, int | None] = dict(names)
    for change in changes:
        found |= change
    return {name: number for name, number in found.items() if number is not None}


def put(state: State, folder: Path) -> Path:
    """Make the state in a new folder."""
    folder.mkdir(parents=True)
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder
