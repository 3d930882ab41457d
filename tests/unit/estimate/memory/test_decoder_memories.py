"""The memory that follows from sizes, beside what `plait.memory` finds by running the layers on meta."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import plait
from parity.pairs import in_quick
from plait.estimate.memory.decoder_layer_memory import LayerMemory, layer_memory
from plait.estimate.memory.decoder_memories import (
    ActivationMemories,
    ActivationPeak,
    PredictedMemory,
    RankActivations,
    StageMemory,
    activation_peaks,
    stage_memory,
)
from plait.estimate.memory.state_memory import ParameterCounts, rank_parameter_counts
from plait.estimate.prediction.prediction import predict
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.hardware import load_hardware
from plait.plan.decoder_sizes import Decoder, decoder_of
from plait.plan.plan import Plan
from plait.schedules.action import Kind
from plait.schedules.held_microbatches import ActionStart, HeldCounts, HeldMicrobatches
from plait.schedules.search.schedule_by_policy import schedule

SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1000, "context": 128}
# Layers on the CPU: RMS norms and rotations are not fused there, and keep copies.
ON_CPU = replace(load_hardware("h100-sxm"), overlaps=False)


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
    *(("llama", "regather"), ("gpt2", "optimizer"), ("llama", "full"), ("llama", "cp")),
    *(("gpt2", "selective"), ("llama", "pp-tp-loss-rows")),
)
"""Kinds of options with one of the models each; the full run has all."""


ALLOWED = {"full": 0.04}
"""Which layers are gathered while memory peaks is not known: the largest two that follow each other count."""


@pytest.mark.parametrize(("name", "options"), in_quick(product(("gpt2", "llama"), OPTIONS), *QUICK))
def test_memory_by_size_is_within_one_percent_of_the_simulated_step(name: str, options: str) -> None:
    model = getattr(plait.models, name)(**SIZES)
    plan = Plan(microbatches=4, precision="bf16", **OPTIONS[options])
    expected = plait.memory(model, plan, rows=8, device="cpu").ranks
    found = predict(decoder_of(model), plan, ON_CPU, rows=8).memory
    for rank, predicted in zip(expected, found, strict=True):
        assert predicted.allocated == pytest.approx(rank.most, rel=ALLOWED.get(options, 0.01))


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
HELD = HeldCounts(
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


@pytest.mark.parametrize(("received", "sent"), [(3000.0, 4000.0), (2000.0, 0.0)])
def test_peaks_are_what_is_held_with_messages_and_what_runs(received: float, sent: float) -> None:
    """The first backward counts as after one, too: its last layer runs beside all weight gradients."""
    assert activation_peaks(HELD, STAGES, received, sent) == {
        (F, False): (110 + received, 7),
        (B, False): (120 + received, 300),
        (B, True): max((120 + received, 250), (10 + received + sent, 300), key=sum),
        (W, True): (3 + received + sent, 60),
    }


def test_messages_are_receive_buffers_and_gradients_on_their_way() -> None:
    sizes = Decoder(layers=1, hidden=8, heads=2, vocab=10, context=4)
    made = schedule("1f1b", ranks=2, microbatches=2)
    known = ActivationMemories(MicrobatchShape(sizes, Plan(pp=2), rows=2), made, [], [])
    assert known.messages(HELD) == (3 * 2 * 4 * 8 * 4, 4 * 2 * 4 * 8 * 4)


def test_the_peak_of_a_rank_is_that_of_its_actions_with_the_gradients_they_need() -> None:
    plan = Plan(dp=2, microbatches=2, strategy="gradients")  # in fp32, reduced after the last backward
    shape = MicrobatchShape(Decoder(layers=1, hidden=8, heads=2, vocab=10, context=4), plan, rows=2)
    sizes, small = ParameterCounts(whole=100, twice=0, pair=50), ActivationPeak(3, 4)
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


def test_a_stage_is_made_of_its_layers_and_has_the_peaks_of_its_schedule() -> None:
    sizes = Decoder(layers=6, hidden=64, heads=4, vocab=10, context=16)
    plan = Plan(pp=3, tp=2, microbatches=3, layers_per_stage=(5, 4, 5))
    memory = predict(sizes, plan, "h100-sxm").memory
    shape = MicrobatchShape(sizes, plan, rows=1)
    layers = [layer_memory(kind, "none", shape) for kind in sizes.kinds[5:9]]
    stage = stage_memory(layers, at_once=False, receives=True)
    held = HeldMicrobatches(schedule("1f1b", ranks=3, microbatches=3)).ranks[1]
    peaks = activation_peaks(
        held, [stage], held.receive_buffers * shape.outside, held.sending * shape.outside
    )
    activations = RankActivations(rank_parameter_counts(shape, [sizes.kinds[5:9]]), peaks)
    assert memory[1] == activations.with_state(shape, load_hardware("h100-sxm").reserved)
