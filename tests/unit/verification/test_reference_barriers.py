"""While rank 0 runs the reference the others wait for it, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from plait.comm import Mesh
from plait.errors import CommunicationError
from plait.verification import rank_verification as rank


def test_a_lost_rank_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further barrier would take another timeout."""
    waits = []

    def lost(*arguments: Any, **options: Any) -> Any:
        waits.append("a timeout")
        raise CommunicationError("rank 1 is gone")

    monkeypatch.setattr(rank, "barrier", lost)
    with (
        pytest.raises(CommunicationError, match="rank 1 is gone"),
        rank._barrier_per_scope(Mesh(), 3) as tick,
    ):
        tick()
    assert len(waits) == 1
