"""The origin of a run, for its report: the command line without secrets, and the git commit."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

HIDDEN = "…"
"""In place of a value that may be a secret."""
_SECRET = re.compile(r"(key|token|password|passwd|passphrase|pwd|secret|credential|auth)s?$")
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_ACCOUNT = re.compile(r"(?<=://)[^/@\s]+@")
_OBJECT = re.compile(r"[0-9a-f]{40,64}")


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Return the command of this process as text, by default `sys.argv`, without values that are secrets.

    Left out are values of options and variables named like key, token or password, and what stands before
    the @ of an address. A secret that is an argument by itself is not known as one.
    """
    given = sys.argv if arguments is None else arguments
    name, rest = (Path(given[0]).name, given[1:]) if given else ("", [])
    return shlex.join([name, *_without_secrets(rest)])


def _without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    is_value_of_secret = False
    for argument in arguments:
        is_option = argument.startswith("-")
        if is_value_of_secret and not is_option:
            is_value_of_secret = False
            yield HIDDEN
            continue
        name, equals, value = argument.partition("=")
        names_secret = _names_secret(name, value if equals else None)
        is_value_of_secret = is_option and not equals and names_secret
        yield f"{name}={HIDDEN}" if equals and names_secret else _ACCOUNT.sub(f"{HIDDEN}@", argument)


def _names_secret(name: str, value: str | None) -> bool:
    """Return whether an option or variable of this name holds a secret; a number of tokens is none."""
    if re.fullmatch(r"[\w.-]+", name) is None or (value is not None and value.isdecimal()):
        return False
    words = (word.lower() for word in _WORD.findall(name))
    return any(_SECRET.search(word) is not None and word != "tokens" for word in words)


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in `folder` or above it, by git's files; "" if there is none.

    No program is started: git may run commands that the folder names.
    """
    for place in (folder.resolve(), *folder.resolve().parents):
        with suppress(OSError, ValueError):
            if (place / ".git").exists():
                return _head(_git_folder(place / ".git"))
    return ""


def _git_folder(path: Path) -> Path:
    """Return the folder of git's files; of a worktree or submodule a file names it."""
    if path.is_dir():
        return path
    return path.parent / path.read_text(encoding="utf-8").removeprefix("gitdir:").strip()


def _head(git: Path) -> str:
    """Return the commit of HEAD. Raises OSError or ValueError where the files are of another form."""
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return _checked(head)
    reference = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    common = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
    for place in (git, common):
        if ".." not in reference and (place / reference).is_file():
            return _checked((place / reference).read_text(encoding="utf-8").strip())
    packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
    found = (line.split(" ", 1) for line in packed if line.endswith(f" {reference}"))
    return next((_checked(commit) for commit, name in found if name == reference), "")


def _checked(commit: str) -> str:
    if _OBJECT.fullmatch(commit) is None:
        raise ValueError("no commit")
    return commit
