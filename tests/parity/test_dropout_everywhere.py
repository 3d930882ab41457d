"""Dropout draws the same mask in every layout: against one device that applies the whole mask at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import woven
from parity.case import Recipe
from parity.dropping import DROPPING, HEADS, IN_CONTEXTS, TWICE, by_hand
from parity.norm import assert_close, assert_equal
from parity.pairs import covering_rows, in_quick
from parity.parity import compare
from parity.rows import name_of
from parity.sequence_parts import of_length
from plait.engine import Engine
from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.tensor.microbatches import Microbatches

TWO_CALLS = Recipe(steps=2, calls=2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pp": 2, "schedule": "zb-v"},
        {"tp": 2},
        {"dp": 2},
        {"pp": 2, "dp": 2, "strategy": "full", "reduce": "each", "recompute": "full"},
        {"tp": 2, "recompute": "selective"},
        {"tp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
        {"tp": 4, "recompute": "full"},
        {"tp": 2, "dp": 2, "recompute": "selective"},
    ],
    ids=str,
)
def test_every_layout_draws_the_same_dropout_masks(thread_ranks: Any, settings: dict[str, Any]) -> None:
    plan = Plan(**settings, microbatches=4, precision="fp64")
    expected = by_hand(DROPPING, plan, TWO_CALLS)
    compare(
        thread_ranks.run(woven.train, DROPPING, plan, TWO_CALLS, ranks=plan.world), expected, torch.float64
    )


@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize("mode", ["keep", "regather"])
@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_ranks_draw_the_dropout_masks_of_the_whole_sequence(
    thread_ranks: Any, tp: int, mode: Any, length: int
) -> None:
    case = of_length(DROPPING, length)
    plan = Plan(tp=tp, microbatches=2, sequence_parallel=mode, precision="fp64")
    expected = by_hand(case, plan, TWO_CALLS)
    compare(thread_ranks.run(woven.train, case, plan, TWO_CALLS, ranks=tp), expected, torch.float64)


CONTEXTS = {
    "cp": (2, 3, 4),
    "context_parallel": ("ring", "ulysses"),
    "context_layout": ("zigzag", "striped", "contiguous"),
    "length": (8, 7, 2),
    "tensor": ((1, "keep"), (1, "none"), (2, "none"), (2, "keep"), (2, "regather")),
    "dp": (1, 2),
    "recompute": ("none", "selective", "full"),
}


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks; Ulysses divides the four heads."""
    cp, tp = row.get("cp", 2), row.get("tensor", (1,))[0]
    divides = row.get("context_parallel") != "ulysses" or HEADS % (cp * tp) == 0
    return divides and cp * tp * row.get("dp", 1) <= 8


FEWER = {
    "cp": (2, 3),
    "context_parallel": ("ring", "ulysses"),
    "context_layout": ("zigzag", "striped", "contiguous"),
    "length": (7, 2),
    "tensor": ((1, "none"), (2, "keep")),
    "recompute": ("none", "selective"),
}
PAIRS = covering_rows(FEWER, fits)
QUICK = {(row["context_parallel"], row["context_layout"]): row for row in PAIRS}.values()
"""A row for each method and layout of positions, which have every value; the full run has all."""


@pytest.mark.parametrize("row", in_quick(PAIRS + covering_rows(CONTEXTS, fits), *QUICK), ids=name_of)
def test_context_parallel_ranks_draw_the_dropout_masks_of_the_whole_sequence(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    fields = dict(row)
    case, (tp, mode) = of_length(IN_CONTEXTS, fields.pop("length")), fields.pop("tensor")
    plan = Plan(**fields, tp=tp, sequence_parallel=mode, microbatches=2, precision="fp64")
    expected = by_hand(case, plan, TWO_CALLS)
    compare(thread_ranks.run(woven.train, case, plan, TWO_CALLS, ranks=plan.world), expected, torch.float64)


@pytest.mark.parametrize("settings", [{}, {"pp": 2}], ids=str)
def test_a_layer_in_two_places_draws_a_dropout_mask_for_each(
    thread_ranks: Any, settings: dict[str, Any]
) -> None:
    plan = Plan(**settings, microbatches=2, precision="fp64")
    expected = by_hand(TWICE, plan, TWO_CALLS)
    compare(thread_ranks.run(woven.train, TWICE, plan, TWO_CALLS, ranks=plan.world), expected, torch.float64)


def on_cut_batches(rows: Sequence[int], plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """One step on micro-batches of so many rows each, of which a data-parallel rank has its part."""
    engine = woven.weave(DROPPING, plan)
    ((inputs, targets),) = DROPPING.batches(sum(rows), 1, torch.float64)
    first = engine.mesh.index("dp") * plan.microbatches
    mine = slice(first, first + plan.microbatches)
    cut = (Microbatches(value.split(list(rows))[mine]) for value in (inputs, targets))
    return engine.forward_backward(*cut).item(), woven.gradients_of(engine)


def test_dropout_on_micro_batches_of_different_rows_equals_that_of_one_rank(thread_ranks: Any) -> None:
    rows = (1, 3, 2, 1)
    alone = Plan(microbatches=4, precision="fp64")
    ((loss, gradients),) = thread_ranks.run(on_cut_batches, rows, alone, ranks=1)
    plan = Plan(dp=2, microbatches=2, precision="fp64")
    for other, found in thread_ranks.run(on_cut_batches, rows, plan, ranks=2):
        assert_close(other, loss, 1e-12, "the loss")
        assert_equal(found, gradients, 1e-12, "the gradient")


def losses_of_passes() -> list[float]:
    plan = Plan(microbatches=2, precision="fp64")
    engine = woven.weave(DROPPING, plan)
    batch = woven.shares(DROPPING, engine, 1)[0]
    losses = [engine.forward_backward(*batch).item() for _ in range(2)]
    with pytest.raises(ModelError, match="does not run"):
        engine.forward_backward(batch[0].unsqueeze(-1), batch[1])
    assert engine.passes == 2
    losses.append(engine.evaluate(*batch).item())
    assert engine.passes == 2
    again = woven.weave(DROPPING, plan)
    again.passes = 1
    losses.append(again.forward_backward(*batch).item())
    return losses


def test_each_pass_draws_new_dropout_masks_that_can_be_repeated(thread_ranks: Any) -> None:
    ((first, second, evaluated, again),) = thread_ranks.run(losses_of_passes, ranks=1)
    assert len({first, second, evaluated}) == 3
    assert again == second


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, value: Tensor) -> Tensor:
        def run(given: Tensor) -> Tensor:
            result: Tensor = self.drop(self.linear(given))
            return result.sin()

        result: Tensor = torch.utils.checkpoint.checkpoint(run, value, use_reentrant=False)
        return result


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.drop(value.T).T
        return result


def engine_of(layer: nn.Module, microbatches: int = 1) -> Engine:
    model, plan = nn.Sequential(nn.Linear(4, 4), layer), Plan(microbatches=microbatches)
    return plait.parallelize(model, plan, plait.Mesh(), plait.cross_entropy)


def test_a_checkpoint_of_the_models_own_is_refused() -> None:
    with pytest.raises(ModelError, match=r"leave that to plan\.recompute"):
        engine_of(Checkpointed()).forward_backward(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))


def test_dropout_refuses_a_tensor_whose_dim_0_is_not_the_micro_batchs_rows() -> None:
    engine = engine_of(Transposed())
    with pytest.raises(ModelError) as caught:
        engine.forward_backward(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))
    assert str(caught.value) == (
        "the dropout 1.drop was given a tensor of shape [4, 3], but the micro-batch has 3 rows: "
        "give it one whose dim 0 is the rows, or a multiple of them."
    )
    assert engine.passes == 0


def test_the_model_given_keeps_its_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    plait.parallelize(model, Plan(), plait.Mesh(), plait.cross_entropy)
    assert type(model[1]) is nn.Dropout
