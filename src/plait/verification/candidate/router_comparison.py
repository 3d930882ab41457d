"""Comparison of the load of experts, of the losses of routers, and of their corrections, once a step."""

from __future__ import annotations

from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.reference.router_losses import BALANCE_LOSS, CHOICES, CORRECTION, Z_LOSS
from plait.verification.step_location import RecordKey, StepPhase


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
    for name, bias in comparison.engine.named_buffers():
        path, _, local = name.rpartition(".")
        if local == "e_score_correction_bias":
            key = RecordKey(CORRECTION, name=path)
            comparison.compare(step, StepPhase.OPTIMIZER, key, bias)
