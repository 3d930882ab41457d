"""What context parallelism refuses: layers that mix positions otherwise, and batches that cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.contexts import mixing
from plait.errors import CommunicationError, DataError, ModelError, PlanError
from plait.plan.plan import Plan
from plait.tensor.microbatches import Microbatches

HIDDEN = 24


class Averaging(nn.Module):
    """Adds the mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Numbering(nn.Module):
    """Numbers the positions by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.table(torch.arange(x.shape[1]))
        return added


def with_layer(layer: nn.Module) -> nn.Module:
    model = mixing(8).build()
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(*model[:2], layer, *model[2:])


def run(layer: nn.Module, shape: tuple[int, ...], targets: tuple[int, ...], fields: Any) -> None:
    plan = Plan(cp=2, **fields)
    engine = plait.parallelize(with_layer(layer), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    engine.forward_backward(torch.zeros(shape, dtype=torch.int64), torch.zeros(targets, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Averaging(), "layer '2' mixes positions of the sequence at aten.mean"),
        (Numbering(), "layer '2' numbers the positions of the sequence by itself at aten.arange"),
        (
            nn.TransformerEncoderLayer(HIDDEN, 2, HIDDEN, dropout=0.0, batch_first=True),
            "layer '2' mixes positions of the sequence at aten.bmm",
        ),
    ],
    ids=["mean", "arange", "encoder"],
)
def test_a_layer_that_mixes_positions_is_named(thread_ranks: Any, layer: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        thread_ranks.run(run, layer, (2, 8), (2, 8), {}, ranks=2)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("shape", "targets", "fields", "error", "message"),
    [
        ((2, 8), (2, 7), {}, DataError, r"targets have a tensor of shape \[2, 7\], but sequences of 8"),
        ((2, 8), (2,), {}, DataError, r"targets have a tensor of shape \[2\].* set plan.cp to 1"),
        ((2,), (2,), {}, DataError, "no tensor with rows and positions"),
        (
            (2, 8),
            (2, 8),
            {"context_parallel": "ulysses", "tp": 1, "cp": 4},
            PlanError,
            "6 heads do not divide over plan.cp = 4",
        ),
    ],
)
def test_batches_and_heads_that_do_not_divide_over_cp_are_refused(
    thread_ranks: Any, shape: Any, targets: Any, fields: Any, error: Any, message: str
) -> None:
    fields = dict(fields)
    ranks = fields.pop("cp", 2)

    def body() -> None:
        plan = Plan(cp=ranks, **fields)
        engine = plait.parallelize(mixing(8).build(), plan, plait.Mesh(plan), loss=plait.cross_entropy)
        engine.forward_backward(torch.zeros(shape).long(), torch.zeros(targets).long())

    with pytest.raises(error, match=message):
        thread_ranks.run(body, ranks=ranks)


def test_document_ids_are_one_for_each_position(thread_ranks: Any) -> None:
    def body(ids: Tensor) -> None:
        engine = plait.parallelize(mixing(8).build(), Plan(), plait.Mesh(), loss=plait.cross_entropy)
        batch = {"tokens": torch.zeros(2, 8).long(), "document_ids": ids}
        engine.forward_backward(batch, torch.zeros(2, 8).long())

    with pytest.raises(DataError, match=r"document_ids are \[2, 7\], but its sequences have 8 positions"):
        thread_ranks.run(body, torch.zeros(2, 7).long(), ranks=1)
    found = r"document_ids are torch.float32 \[2, 8\]: give whole numbers \[rows, length\]"
    with pytest.raises(DataError, match=found):
        thread_ranks.run(body, torch.zeros(2, 8), ranks=1)


# ── batches that a data loader has cut ──


def step_on_parts(inputs: Any, plan: Plan, engine_plan: Plan | None = None, index: int | None = None) -> None:
    """A step on the parts that `plan` makes; `inputs(index)` are what the rank's data loader has read."""
    engine_plan = engine_plan or plan
    mesh = plait.Mesh(engine_plan)
    engine = plait.parallelize(mixing(8).build(), engine_plan, mesh, loss=plait.cross_entropy)
    index = mesh.index("cp") if index is None else index
    given = inputs(mesh.index("cp"))
    targets = given["tokens"] if isinstance(given, dict) else given
    engine.forward_backward(*(plait.sequence_part(one, plan, index) for one in (given, targets)))


UNLIKE = {
    "rows": lambda index: torch.zeros(2 + index, 8).long(),
    "lengths": lambda index: torch.zeros(2, 8 + index).long(),
    "documents": lambda index: {
        "tokens": torch.zeros(2, 8).long(),
        "document_ids": torch.arange(8).expand(2, 8) // (2 + index),
    },
}


@pytest.mark.parametrize("what", UNLIKE)
def test_sequence_parts_of_different_batches_are_refused(thread_ranks: Any, what: str) -> None:
    """Otherwise ranks would expect other keys than arrive, which ends or blocks their processes."""
    with pytest.raises(CommunicationError, match=r"the ranks of cp do not agree .*a step on parts of"):
        thread_ranks.run(step_on_parts, UNLIKE[what], Plan(cp=2), ranks=2)


def test_a_sequence_part_of_another_rank_or_layout_is_refused(thread_ranks: Any) -> None:
    def inputs(index: int) -> Tensor:
        return torch.zeros(2, 8).long()

    plan = Plan(cp=2)
    with pytest.raises(DataError, match="of index 0 along cp of 2 ranks, where this rank has index 1 of 2"):
        thread_ranks.run(step_on_parts, inputs, plan, plan, 0, ranks=2)
    with pytest.raises(DataError, match="of index 0 along cp of 2 ranks, where this rank has index 0 of 1"):
        thread_ranks.run(step_on_parts, inputs, plan, Plan(), ranks=1)
    with pytest.raises(DataError, match="or is not of its context_layout 'striped'"):
        thread_ranks.run(step_on_parts, inputs, plan, Plan(cp=2, context_layout="striped"), ranks=2)


@pytest.mark.parametrize("index", [-1, 2])
def test_sequence_part_refuses_an_index_outside_cp(index: int) -> None:
    with pytest.raises(DataError, match=f"the index {index}, where plan.cp is 2"):
        plait.sequence_part(torch.zeros(2, 8), Plan(cp=2), index)


def test_parts_of_micro_batches_are_refused() -> None:
    with pytest.raises(DataError, match="sequence_part was given Microbatches"):
        plait.sequence_part(Microbatches([torch.zeros(2, 8)]), Plan(cp=2), 0)


def test_sequence_part_refuses_document_ids_without_inputs() -> None:
    with pytest.raises(DataError, match="the batch has document_ids only: give the inputs beside them"):
        plait.sequence_part({"document_ids": torch.zeros(2, 8).long()}, Plan(cp=2), 0)
