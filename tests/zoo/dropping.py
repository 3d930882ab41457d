"""Mistakes of dropout: masks that are not those of the single device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from parity.dropping import DROPPING as MODEL
from parity.dropping import IN_CONTEXTS
from plait.engine import Engine
from plait.engine.runner import Runner
from plait.plan.plan import Plan
from plait.tensor import dropout
from plait.tensor.attention.ring import KeyBlocks
from plait.tensor.dropout import set_region_part
from plait.tensor.parallel import apply_rules
from plait.verification.step_location import StepPhase
from zoo.row import TWO_STEPS, Named, Row


def rows_counted_from_each_ranks_first() -> Any:
    """Every data-parallel rank draws for the first rows of the batch."""
    original = Runner._rows

    def rows(self: Runner, batch: Any) -> list[range]:
        found = original(self, batch)
        return [range(one.start - found[0].start, one.stop - found[0].start) for one in found]

    return patch.object(Runner, "_rows", rows)


def every_micro_batch_the_first() -> Any:
    """Micro-batches drop alike."""
    original = Runner._rows

    def rows(self: Runner, batch: Any) -> list[range]:
        return original(self, batch)[:1] * len(batch)

    return patch.object(Runner, "_rows", rows)


def first_heads_on_every_rank() -> Any:
    """Every rank of tp draws for the first part."""

    def first(module: Any, dim: int, index: int, count: int) -> None:
        set_region_part(module, dim, 0, count)

    return patch.object(apply_rules, "set_region_part", first)


def the_same_in_every_step() -> Any:
    """Steps are not counted."""
    return patch.object(Engine, "passes", property(lambda _: 0, lambda _, count: None))


def positions_counted_from_each_ranks_first() -> Any:
    """Every rank of cp draws for the first positions of the sequence."""

    def first(ranges: Sequence[range], indices: slice) -> tuple[range, ...]:
        return (range(indices.start, indices.stop),)

    return patch.object(dropout, "parts_of", first)


def weights_dropped_as_in_the_own_block() -> Any:
    """Weights of keys that other ranks sent are dropped where those of the rank's own keys are."""
    original = KeyBlocks._dropout

    def as_in_own(self: KeyBlocks, call: Any, query: Any, peer: Any) -> Any:
        return original(self, call, query, None)

    return patch.object(KeyBlocks, "_dropout", as_in_own)


TWO_COPIES = Plan(dp=2, microbatches=2)
TWO_PARTS = Plan(tp=2, microbatches=2)
TWO_CONTEXTS = Plan(cp=2, microbatches=2, context_parallel="ring")
EMBEDDED = "1"
"""The layer that is a dropout itself."""

DROPPING = (
    Row(
        defect=rows_counted_from_each_ranks_first,
        model=MODEL,
        plan=TWO_COPIES,
        named=Named(phase=StepPhase.FORWARD, layer=EMBEDDED, microbatch=2, ranks=(1,)),
    ),
    Row(
        defect=every_micro_batch_the_first,
        model=MODEL,
        plan=Plan(pp=2, microbatches=2),
        named=Named(phase=StepPhase.FORWARD, layer=EMBEDDED, microbatch=1, ranks=(0,)),
    ),
    Row(
        defect=first_heads_on_every_rank,
        model=MODEL,
        plan=TWO_PARTS,
        named=Named(phase=StepPhase.FORWARD, layer="2", microbatch=0, ranks=(0, 1)),
    ),
    Row(
        defect=positions_counted_from_each_ranks_first,
        model=IN_CONTEXTS,
        plan=TWO_CONTEXTS,
        named=Named(phase=StepPhase.FORWARD, layer=EMBEDDED, microbatch=0, ranks=(0, 1)),
    ),
    Row(
        defect=weights_dropped_as_in_the_own_block,
        model=IN_CONTEXTS,
        plan=TWO_CONTEXTS,
        named=Named(phase=StepPhase.FORWARD, layer="2", microbatch=0, ranks=(0, 1)),
    ),
    Row(
        defect=the_same_in_every_step,
        model=MODEL,
        plan=Plan(pp=2, microbatches=2),
        options=TWO_STEPS,
        named=Named(phase=StepPhase.FORWARD, layer=EMBEDDED, microbatch=0, step=1, ranks=(0,)),
    ),
)
