"""The memory that follows from sizes, beside what `plait.memory` finds by running the layers on meta."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import plait
from parity.pairs import in_quick
from plait.plan import Plan
from plait.prediction.framework import PLAIT
from plait.prediction.model_sizes import decoder_of
from plait.prediction.step_prediction import predict

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1000, "context": 128}
# Layers on the CPU: RMS norms are not fused there, and keep copies in fp32.
FRAMEWORK = replace(PLAIT, fused_norm=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "pp": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "tp": {"tp": 2},
    "regather": {"tp": 2, "sequence_parallel": "regather"},
    "optimizer": {"dp": 4, "strategy": "optimizer"},
    "full": {"dp": 4, "strategy": "full"},
    "recomputed": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "cp": {"cp": 2},
    "masters": {"master_precision": "fp32"},
    "loss-rows": {"loss_rows": 100},
    "pp-tp-loss-rows": {"pp": 2, "tp": 2, "schedule": "zb-h1", "loss_rows": 100},
}
QUICK = (
    *(("gpt2", "zb-h1"), ("llama", "regather"), ("gpt2", "optimizer"), ("llama", "full")),
    *(("gpt2", "selective"), ("llama", "cp"), ("gpt2", "masters"), ("llama", "pp-tp-loss-rows")),
)
"""Each kind of option with one of the models; the full run has all."""


@pytest.mark.parametrize(("name", "options"), in_quick(product(("gpt2", "llama"), OPTIONS), *QUICK))
def test_within_five_percent_of_the_simulated_step(name: str, options: str) -> None:
    model = getattr(plait.models, name)(**SIZES)
    plan = Plan(microbatches=4, precision="bf16", **OPTIONS[options])
    expected = plait.memory(model, plan, rows=8, device="cpu").ranks
    found = predict(decoder_of(model), plan, "h100-sxm", rows=8, framework=FRAMEWORK).memory
    for rank, predicted in zip(expected, found, strict=True):
        assert predicted.allocated == pytest.approx(rank.most, rel=0.05)
