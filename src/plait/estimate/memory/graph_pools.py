"""The memory of recorded CUDA graphs: a pool for each slot of a stage, allocated for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from plait.engine.cuda_graphs.recordable_segments import SegmentPlace, places_of
from plait.engine.pipeline.stage_exchange import Crossing
from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.models.layers.shape_inference import TensorInfo
from plait.schedules.lowering.program import ActionInstruction, Instruction, Program, segments_of

Handlers = dict[type, Callable[[Any], None]]


class PartLedger(MemoryLedger):
    """Memory ledger that passes on to another one only activations and temporary memory, or only the rest."""

    def __init__(self, ledger: MemoryLedger, *, activations: bool) -> None:
        super().__init__()
        self._ledger, self._activations = ledger, activations

    def hold(self, holder: Hashable, blocks: Iterable[MemoryBlock | None]) -> None:
        """Make `holder` hold those of `blocks` that are passed on."""
        wanted = (one for one in blocks if one is not None and self._passes_on(one))
        self._ledger.hold(holder, wanted)

    def drop(self, holder: Hashable) -> None:
        """Release all blocks of `holder`."""
        self._ledger.drop(holder)

    def record_temporary(self, extra: int) -> None:
        """Record `extra` temporary bytes in the other ledger, if this one passes activations on to it."""
        if self._activations:
            self._ledger.record_temporary(extra)

    def _passes_on(self, block: MemoryBlock) -> bool:
        return (block.category is Category.ACTIVATIONS) == self._activations


def slots_of(program: Program) -> Counter[int]:
    """Return for each stage the most micro-batches that are in flight at once in a rank's program."""
    slots, taken = Counter[int](), Counter[int]()
    places: Iterable[SegmentPlace | None] = places_of(segments_of(program))
    for place in places:
        if place is None:
            continue
        taken[place.stage] += place.number == 0
        slots[place.stage] = max(slots[place.stage], taken[place.stage])
        taken[place.stage] -= place.is_last
    return slots


def pool_bytes(
    program: Program, stage: int, account: Callable[[MemoryLedger], Handlers], crossing: Crossing
) -> int:
    """Return the bytes of the CUDA graph memory pool that one micro-batch in flight takes at a stage.

    They are its peak there, and its inputs. `account` returns what records activations in a ledger, by type
    of instruction; `crossing`: of `Exchange`.
    """
    ledger = MemoryLedger()
    handlers = account(PartLedger(ledger, activations=True))
    for instruction in program:
        if _is_of_first(instruction, stage) and type(instruction) in handlers:
            handlers[type(instruction)](instruction)
            ledger.record_temporary(0)
    before = crossing[stage - 1][0] if stage else ()
    after = crossing[stage][0] if stage + 1 < len(crossing) else ()
    return ledger.most + _bytes_of(before) + _bytes_of(one for one in after if one.requires_grad)


def _is_of_first(instruction: Instruction, stage: int) -> bool:
    """Return whether an instruction belongs to the first micro-batch at a stage."""
    if not isinstance(instruction, ActionInstruction):
        return False
    return instruction.action.stage == stage and instruction.action.microbatch == 0


def _bytes_of(infos: Iterable[TensorInfo]) -> int:
    return sum(info.nbytes for info in infos)
