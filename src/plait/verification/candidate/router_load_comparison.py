"""Comparison of the load of experts, of the losses of routers, and of their corrections, once a step."""

from __future__ import annotations

from torch import Tensor

from plait.tensor.experts.router import routers_of
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.definitions.router_losses import correction_of
from plait.verification.reference.router_losses import BALANCE_LOSS, CHOICES, CORRECTION, Z_LOSS
from plait.verification.step_location import RecordKey, RecordScope, StepPhase


def compare_load(comparison: StepComparison, step: int) -> None:
    """Compare how many tokens chose each expert in a step, as whole numbers, and the losses of routers."""
    load = comparison.engine.expert_load
    if load is None:
        return
    for kind, found in ((CHOICES, load.tokens), (BALANCE_LOSS, load.balance), (Z_LOSS, load.z)):
        for path, actual in found.items():
            comparison.compare(step, StepPhase.EXPERT_LOAD, RecordKey(kind, name=path), actual)


def compare_corrections(comparison: StepComparison, step: int) -> None:
    """Compare the biases of this rank's routers, which are corrected once a step."""
    records = comparison.recording.values[RecordScope(step)]
    rates = {
        path: router.balance.bias_rate for path, router in routers_of(comparison.sequence.layers).items()
    }
    for name, bias in comparison.engine.named_buffers():
        path, _, local = name.rpartition(".")
        if local == "e_score_correction_bias":
            key = RecordKey(CORRECTION, name=path)
            counts = records[RecordKey(CHOICES, name=path)]
            mistakes = _other_corrections(records[key], bias, counts.to(bias.device), rates[path])
            comparison.compare(step, StepPhase.OPTIMIZER, key, bias, alternatives=mistakes)


def _other_corrections(
    expected: Tensor, actual: Tensor, counts: Tensor, rate: float
) -> list[tuple[str, Tensor]]:
    """Return the biases after common mistakes in their correction, each after a text that names it."""
    expected = expected.to(actual)
    change = correction_of(counts, rate).to(actual)
    before = expected - change
    steps = ((actual - before) / (rate or 1.0)).round().clamp(-1, 1)
    return [
        ("the bias was not corrected", before),
        ("the bias was corrected twice", expected + change),
        ("the bias was corrected the other way: experts with much load were raised", before - change),
        ("the bias was corrected by other counts than those of the whole step", before + rate * steps),
    ]
