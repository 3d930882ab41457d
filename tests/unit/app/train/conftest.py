"""What the runs of this folder share: the prediction of their memory, which takes a third of a short run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.app.config.config import Config
from plait.app.train import train_run
from plait.estimate.memory.memory_report import Memory
from plait.plan.plan import Plan

WITHOUT_MEMORY = {
    "steps",
    "warmup",
    "lr",
    "schedule",
    "validate_every",
    "validate_batches",
    "patience",
    "seed",
}
"""Fields of `train` that change no tensor."""


@pytest.fixture(scope="session")
def predicted_memories() -> dict[str, Memory]:
    """Memories that runs of this session have predicted, by what they depend on."""
    return {}


@pytest.fixture(autouse=True)
def _memory_is_predicted_once(monkeypatch: pytest.MonkeyPatch, predicted_memories: dict[str, Memory]) -> None:
    """Keep the predictions of `plait train`; those that tests ask for themselves are made anew."""
    predict = train_run.predict_memory

    def remembered(config: Config, model: Any, plan: Plan, device: Any) -> Memory:
        sections = config.model_dump(mode="json", include={"model", "data", "train", "parallel"})
        for name in WITHOUT_MEMORY:
            sections["train"].pop(name)
        key = json.dumps([sections, config.run.memory_limit, repr(plan), str(device)])
        if key not in predicted_memories:
            predicted_memories[key] = predict(config, model, plan, device)
        return predicted_memories[key]

    monkeypatch.setattr(train_run, "predict_memory", remembered)
