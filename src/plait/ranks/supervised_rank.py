"""What a rank knows of the supervisor that restarts it, from its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path

from plait.ranks.world import process_identity

_SUPERVISOR = "PLAIT_SUPERVISOR"
_FOLDER = "PLAIT_SUPERVISOR_FOLDER"
_RUN = "PLAIT_SUPERVISED_RUN"
_REMOVED_AT_END, _RESTORED, _NEWEST_GOOD = "removed_at_end", "restored", "newest_good"


def variables_of_supervisor(folder: str, run: str = "") -> dict[str, str]:
    """Return the environment variables of ranks that this process restarts. `folder`: of their run only.

    `run`: its random name, the same on all its hosts.
    """
    return {_SUPERVISOR: process_identity(os.getpid()), _FOLDER: folder, _RUN: run}


def supervisor_of_rank() -> str:
    """Return the identity of the supervisor that restarts this rank; "" where there is none."""
    return os.environ.get(_SUPERVISOR, "")


def supervised_run() -> str:
    """Return the random name of the run, the same on all its hosts; "" without a supervisor."""
    return os.environ.get(_RUN, "")


def remove_at_end(path: Path) -> bool:
    """Register a folder that the supervisor removes when the run has ended; False without a supervisor."""
    if not supervisor_of_rank():
        return False
    with Path(os.environ[_FOLDER], _REMOVED_AT_END).open("a") as file:
        file.write(f"{path.absolute()}\n")
    return True


def note_restored(step: int) -> None:
    """Write for the supervisor after how many steps the run resumes; called on all ranks."""
    if supervisor_of_rank():
        path = Path(os.environ[_FOLDER], _RESTORED)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(str(step))
        part.replace(path)
        path.with_name(_NEWEST_GOOD).unlink(missing_ok=True)


def note_begun_anew() -> None:
    """Write for the supervisor that the run starts from step 0; called on all ranks."""
    if supervisor_of_rank():
        for name in (_RESTORED, _NEWEST_GOOD):
            Path(os.environ[_FOLDER], name).unlink(missing_ok=True)


def found_at_start(folder: Path, now: Collection[str]) -> set[str]:
    """Return the names that were in a folder at the first call of this launch; that call stores `now`.

    Without a supervisor, `now`.
    """
    if not supervisor_of_rank():
        return set(now)
    key = sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    file = Path(os.environ[_FOLDER], f"found-{key}")
    if not file.exists():
        file.with_suffix(".part").write_text(json.dumps(sorted(now)))
        file.with_suffix(".part").replace(file)
    return set(json.loads(file.read_text()))


def restored_step(folder: str) -> int | None:
    """Return the number of steps from which the run has gone on last; None where it began anew."""
    file = Path(folder, _RESTORED)
    return int(file.read_text()) if file.exists() else None


def go_on_before(folder: str, step: int) -> None:
    """Write for restarted ranks that states after more than `step` steps have wrong bits: not loaded."""
    Path(folder, _NEWEST_GOOD).write_text(str(step))


def newest_good_step() -> int | None:
    """Return the latest step whose state has no known wrong bits; None where any state may be loaded."""
    if not supervisor_of_rank():
        return None
    path = Path(os.environ[_FOLDER], _NEWEST_GOOD)
    return int(path.read_text()) if path.exists() else None


def removed_at_end(folder: str) -> Iterator[Path]:
    """Yield the folders that ranks gave to `remove_at_end`."""
    file = Path(folder, _REMOVED_AT_END)
    if file.exists():
        yield from map(Path, dict.fromkeys(file.read_text().splitlines()))
