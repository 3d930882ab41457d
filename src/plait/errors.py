"""Errors that a user can correct. Messages state in one sentence the problem, the values and the correction.

The command line prints a `PlaitError` without a traceback and exits with code 2.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unicodedata import category

MOST_LISTED = 20
"""The largest number of names in a message."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def listed(names: Sequence[str], *, most: int = MOST_LISTED, between: str = ", ") -> str:
    """Return the first `most` names as text, and how many more there are."""
    more = f"{between.rstrip(', ')} and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def terminal_text(text: str) -> str:
    """Return text with control characters escaped (`\\x1b`), so that no file's text can control the terminal.

    Characters that it would obey, such as those of escape sequences, and halves of characters, which cannot
    be printed, are spelt: `\\x1b`.
    """
    if text.isprintable():
        return text
    return "".join(one if one in "\n\t" or _is_shown(one) else ascii(one)[1:-1] for one in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or category(character) in ("Zs", "Co", "Cn")


_JOINERS = "\u200c\u200d"
"""Within words of some languages, and within pictures."""


def missing_package(what: str, package: str, extra: str) -> str:
    """Return an error message: `what` needs a `package` that is not installed, and how to install it.

    `extra`: of plait, which would have installed it.
    """
    return (
        f"{what} needs the package {package}, which the extra {extra} of plait brings: install it by "
        f"{sys.executable} -m pip install {package}"
    )


def hub_remedy(name: str) -> str:
    """Return advice to download `name`, if it may be a name on Hugging Face's hub and is no path; else "".

    As a clause that follows "…: give one of these". Nothing is downloaded.
    """
    if _HUB_NAME.fullmatch(name) is None or Path(name).exists():
        return ""
    return (
        f"; plait downloads nothing: if {name} is a name on Hugging Face's hub, download it once by `hf "
        "download "
        f"{name} --local-dir FOLDER`, and give FOLDER"
    )


class PlaitError(Exception):
    """Base of all errors that a user can correct."""

    def __init__(self, message: str = "") -> None:
        """`message` may quote files and configurations: it becomes a `terminal_text`."""
        super().__init__(terminal_text(message))


class ConfigError(PlaitError):
    """A configuration field is unknown or has a bad value."""


class PlanError(PlaitError):
    """A plan contradicts itself, the model or the batch."""


class MeshError(PlaitError):
    """A mesh does not fit the number of ranks, or the plan."""


class LayoutError(PlaitError):
    """A tensor cannot have the layout asked for."""


class ScheduleError(PlaitError):
    """A schedule breaks a rule; the message names the rule, the rank and the action."""


class ModelError(PlaitError):
    """A model is not a sequence of layers that plait can run."""


class DataError(PlaitError):
    """A corpus or a batch cannot be used."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be written, read or used; the message names the file or the tensors."""

    def __init__(self, message: str, damaged: bool = False) -> None:
        """`damaged`: whether files have changed since they were written; then another checkpoint may work."""
        super().__init__(message)
        self.damaged = damaged


class CommunicationError(PlaitError):
    """A collective, a send or a receive failed; the message names the operation, the rank and the peer."""


class ReplicaError(PlaitError):
    """Replicas of a tensor differ between ranks; the message names the tensor and the ranks."""


class CorruptionError(PlaitError):
    """Memory has changed by itself, or ranks compute unlike results; the message names rank and tensor."""

    def __init__(self, message: str, last_good_step: int = 0, ranks: Sequence[int] = ()) -> None:
        """`last_good_step`: the state after so many steps, and after fewer, is known to be right.

        `ranks`: those that are wrong, or of which one is; none where that is not known.
        """
        super().__init__(message)
        self.last_good_step = last_good_step
        self.ranks = tuple(ranks)


class NonFiniteError(PlaitError):
    """The loss or the gradient norm is not a finite number."""


class RankError(PlaitError):
    """A rank failed; contains the rank's number and traceback."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
