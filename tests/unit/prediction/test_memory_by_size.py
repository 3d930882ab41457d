"""The memory that follows from sizes, beside what `plait.memory` finds by running the layers on meta."""

from dataclasses import replace
from typing import Any

import pytest

import plait
from plait.plan import Plan
from plait.prediction.framework import PLAIT
from plait.prediction.model_sizes import decoder_of
from plait.prediction.step_prediction import predict

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1000, "context": 128}
# Layers on the CPU: RMS norms are not fused there, and keep copies in fp32.
FRAMEWORK = replace(PLAIT, fused_norm=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pp": 2},
        {"pp": 2, "schedule": "zb-h1"},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": "regather"},
        {"dp": 4, "strategy": "optimizer"},
        {"dp": 4, "strategy": "full"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"cp": 2},
        {"master_precision": "fp32"},
        {"loss_rows": 100},
        {"pp": 2, "tp": 2, "schedule": "zb-h1", "loss_rows": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_within_five_percent_of_the_simulated_step(name: str, options: dict[str, Any]) -> None:
    model = getattr(plait.models, name)(**SIZES)
    plan = Plan(microbatches=4, precision="bf16", **options)
    expected = plait.memory(model, plan, rows=8, device="cpu").ranks
    found = predict(decoder_of(model), plan, "h100-sxm", rows=8, framework=FRAMEWORK).memory
    for rank, predicted in zip(expected, found, strict=True):
        assert predicted.allocated == pytest.approx(rank.most, rel=0.05)
