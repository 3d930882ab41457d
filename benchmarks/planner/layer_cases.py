"""Published times of single layers and stages, without a pipeline: they determine the device's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framework_times import FrameworkTimer
from frameworks import MEGATRON_2021, MEGATRON_2022, MIXED
from runs import gpt, records

from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.estimate.time.hardware import Hardware
from plait.estimate.time.layer_times import PassTimes
from plait.plan.plan import Plan, Recompute

MODEL_22B = {"hidden": 6144, "layers": 48, "heads": 64, "context": 2048, "vocab": 51200}
ROWS = {2304: (6, 24), 4096: (3, 32), 5120: (1, 40), 6144: (1, 48)}
"""Rows of a micro-batch and heads of the zero-bubble paper's models, by hidden size (its tables 3 and 4)."""


def layer_ratios(part: str, machine: Hardware) -> Iterator[tuple[str, float, float]]:
    """Yield table, predicted and measured seconds of each published layer or stage."""
    for row in records("megatron 2022, one layer", part):
        times = _layer(row["variant"], machine)
        yield "megatron 2022, one layer", times.forward.total, row["forward_ms"] / 1e3
        backward = times.inputs.total + times.weights.total
        yield "megatron 2022, one layer", backward, row["backward_ms"] / 1e3
    for row in records("zero bubble, bubbles", part):
        found = _stage(row, machine)
        for name, seconds in zip("FIW", found, strict=True):
            yield "zero bubble, stages", seconds, row[name] / 1e3


def _layer(variant: str, machine: Hardware) -> PassTimes:
    """Return the times of a transformer layer of 22 B parameters on 8 ranks, as the paper measured it."""
    parts = variant in ("sp", "selective+sp")
    recompute: Recompute = (
        "full" if variant == "full_recompute" else "selective" if "selective" in variant else "none"
    )
    plan = Plan(tp=8, recompute=recompute, sequence_parallel="regather" if parts else "none", **MIXED)
    timer = FrameworkTimer(MicrobatchShape(gpt(MODEL_22B), plan, 4), machine, "fp16", framework=MEGATRON_2022)
    return timer.times("attention", recompute) + timer.times("mlp", recompute)


def _stage(row: Mapping[str, Any], machine: Hardware) -> tuple[float, float, float]:
    """Return the mean times of F, I and W of the stages without embedding or head."""
    rows, heads = ROWS[row["hidden"]]
    model = gpt({**row, "heads": heads, "context": 1024})
    plan = Plan(pp=row["pp"], microbatches=row["microbatches"], **MIXED)
    timer = FrameworkTimer(MicrobatchShape(model, plan, rows), machine, "fp16", framework=MEGATRON_2021)
    block = timer.times("attention", "none") + timer.times("mlp", "none")
    count = (row["layers"] + 2) / row["pp"]
    return count * block.forward.total, count * block.inputs.total, count * block.weights.total
