"""`SnapshotFolder`: files in shared memory that outlive the processes of a run; folders of ended runs.

    /dev/shm/plait-9f3ac2d1b04e77a5/owner.json          the process after whose end nobody needs the folder
    /dev/shm/plait-…/lock                               names the process that uses it
    /dev/shm/plait-…/wrong-3.json                       which states have wrong bits, as a rank has found
    /dev/shm/plait-…/0/rank-00003.safetensors, .json    a rank's part of a snapshot, and its manifest
    /dev/shm/plait-…/1/                                 likewise, of the snapshot before or after

`Snapshots` needs no more of it than its methods: a mapping for writing, a path for reading, a small text that
appears at once. A supervisor that holds the memory itself could offer the same.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from plait.checkpoint.file_system_calls import Disk, write_text
from plait.errors import CheckpointError
from plait.files import owner_of, read_json, try_lock
from plait.ranks.launcher_processes import process_identity

HALVES = (0, 1)
"""The halves of the double buffer: one is complete while the other is written."""
_PREFIX, _OWNER, _LOCK, _WRONG = "plait-", "owner.json", "lock", "wrong-"
_NAMESPACE = "/proc/self/ns/pid"


class SnapshotFolder:
    """The folder of one run's snapshots in the shared memory of this host."""

    def __init__(self, base: Path, name: str) -> None:
        """`base`: a folder in memory, such as `/dev/shm`; `name` identifies the run, of this user."""
        digest = hashlib.blake2b(f"{os.geteuid()} {name}".encode(), digest_size=8).hexdigest()
        self.base, self.path = base, base / f"{_PREFIX}{digest}"
        self._lock: BinaryIO | None = None

    def make(self) -> str:
        """Make the folder, if it is missing; return its identity, the same for processes that share it.

        Raises CheckpointError where there is no folder `base`, or another user has made this one.
        """
        if not self.base.is_dir():
            raise CheckpointError(
                f"there is no folder {self.base} for snapshots in memory: give another one (on Linux "
                "/dev/shm), or take no snapshots."
            )
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CheckpointError(
                f"{self.path} belongs to somebody else: remove it, or name the run otherwise."
            )
        for half in HALVES:
            self.half(half).mkdir(exist_ok=True)
        return f"{_boot_id()} {found.st_dev} {found.st_ino}"

    def half(self, half: int) -> Path:
        """Return the path of the subfolder with one of the two newest snapshots (`half` 0 or 1)."""
        return self.path / str(half)

    def mapped(self, half: int, name: str, size: int) -> Tensor:
        """Return a memory-mapped file of `size` bytes as a uint8 tensor; one of that size keeps its contents.

        All of it is reserved. Raises OSError where there is no room.
        """
        path = self.half(half) / name
        if not path.exists() or path.stat().st_size != size:
            path.unlink(missing_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(handle, 0, size)  # a page that is missing later would end the process
            except OSError as error:
                path.unlink()
                raise OSError(error.errno, error.strerror, str(path)) from None
            finally:
                os.close(handle)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def publish(self, half: int, name: str, text: str) -> None:
        """Write a small file atomically. Raises OSError."""
        path = self.half(half) / name
        path.with_name(f"{name}.part").unlink(missing_ok=True)  # left by a process that was killed
        write_text(Disk(), path, text)

    def withdraw(self, half: int, name: str) -> None:
        """Remove a file, if it is there. Raises OSError."""
        (self.half(half) / name).unlink(missing_ok=True)

    def note_wrong(self, rank: int, attempts: Collection[str], step: int) -> None:
        """Write a file saying that snapshots after `step` steps, by ranks of these starts, have wrong bits.

        It takes the place of what this rank wrote before, by which ranks have restored since. Raises OSError.
        """
        path = self.path / f"{_WRONG}{rank}.json"
        text = json.dumps({"after": step, "attempts": sorted(attempts)})
        path.unlink(missing_ok=True)
        write_text(Disk(), path, text)

    def wrong_states(self) -> dict[str, int]:
        """Return, by attempt (start of the ranks), the step after which its snapshots have wrong bits."""
        found: dict[str, int] = {}
        for path in self.path.glob(f"{_WRONG}*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # it was not written to its end
                about = read_json(path)
                for attempt in about["attempts"]:
                    found[attempt] = min(int(about["after"]), found.get(attempt, int(about["after"])))
        return found

    def clear(self, half: int, keep: Collection[str]) -> None:
        """Remove all files of a half except those named in `keep`. Raises OSError."""
        for path in self.half(half).iterdir():
            if path.name not in keep:
                path.unlink()

    def take(self, owner: str) -> None:
        """Lock the folder until this process ends, or releases it; record its owner's `process_identity`.

        Raises CheckpointError where another process has the lock, OSError where it cannot be written.
        """
        self._lock = try_lock(self.path / _LOCK)
        if self._lock is None:
            raise CheckpointError(
                f"{self.path} is used by {owner_of(self.path / _LOCK)}: end that run, or give this one "
                "another name."
            )
        weakref.finalize(self, self._lock.close)
        text = json.dumps({"process": owner, "namespace": _pid_namespace()})
        (self.path / _OWNER).unlink(missing_ok=True)
        write_text(Disk(), self.path / _OWNER, text)

    def remove(self) -> None:
        """Remove the folder and all that it holds, as far as possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Unlock the folder, so that another process can `take` it; its files stay."""
        if self._lock is not None:
            self._lock.close()

    def remove_ended(self) -> None:
        """Remove the folders of this user's ended runs from the same base folder, as far as possible."""
        for path in self.base.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if path != self.path and os.lstat(path).st_uid == os.geteuid() and _has_ended(path):
                    lock = try_lock(path / _LOCK)  # which ranks have that outlive torchrun's agent
                    if lock is not None:
                        shutil.rmtree(path, ignore_errors=True)
                        lock.close()

    def no_room(self, error: OSError, size: int) -> CheckpointError:
        """Return the error for a file of `size` bytes that could not be made."""
        if error.errno != errno.ENOSPC:
            reason = f"{error.filename or self.path} cannot be written ({error.strerror or error})"
            return CheckpointError(f"{reason}: mend it, or take no snapshots.")
        usage = shutil.disk_usage(self.base)
        return CheckpointError(
            f"a rank's snapshots take two files of {size:,} bytes, and {self.base} has {usage.free:,} of "
            f"{usage.total:,} bytes left: make it larger (docker run --shm-size, a memory-backed volume in "
            "Kubernetes), give another folder in memory, or take no snapshots."
        )


def _has_ended(path: Path) -> bool:
    """Return whether the owner of a run's folder has ended, as far as this process can see it."""
    try:
        owner = read_json(path / _OWNER)
        process, namespace = str(owner["process"]), str(owner["namespace"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it is being made, or removed
    number = process.partition("-")[0]
    return namespace == _pid_namespace() and number.isdecimal() and process_identity(int(number)) != process


def _pid_namespace() -> str:
    """Return the namespace in which process ids count; "" where the system has none."""
    with suppress(OSError):
        return os.readlink(_NAMESPACE)
    return ""


def _boot_id() -> str:
    """Return a text that differs between hosts."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename
