"""Preparation without processes, so that tests are quick and see patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.data import preparation


def in_one_process(monkeypatch: pytest.MonkeyPatch, stops_at: int | None = None) -> list[int]:
    """Write shards here instead of in other processes; return the numbers of those that are written.

    `stops_at`: the shard before which KeyboardInterrupt is raised.
    """
    numbers: list[int] = []

    def written(folder: Path, waiting: Any, asked: Any, processes: int) -> Any:
        for number in sorted(waiting):
            if number == stops_at:
                raise KeyboardInterrupt
            numbers.append(number)
            yield number, preparation.write_shard(folder, number, waiting[number], asked)

    monkeypatch.setattr(preparation, "_written", written)
    return numbers
