"""Mistakes of the loss that computes logits in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from plait.plan.plan import Plan
from plait.tensor import chunked_cross_entropy
from plait.tensor.chunked_cross_entropy import ChunkedCrossEntropy
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import Named, Row

ROWS = 5
"""Of 16 in a micro-batch: three chunks of 5, and one of 1."""


def last_chunk_dropped() -> Any:
    """Rows that fill no chunk are left out."""
    original = ChunkedCrossEntropy._chunks

    def chunks(self: ChunkedCrossEntropy, count: int) -> Iterator[slice]:
        return (chunk for chunk in original(self, count) if chunk.stop <= count)

    return patch.object(ChunkedCrossEntropy, "_chunks", chunks)


def scaled_twice() -> Any:
    """The gradient of the logits is scaled, and then scaled once more."""
    original = ChunkedCrossEntropy._logits_gradient

    def gradient(self: ChunkedCrossEntropy, rows: Tensor, found: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
        total, of_logits = original(self, rows, found, scale)
        return total, of_logits * scale

    return patch.object(ChunkedCrossEntropy, "_logits_gradient", gradient)


def weight_gradient_of_whole_chunks_only() -> Any:
    """What the last rows add to the gradient of the head's weight is missing."""
    original = chunked_cross_entropy.add_product

    def add(total: Tensor, a: Tensor, b: Tensor) -> None:
        if len(b) == ROWS:
            original(total, a, b)

    return patch.object(chunked_cross_entropy, "add_product", add)


def in_chunks(plan: Plan) -> Plan:
    return replace(plan, loss_rows=ROWS)


CHUNKS = (
    Row(
        defect=last_chunk_dropped,
        model=cases.GPT2,
        plan=in_chunks(cases.TWO_STAGES),
        named=Named(phase=StepPhase.LOSS, microbatch=0, ranks=(1,)),
    ),
    Row(
        defect=scaled_twice,
        model=cases.GPT2,
        plan=in_chunks(cases.TWO_PARTS),
        named=Named(phase=StepPhase.LOSS_GRADIENT, layer="head", microbatch=0, cause="times"),
    ),
    Row(
        defect=weight_gradient_of_whole_chunks_only,
        model=cases.UNTIED,
        plan=in_chunks(cases.ZERO_BUBBLE),
        named=Named(
            phase=StepPhase.WEIGHT_GRADIENT, layer="head", parameter="head.*weight", microbatch=0, ranks=(1,)
        ),
    ),
)
