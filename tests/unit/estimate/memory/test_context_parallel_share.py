"""Which part of a micro-batch is traced for the ranks of `cp`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import DataError
from plait.estimate.memory.context_parallel_microbatch import as_input_batch, context_share, result_bytes
from plait.estimate.memory.memory_ledger import Category
from plait.plan.plan import Plan
from plait.ranks.group import Group, Traffic
from plait.tensor.attention.key_exchange_plan import Mask, exchange_plan
from plait.tensor.running_sequence import ContextParallelism

ROWS = 3


def tokens(length: int) -> Tensor:
    return torch.empty(ROWS, length, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("length", [24, 13, 7, 2, 1])
def test_the_rank_with_the_last_position_sees_most_keys(layout: Any, length: int) -> None:
    plan = Plan(cp=3, context_layout=layout, context_parallel="ring")
    sequence = context_share(plan, tokens(length), None).sequence
    assert sequence is not None
    assert length - 1 in sequence.indices
    received = []
    for rank in range(3):
        of_rank = ContextParallelism.of(plan, Group("cp", (0, 1, 2), rank, None, Traffic(), 0.0))
        exchange = exchange_plan(of_rank.sequence(length), Mask(), torch.device("cpu"))
        received.append(sum(exchange.received(1)))
    assert received[sequence.group.index] == max(received)
    assert sequence.size >= max(map(sequence.layout.size, range(3))) - 2


def test_inputs_and_targets_are_cut_and_the_whole_ones_counted() -> None:
    share = context_share(Plan(cp=2), tokens(12), tokens(12))
    assert share.inputs.shape == share.targets.shape == (ROWS, 6)
    assert share.uncut == 2 * ROWS * 12 * 8
    whole = context_share(Plan(), tokens(12), tokens(12))
    assert (whole.sequence, whole.uncut) == (None, 0)


def test_parts_of_the_sequence_are_kept_between_steps_and_the_batch_is_not() -> None:
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=16, context=12)
    few, many = (plait.memory(model, Plan(cp=2), rows=rows, device="cpu").ranks[0] for rows in (1, 3))
    assert many.at_rest - few.at_rest == 2 * 2 * 6 * 8
    assert many.at_peak[Category.BATCH] == 2 * 3 * (6 + 12) * 8
    whole = plait.memory(model, Plan(), rows=3, device="cpu").ranks[0]
    assert whole.at_peak[Category.BATCH] == 2 * 3 * 12 * 8


def test_predicted_memory_takes_the_given_document_ids() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 7]).repeat(ROWS, 1)
    batch = {"tokens": tokens(12), "document_ids": ids}
    for given, longest in ((ids, 7), (ids.to("meta"), 12)):
        share = context_share(Plan(), as_input_batch(batch | {"document_ids": given}, None), None)
        assert share.sequence is not None
        assert share.sequence.longest == longest
        assert share.uncut == ids.nbytes
        assert result_bytes(share.sequence) == {}


def test_tensors_shared_by_layers_of_a_running_sequence_count_once() -> None:
    share = context_share(Plan(cp=2), tokens(12), None)
    sequence = share.new_sequence()
    assert sequence is not None
    table = torch.empty(6, 4)
    sequence.result("table", lambda: (table, table[:3], {"not": "counted"}))
    assert result_bytes(sequence) == {"table": table.nbytes}
    assert result_bytes(share.sequence) == result_bytes(None) == {}


def test_memory_under_cp_refuses_targets_without_a_sequence() -> None:
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=16, context=12)
    with pytest.raises(DataError, match=r"dim 1 is the sequence"):
        plait.memory(model, Plan(cp=2), tokens(12), torch.empty(ROWS, 5), device="cpu")


def test_each_layout_and_method_is_traced_by_itself() -> None:
    """Though one estimator keeps what it has traced."""
    from plait.estimate.memory.predict_memory import MemoryEstimator

    model = plait.models.llama(layers=1, hidden=24, heads=6, kv_heads=3, vocab=16, context=64)
    estimator = MemoryEstimator(model, device="cpu")
    plans = [
        Plan(),
        Plan(cp=2, context_parallel="ring"),
        Plan(cp=2, context_parallel="ulysses", sequence_parallel="keep"),
        Plan(cp=3, context_parallel="ring"),
    ]
    found = [estimator.estimate(plan).ranks[0] for plan in plans]
    assert len({rank.peak for rank in found}) == len(found)
    assert found == [plait.memory(model, plan, device="cpu").ranks[0] for plan in plans]
