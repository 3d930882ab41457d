"""The file system calls of checkpoints, one per method, so that tests can make each of them fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from plait.files import sync_folder


class Disk:
    """The file system calls that checkpoints make. Every method may raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Make a new folder and its parents."""
        path.mkdir(parents=True)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for unbuffered writing."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Write all of `data`."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        """Block until all written bytes are on the disk."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Block until the entries of a folder are on the disk, where the file system supports it."""
        sync_folder(path)

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file or folder atomically; a file replaces an existing file `to`."""
        path.rename(to) if path.is_dir() else path.replace(to)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder with its contents."""
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_text(disk: Disk, path: Path, text: str) -> None:
    """Write a small file atomically."""
    unfinished = path.with_name(f"{path.name}.part")  # `create` follows no link
    with disk.create(unfinished) as file:
        disk.write(file, memoryview(text.encode()))
        disk.sync(file)
    disk.rename(unfinished, path)
