"""A validation has each row once, on every plan: its loss and metrics are those of all rows in one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import plait
from parity.pairs import covering_rows
from parity.reference import materialise
from plait.loop import History
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor import mean_loss

VOCAB, LENGTH = 11, 8
PLANS = {
    "micro-batches": Plan(microbatches=4),
    "stages": Plan(pp=2, microbatches=3, schedule="zb-h1"),
    "shards": Plan(dp=4, microbatches=2, strategy="full", offload="parameters"),
    "tensors": Plan(dp=2, tp=2, microbatches=2, sequence_parallel="keep"),
    "contexts": Plan(dp=2, cp=2, microbatches=2, strategy="optimizer"),
    "chunks": Plan(dp=3, microbatches=2, loss_rows=3, strategy="gradients"),
    "everything": Plan(pp=2, dp=2, cp=2, microbatches=2, schedule="interleaved", recompute="full"),
}


def summed(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


class Summed:
    """The sum over a batch, of no mean."""

    sums = True

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return summed(output, targets)

    def weight(self, targets: Tensor) -> Tensor:
        return (targets != -100).sum()


def squares(output: Tensor, targets: Tensor) -> Tensor:
    """Of no targets that are ignored: each row counts."""
    return (output.sum(-1) - targets).square().mean()


LOSSES: dict[str, Any] = {
    "cross-entropy": plait.cross_entropy,
    "sum": Summed(),
    "mean": mean_loss(squares, "targets"),
}


def rows_of(count: int, kind: str) -> tuple[Any, Tensor]:
    """Inputs and targets, of which some are ignored; all of the last two rows, if there are others."""
    draw = torch.Generator().manual_seed(count)
    tokens = torch.randint(VOCAB, (count, LENGTH + 1), generator=draw)
    targets = tokens[:, 1:].masked_fill(torch.rand(count, LENGTH, generator=draw) < 0.3, -100)
    targets[max(1, count - 2) :] = -100
    documents = (torch.arange(LENGTH) >= torch.randint(1, LENGTH, (count, 1), generator=draw)).long()
    inputs = tokens[:, :-1]
    return ({"tokens": inputs, "document_ids": documents} if kind == "documents" else inputs), targets


class Rows:
    """Batches of these rows; the ranks never ask for rows that there are not."""

    def __init__(self, count: int, kind: str, size: int) -> None:
        self.rows, self.size = count, size
        self._inputs, self._targets = rows_of(count, kind)

    def batch(self, step: int, rows: slice) -> tuple[Any, Tensor]:
        first = step * self.size
        assert rows.stop - rows.start >= 1
        assert first + rows.stop <= self.rows
        chosen = slice(first + rows.start, first + rows.stop)
        inputs = self._inputs
        cut = (
            {key: one[chosen] for key, one in inputs.items()} if isinstance(inputs, dict) else inputs[chosen]
        )
        return cut, self._targets[chosen]


def model() -> nn.Module:
    return plait.models.gpt2(layers=1, hidden=16, heads=4, vocab=VOCAB, context=LENGTH)


def surprise(output: Tensor, targets: Tensor) -> Tensor:
    """The metric: of each token that counts its own loss."""
    each = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
    return each[targets.flatten() != -100]


def validated(plan: Plan, rows: int, size: int, loss: str, kind: str) -> tuple[float, float]:
    training = plait.Loader(TensorDataset(*rows_of(24, "tokens")), batch=24)
    history = History()
    found = plait.fit(
        model(),
        plan,
        training,
        steps=1,
        loss=LOSSES[loss],
        optimizer=torch.optim.SGD,
        learning_rate=0.0,
        validation=Rows(rows, kind, size),
        metrics={"surprise": surprise},
        callbacks=[history],
    )
    assert found.validation_loss is not None
    return found.validation_loss, history.rows[-1]["validation_surprise"]


def expected(rows: int, loss: str, kind: str) -> tuple[float, float]:
    """All rows in one batch; of packed documents on one rank of plait, else by plain PyTorch."""
    inputs, targets = rows_of(rows, kind)
    if kind == "documents":
        plan = Plan(precision="fp64")
        engine = plait.parallelize(model(), plan, plait.Mesh(plan), LOSSES[loss])
        return engine.evaluate(inputs, targets).item(), surprise(
            engine.output(inputs), targets
        ).double().mean().item()
    with torch.no_grad():
        output = materialise(model(), torch.float64, seed=0)(inputs)
    means = {
        "cross-entropy": functional.cross_entropy(output.flatten(0, 1), targets.flatten()),
        "sum": summed(output, targets),
        "mean": squares(output, targets),
    }
    return means[loss].item(), surprise(output, targets).double().mean().item()


FACTORS: dict[str, list[Any]] = {
    "plan": list(PLANS),
    "rows": [1, 3, 10],
    "size": [4, 7, 16],
    "loss": list(LOSSES),
    "kind": ["tokens", "documents"],
}


FEWER_ROWS_THAN_RANKS = {"plan": "shards", "rows": 10, "size": 4}
"""In the last batch."""


def can_run(row: dict[str, Any]) -> bool:
    return not (row.get("plan") == "chunks" and row.get("loss", "cross-entropy") != "cross-entropy")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "row",
    covering_rows(FACTORS, can_run, [FEWER_ROWS_THAN_RANKS]),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_each_validation_row_counts_once(thread_ranks: RankPool, row: dict[str, Any]) -> None:
    plan = PLANS[row["plan"]]
    plan = Plan(**{**vars(plan), "precision": "fp64"})
    wanted = expected(row["rows"], row["loss"], row["kind"])
    for found in thread_ranks.run(
        validated, plan, row["rows"], row["size"], row["loss"], row["kind"], ranks=plan.world
    ):
        assert found == pytest.approx(wanted, rel=1e-12, abs=0)
