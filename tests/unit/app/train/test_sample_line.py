"""Where a sample cannot be made, one line says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from plait.app.train.trainer import Trainer


def test_a_run_without_a_sample_says_why() -> None:
    told: list[str] = []
    run: Any = SimpleNamespace(
        _config=SimpleNamespace(train=SimpleNamespace(sample="abc")),
        _data=SimpleNamespace(unreadable="the tokens are of an unknown tokenizer"),
        tell=told.append,
    )
    assert Trainer.sample(cast(Trainer, run)) is None
    assert told == ["No sample: the tokens are of an unknown tokenizer."]
