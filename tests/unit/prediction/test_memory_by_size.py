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
from plait.prediction.layer_memory import LayerMemory
from plait.prediction.memory_by_size import PredictedMemory, stage_memory
from plait.prediction.model_sizes import decoder_of
from plait.prediction.step_prediction import predict
from plait.schedules.action import Kind

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1000, "context": 128}
# Layers on the CPU: RMS norms and rotations are not fused there, and keep copies.
FRAMEWORK = replace(PLAIT, composes_operations=True)


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
    "no-masters": {"master_precision": "bf16"},
    "loss-rows": {"loss_rows": 100},
    "pp-tp-loss-rows": {"pp": 2, "tp": 2, "schedule": "zb-h1", "loss_rows": 100},
}
QUICK = (
    *(("gpt2", "zb-h1"), ("llama", "regather"), ("gpt2", "optimizer"), ("llama", "full")),
    *(("gpt2", "selective"), ("llama", "cp"), ("gpt2", "no-masters"), ("llama", "pp-tp-loss-rows")),
)
"""Each kind of option with one of the models; the full run has all."""


ALLOWED = {"full": 0.04}
"""Which layers are gathered while memory peaks is not known: the largest two that follow each other count."""


@pytest.mark.parametrize(("name", "options"), in_quick(product(("gpt2", "llama"), OPTIONS), *QUICK))
def test_within_one_percent_of_the_simulated_step(name: str, options: str) -> None:
    model = getattr(plait.models, name)(**SIZES)
    plan = Plan(microbatches=4, precision="bf16", **OPTIONS[options])
    expected = plait.memory(model, plan, rows=8, device="cpu").ranks
    found = predict(decoder_of(model), plan, "h100-sxm", rows=8, framework=FRAMEWORK).memory
    for rank, predicted in zip(expected, found, strict=True):
        assert predicted.allocated == pytest.approx(rank.most, rel=ALLOWED.get(options, 0.01))


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
    one = 256 * 512 * 2
    head = one + 4 * 256  # it is no block: its norm's output and statistics are kept
    assert layers.activations - blocks.activations == 6 * one - head
    assert blocks.temporary > layers.temporary


def test_stages_free_what_they_keep_layer_by_layer() -> None:
    layer = LayerMemory(until_inputs=10, until_weights=4, forward=12, backward=5, weights=1, gradient=2)
    at_once = stage_memory([layer] * 3, at_once=True, receives=True)
    assert at_once.until_inputs == 30
    assert at_once.until_weights == 3 * 4 - 2  # the last gradient is in a receive buffer
    assert at_once.most == {Kind.F: 2, Kind.I: 5, Kind.W: 1, Kind.B: 5}
    assert at_once.last == {Kind.I: 2 - 8 - 6 + 5, Kind.W: 1 - 2 - 4, Kind.B: 2 - 20 + 5}


def test_weight_gradients_after_all_input_gradients_keep_more() -> None:
    layer = LayerMemory(until_inputs=1, until_weights=4, forward=3, backward=5, weights=1, gradient=2)
    at_once, later = (
        stage_memory([layer] * 3, at_once=at_once, receives=False).most[Kind.B] for at_once in (True, False)
    )
    assert (at_once, later) == (7, 2 * (4 - 1) + 2 + 5)
