"""What checkpoints do to a disk, one system call a method: so that tests can let each of them fail."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The file system. Every method raises OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, and those above it; it must not be there."""
        path.mkdir(parents=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing, without a buffer."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Write all of `data`."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        """Return when what was written will outlive a loss of power."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """The same for the names in a folder, on file systems that know of it."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file or a folder another name, at once; a file of that name is replaced."""
        path.rename(to) if path.is_dir() else path.replace(to)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it; of a link the link alone."""
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_text(disk: Disk, path: Path, text: str) -> None:
    """Write a small file that is there wholly or not at all."""
    unfinished = path.with_name(f"{path.name}.part")
    with disk.create(unfinished) as file:
        disk.write(file, memoryview(text.encode()))
        disk.sync(file)
    disk.rename(unfinished, path)
