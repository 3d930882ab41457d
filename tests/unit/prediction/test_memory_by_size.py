"""The memory that follows from sizes, beside what `plait.memory` finds by running the layers on meta."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import plait
from parity.pairs import in_quick
from plait.model_size_rules import default_inner
from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.framework import PLAIT
from plait.prediction.memory_by_size import PredictedMemory
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


def _memory(pp: int = 1, **framework: Any) -> PredictedMemory:
    sizes = Decoder(layers=6, hidden=512, heads=8, vocab=1000, context=256, gated=True, rotary=True)
    recompute = "full" if "recomputes_blocks" in framework else "none"
    plan = Plan(pp=pp, precision="bf16", recompute=recompute)
    return predict(sizes, plan, "h100-sxm", framework=replace(PLAIT, **framework)).memory[0]


def test_a_fused_gate_does_not_keep_the_activation() -> None:
    saved = _memory().activations - _memory(fused_gate=True).activations
    assert saved == 6 * 256 * default_inner(512) * 2


def test_placeholder_gradients_are_one_of_each_size_or_all() -> None:
    without, sizes, all_ = (
        _memory(placeholder_gradients=kind).temporary for kind in ("none", "sizes", "all")
    )
    matrices = 4 * 512 * 512 + 3 * 512 * default_inner(512) + 1000 * 512
    assert sizes - without == pytest.approx(2 * matrices, rel=1e-3)
    total = matrices + 5 * (4 * 512 * 512 + 3 * 512 * default_inner(512)) + 1000 * 512
    assert all_ - without == pytest.approx(2 * total, rel=1e-3)
    first = _memory(2, placeholder_gradients="sizes").temporary - _memory(2).temporary
    assert first == pytest.approx(2 * (matrices - 1000 * 512), rel=1e-3)  # without a head


def test_recomputed_blocks_keep_one_input_for_attention_and_mlp() -> None:
    layers, blocks = _memory(recomputes_blocks=False), _memory(recomputes_blocks=True)
    assert layers.activations - blocks.activations == 6 * 256 * 512 * 2
    assert blocks.temporary > layers.temporary
