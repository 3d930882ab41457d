from __future__ import annotations

from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.schedules.lowering.program import AllocateGradient, Finish

A = MemoryBlock(100, Category.ACTIVATIONS)
G = MemoryBlock(30, Category.GRADIENTS)
HOST = MemoryBlock(7, Category.STATE, on_host=True)


def total(ledger: MemoryLedger) -> int:
    return ledger.snapshot(Finish()).total


def test_a_memory_block_counts_once_as_long_as_any_holder_keeps_it() -> None:
    ledger = MemoryLedger()
    ledger.hold("run", [A, G])
    ledger.hold("value", [A, A, None])
    assert total(ledger) == 130
    ledger.drop("run")
    assert total(ledger) == 100
    ledger.drop("value")
    assert total(ledger) == 0
    ledger.drop("value")
    assert total(ledger) == 0


def test_the_ledger_counts_blocks_of_equal_size_separately() -> None:
    ledger = MemoryLedger()
    ledger.hold("two", [MemoryBlock(5, Category.BATCH), MemoryBlock(5, Category.BATCH)])
    assert total(ledger) == 10


def test_a_holder_that_takes_another_block_releases_its_first() -> None:
    ledger = MemoryLedger()
    ledger.hold("value", [A])
    ledger.hold("value", [G])
    assert ledger.snapshot(Finish()).held == {Category.GRADIENTS: 30, Category.ACTIVATIONS: 0}


def test_the_recorded_peak_is_the_first_moment_of_the_maximum() -> None:
    ledger = MemoryLedger()
    first, second, third = AllocateGradient("a"), AllocateGradient("b"), AllocateGradient("c")
    ledger.hold("a", [A])
    ledger.record(first)
    ledger.hold("b", [G])
    ledger.record(second)
    ledger.record(third)
    ledger.drop("a")
    ledger.record(Finish())
    assert ledger.peak is not None
    assert ledger.peak.after is second
    assert ledger.peak.held == {Category.ACTIVATIONS: 100, Category.GRADIENTS: 30}
    assert ledger.peak.total == ledger.most == 130
    ledger.record_temporary(50)
    assert ledger.most == 130
    ledger.record_temporary(120)
    assert ledger.most == 150
    ledger.reset_peaks()
    assert (ledger.peak, ledger.most) == (None, 0)


def test_offloaded_blocks_count_as_host_memory() -> None:
    ledger = MemoryLedger()
    ledger.hold("a", [A, HOST])
    ledger.record(Finish())
    ledger.drop("a")
    ledger.record(Finish())
    assert ledger.peak is not None
    assert (ledger.peak.total, ledger.peak.host, ledger.host_peak) == (100, 7, 7)
