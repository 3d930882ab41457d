"""Replicas of the model take equally many rows where rows cannot be moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import plait
from plait.app.loop.work_division import why_rows_stay
from plait.loop import Callback, TrainingLoop

PLAN = plait.Plan(dp=2, cp=2, precision="fp64")


class Data:
    """Batches of 4 rows, whole or as the part of this rank's positions."""

    size = 4

    def __init__(self, part: int | None) -> None:
        self.part = part

    def batch(self, step: int, rows: slice) -> tuple[Any, Any]:
        ids = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(step))[rows]
        return self.of(ids[:, :-1]), self.of(ids[:, 1:])

    def of(self, ids: Tensor) -> Any:
        return ids if self.part is None else plait.sequence_part(ids, PLAN, self.part)


class Asked(Callback):
    """Why rows stay, after each step."""

    def __init__(self) -> None:
        self.why: list[str] = []

    def after_step(self, run: TrainingLoop) -> None:
        self.why.append(why_rows_stay(run))


def test_rows_stay_where_batches_are_parts_of_sequences(thread_ranks: Any) -> None:
    def reasons(parts: bool) -> list[str]:
        model, asked = plait.models.gpt2(layers=1, hidden=16, heads=2, vocab=32, context=16), Asked()
        part = plait.Mesh(PLAN).index("cp") if parts else None
        plait.fit(model, PLAN, Data(part), steps=1, learning_rate=0.1, callbacks=[asked])
        return asked.why

    assert thread_ranks.run(reasons, False, ranks=4)[3] == [""]
    assert "as parts of sequences" in thread_ranks.run(reasons, True, ranks=4)[3][0]
