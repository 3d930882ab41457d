"""Preparation without processes, so that tests are quick and see patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.app.data import preparation

WRITTEN, WRITE_SHARD = preparation._written, preparation.write_shard


def in_one_process(monkeypatch: pytest.MonkeyPatch, stops_at: int | None = None) -> list[int]:
    """Write shards here instead of in other processes; return the numbers of those that are written.

    `stops_at`: the shard before which KeyboardInterrupt is raised.
    """
    numbers: list[int] = []

    def counted(folder: Path, number: int, *arguments: Any) -> Any:
        if number == stops_at:
            raise KeyboardInterrupt
        numbers.append(number)
        return WRITE_SHARD(folder, number, *arguments)

    monkeypatch.setattr(preparation, "write_shard", counted)
    monkeypatch.setattr(preparation, "_written", lambda *given: WRITTEN(*given[:-1], 1))
    return numbers
