"""The report: what machine it was, and one table with a row for each thing that was tried."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import plait
from plait.ranks.accelerator import (
    accelerator_versions,
    default_device,
    is_accelerator,
    name_of,
    total_memory,
)

ROOT = Path(__file__).parents[2]
COLUMNS = ("part", "what", "ranks", "plait", "beside it", "ratio", "notes")
MOST_NOTES = 300
"""Characters."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `plait` is also what became of a test, or `error`, or `no answer`."""

    part: str
    what: str
    ranks: int | None
    plait: str
    beside: str = ""
    ratio: float | None = None
    notes: str = ""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        ranks = "" if self.ranks is None else str(self.ranks)
        notes = self.notes if len(self.notes) <= MOST_NOTES else f"{self.notes[:MOST_NOTES]}…"
        cells = (self.part, self.what, ranks, self.plait, self.beside, ratio, notes)
        return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def table(rows: Iterable[Row]) -> str:
    """Return the table in Markdown."""
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(str, rows)])


def environment(device: str, ranks: int, command: Sequence[str]) -> list[str]:
    """Return lines about the machine, the versions and this run."""
    where = f"CPU, {ranks} ranks with Gloo: **shows only the form of this report**"
    gpu = default_device()
    if device == "cuda" and is_accelerator(gpu):
        where = f"{ranks} × {name_of(gpu)}, {total_memory(gpu) / 2**30:.1f} GiB"
    versions = accelerator_versions() | {"torch": torch.__version__, "Python": platform.python_version()}
    return [
        f"- Device: {where}; {platform.system()} on {platform.machine()}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- plait {plait.__version__}, commit {commit()}",
        f"- Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- Command: `{' '.join(['benchmarks/gpu/run.py', *command])}`",
    ]


def commit() -> str:
    """Return the commit of this checkout, and whether files have changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + (", with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write(path: Path, lines: Iterable[str], rows: Iterable[Row]) -> str:
    """Write the report to a file, and return its text."""
    text = "\n".join(["# plait on GPUs", "", *lines, "", table(rows), ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text
