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
from plait.prediction.hardware import load_hardware
from plait.prediction.layer_memory import LayerMemory, layer_memory, sending_pieces
from plait.prediction.layer_operations import StepShape
from plait.prediction.memory_by_size import (
    ActivationPeak,
    PredictedMemory,
    RankActivations,
    StageMemory,
    activation_peaks,
    stage_memory,
)
from plait.prediction.model_sizes import decoder_of
from plait.prediction.state_memory import RankSizes, rank_sizes
from plait.prediction.step_prediction import predict
from plait.schedules.action import Kind
from plait.schedules.held_microbatches import ActionStart, HeldMicrobatches, RankHeld
from plait.schedules.search.api import schedule

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
def test_memory_by_size_is_within_one_percent_of_the_simulated_step(name: str, options: str) -> None:
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
    uneven = [layer, replace(layer, gradient=50), replace(layer, gradient=3, weights=10)]
    most = stage_memory(uneven, at_once=True, receives=False).most
    assert (
        most[Kind.B] == 4 + 10 - 10 + 50
    )  # the last weight gradient, beside the gradient that was passed on


def test_weight_gradients_after_all_input_gradients_keep_more() -> None:
    layer = LayerMemory(until_inputs=1, until_weights=4, forward=3, backward=5, weights=1, gradient=2)
    at_once, later = (
        stage_memory([layer] * 3, at_once=at_once, receives=False).most[Kind.B] for at_once in (True, False)
    )
    assert (at_once, later) == (7, 2 * (4 - 1) + 2 + 5)


F, I, W, B = Kind.F, Kind.I, Kind.W, Kind.B  # noqa: E741 (the letters of actions)
STAGES = [
    StageMemory(10, 3, {F: 7, I: 20, W: 6, B: 30}, {F: 0, I: 15, W: 5, B: 25}),
    StageMemory(100, 40, {F: 70, I: 200, W: 60, B: 300}, {F: 0, I: 150, W: 50, B: 250}),
]
HELD = RankHeld(
    stages=(0, 3),
    starts={
        ActionStart(0, F, False): ((2, 0, 0, 0), (1, 1, 0, 0)),
        ActionStart(1, B, False): ((2, 1, 0, 0),),
        ActionStart(0, B, True): ((1, 0, 2, 1),),
        ActionStart(1, B, True): ((1, 0, 0, 0),),
        ActionStart(1, W, True): ((0, 0, 1, 0),),
    },
    received=2,
    receive_buffers=3,
    sending=4,
)


@pytest.mark.parametrize(("blocking", "received", "sent"), [(False, 3, 4), (True, 2, 0)])
def test_peaks_are_what_is_held_with_messages_and_what_runs(blocking: bool, received: int, sent: int) -> None:
    """The first backward counts as after one, too: its last layer runs beside all weight gradients."""
    sizes = Decoder(layers=1, hidden=8, heads=2, vocab=10, context=4)
    shape = StepShape(sizes, Plan(), replace(PLAIT, blocking_messages=blocking), rows=2)
    buffers, sending = received * 2 * 4 * 8 * 4, sent * 2 * 4 * 8 * 4
    assert activation_peaks(HELD, STAGES, shape, always=1000) == {
        (F, False): (110 + buffers, 1007),
        (B, False): (120 + buffers, 1300),
        (B, True): max((120 + buffers, 1250), (10 + buffers + sending, 1300), key=sum),
        (W, True): (3 + buffers + sending, 1060),
    }


def test_the_peak_of_a_rank_is_that_of_its_actions_with_the_gradients_they_need() -> None:
    plan = Plan(dp=2, microbatches=2, strategy="gradients")  # in fp32, reduced after the last backward
    shape = StepShape(Decoder(layers=1, hidden=8, heads=2, vocab=10, context=4), plan, PLAIT, rows=2)
    sizes, small = RankSizes(whole=100, twice=0, pair=50), ActivationPeak(3, 4)
    for peaks, gradients, kept, running in (
        ({(F, False): (500, 60)}, 0, 500, 60),
        ({(F, True): (500, 60), (B, False): (500, 59)}, 400, 500, 60),
        ({(B, False): (500, 60), (F, False): (500, 61)}, 200, 500, 60),
        ({(F, False): small}, 400, 0, 0),  # after a backward, with nothing kept
    ):
        rank = RankActivations(sizes, {key: ActivationPeak(*peak) for key, peak in peaks.items()})
        found = rank.with_state(shape, reserved=77)
        assert found == PredictedMemory(400, 200 + gradients, 400, kept, running, 77)
        assert found.allocated == 400 + 200 + gradients + 400 + kept + running
        assert not rank.splits
    rank = RankActivations(sizes, {(W, True): small, (B, False): ActivationPeak(9, 9)})
    other = RankActivations(sizes, {(W, True): ActivationPeak(1, 7), (F, True): small})
    assert rank.joined(other).peaks == {(W, True): (1, 7), (B, False): (9, 9), (F, True): (3, 4)}
    assert rank.splits


def test_stages_are_computed_once_but_for_their_messages() -> None:
    """The last layer of a stage that sends a piece keeps less; of equal stages one is computed."""
    sizes = Decoder(layers=6, hidden=64, heads=4, vocab=10, context=16)
    plan = Plan(pp=3, tp=2, microbatches=3, layers_per_stage=(5, 4, 5))
    for divided in (False, True):
        framework = replace(PLAIT, messages_divided=divided)
        memory = predict(sizes, plan, "h100-sxm", framework=framework).memory
        shape = StepShape(sizes, plan, framework, rows=1)
        whole = [layer_memory(kind, "none", shape) for kind in sizes.kinds[5:9]]
        last = sending_pieces(whole[-1], shape) if divided else whole[-1]
        stage = stage_memory([*whole[:-1], last], at_once=False, receives=True)
        made = schedule("1f1b", ranks=3, microbatches=3)
        held = HeldMicrobatches(made).ranks[1]
        peaks = activation_peaks(held, [stage], shape, 0.0)
        activations = RankActivations(rank_sizes(shape, [sizes.kinds[5:9]]), peaks)
        assert memory[1] == activations.with_state(shape, load_hardware("h100-sxm").reserved)
