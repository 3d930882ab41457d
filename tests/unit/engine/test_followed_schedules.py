"""Which schedules an engine takes in place of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.engine.engine import require_same_actions
from plait.errors import ScheduleError
from plait.schedules.named_schedules import policy_schedule


def test_a_schedule_of_other_stages_or_microbatches_is_refused() -> None:
    now = policy_schedule("1f1b", 2, 4)
    require_same_actions(policy_schedule("gpipe", 2, 4), now)
    for name, other, found in (
        ("ranks", policy_schedule("1f1b", 3, 4), 3),
        ("microbatches", policy_schedule("1f1b", 2, 3), 3),
        ("rank_of", replace(now, rank_of=(1, 0)), r"\(1, 0\)"),
    ):
        with pytest.raises(ScheduleError, match=f"the schedule's {name} is {found}, but the engine's is "):
            require_same_actions(other, now)
    with pytest.raises(ScheduleError):
        require_same_actions(replace(now, actions=(now.actions[0], ())), now)
