"""What a rank reads and writes about the supervisor that restarts it: generation, notes, folders."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from plait.ranks.launcher_processes import process_identity

_SUPERVISOR = "PLAIT_SUPERVISOR"
_FOLDER = "PLAIT_SUPERVISOR_FOLDER"
_GENERATION = "PLAIT_GENERATION"
_RUN = "PLAIT_SUPERVISED_RUN"
_REMOVED_AT_END, _RESTORED, _NEWEST_GOOD = "removed_at_end", "restored", "newest_good"
_STOP = "stop"
_POSSIBLE_RANKS = "possible_ranks"


class WorldChange(BaseException):
    """Raised on all ranks between two steps, to leave the launched function for a world of more ranks.

    The supervisor then has the function called again on all of them. No `Exception`, so that what handles
    errors does not take it for one.
    """


def variables_of_supervisor(folder: str, generation: int = 1, run: str = "") -> dict[str, str]:
    """Return the environment variables that tell ranks their supervisor (this process) and generation.

    `folder`: of their run only. `generation`: the number of their world. `run`: its random name, the same on
    all its hosts.
    """
    supervisor = process_identity(os.getpid())
    return {_SUPERVISOR: supervisor, _FOLDER: folder, _GENERATION: str(generation), _RUN: run}


def supervisor_of_rank() -> str:
    """Return the process id and start time of this rank's supervisor, as text; "" where there is none."""
    return os.environ.get(_SUPERVISOR, "")


def generation_of_rank() -> int:
    """Return the generation of this rank's world under its supervisor, from 1; 0 without one."""
    return int(os.environ.get(_GENERATION, "0"))


def note_possible_ranks(folder: str, count: int) -> None:
    """Write to `folder`, for a run's ranks, how many ranks a larger world could have; 0: none can be."""
    _write(Path(folder, _POSSIBLE_RANKS), str(count))


def possible_ranks() -> int:
    """Return how many ranks a larger world of this run could have, as its supervisor wrote; 0: none."""
    path = Path(os.environ.get(_FOLDER, ""), _POSSIBLE_RANKS)
    return int(path.read_text()) if supervisor_of_rank() and path.exists() else 0


def supervised_run() -> str:
    """Return the random name of the run, the same on all its hosts; "" without a supervisor."""
    return os.environ.get(_RUN, "")


def remove_at_end(path: Path) -> bool:
    """Register a folder for the supervisor to remove at the run's end; return False without a supervisor."""
    if not supervisor_of_rank():
        return False
    with Path(os.environ[_FOLDER], _REMOVED_AT_END).open("a") as file:
        file.write(f"{json.dumps(str(path.absolute()))}\n")
    return True


def note_restored(step: int) -> None:
    """Write for the supervisor after which step the run resumes; clear the limit of `newest_good_step`.

    Called on all ranks.
    """
    if supervisor_of_rank():
        path = Path(os.environ[_FOLDER], _RESTORED)
        _write(path, str(step))
        path.with_name(_NEWEST_GOOD).unlink(missing_ok=True)


def note_begun_anew() -> None:
    """Write for the supervisor that the run starts at step 0; clear the limit of `newest_good_step`.

    Called on all ranks.
    """
    if supervisor_of_rank():
        for name in (_RESTORED, _NEWEST_GOOD):
            Path(os.environ[_FOLDER], name).unlink(missing_ok=True)


def note_stop(number: int) -> None:
    """Write the number of a stop signal that this rank received, for ranks restarted before the run stops."""
    if supervisor_of_rank():
        path = Path(os.environ[_FOLDER], _STOP)
        part = path.with_name(f"{_STOP}-{os.getpid()}.part")
        part.write_text(str(number))
        part.replace(path)


def noted_stop() -> int:
    """Return the number of the stop signal that a rank of this run noted before a restart; 0: none."""
    if not supervisor_of_rank():
        return 0
    path = Path(os.environ[_FOLDER], _STOP)
    return int(path.read_text()) if path.exists() else 0


def found_at_start(folder: Path, now: Collection[str]) -> set[str]:
    """Return the names passed as `now` to the run's first call for `folder`, even after ranks restart.

    Without a supervisor, `now`.
    """
    if not supervisor_of_rank():
        return set(now)
    key = sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    file = Path(os.environ[_FOLDER], f"found-{key}")
    if not file.exists():
        _write(file, json.dumps(sorted(now)))
    return set(json.loads(file.read_text()))


def restored_step(folder: str) -> int | None:
    """Return the step from which the run in `folder` resumed last; None where it began at step 0."""
    file = Path(folder, _RESTORED)
    return int(file.read_text()) if file.exists() else None


def go_on_before(folder: str, step: int) -> None:
    """Write for restarted ranks that no state of a step after `step` may be loaded: it has wrong bits.

    Of several calls the earliest step holds.
    """
    path = Path(folder, _NEWEST_GOOD)
    _write(path, str(min(step, int(path.read_text())) if path.exists() else step))


def newest_good_step() -> int | None:
    """Return the latest step whose state has no known wrong bits; None where any state may be loaded."""
    if not supervisor_of_rank():
        return None
    path = Path(os.environ[_FOLDER], _NEWEST_GOOD)
    return int(path.read_text()) if path.exists() else None


def removed_at_end(folder: str) -> Iterator[Path]:
    """Yield the folders that ranks have registered by `remove_at_end`, read from the run's `folder`."""
    file = Path(folder, _REMOVED_AT_END)
    for line in dict.fromkeys(file.read_text().splitlines()) if file.exists() else ():
        with suppress(ValueError):  # cut by a full disk: what is left could name a folder above
            yield Path(json.loads(line))


def _write(path: Path, text: str) -> None:
    """Write a file atomically; several ranks may write it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)  # the system may have cleaned the temporary folder
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)
