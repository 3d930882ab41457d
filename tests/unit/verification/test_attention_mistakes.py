"""What a layer with attention would give after common mistakes, recorded as sums and recognised by them."""

from __future__ import annotations

import torch
from torch import Tensor

import plait
from plait.verification.definitions.attention_and_dropout import Definitions, positions_in
from plait.verification.reference.differences_within_layers import unequal_weights
from plait.verification.reference.values_after_mistakes import (
    MISTAKEN,
    fitting_mistakes,
    other_documents,
    sums_after_mistakes,
)
from plait.verification.step_location import RecordKey, RecordScope

LENGTH, LAYER = 6, 3
X = torch.randn(2, 1, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[7, 7, 7, 2, 2, 7], [1, 2, 2, 2, 2, 2]])
OTHER = torch.tensor([[1, 1, 2, 2, 3, 3], [5, 5, 5, 5, 6, 6]])


def attended(x: Tensor, window: int | None = None, mask: Tensor | None = None) -> Tensor:
    """Attention as PyTorch computes it, with a mask of all pairs."""
    here, there = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = (here >= there) & (here - there < (window or LENGTH))
    if mask is not None:
        documents = torch.cat([torch.zeros(2, 1), (mask[:, 1:] != mask[:, :-1]).cumsum(1)], 1)
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen)


def of_sums(output: Tensor) -> Tensor:
    return (output * unequal_weights(4, X.device)).sum(-1, keepdim=True)


def test_windows_that_are_off_by_one_are_recognised() -> None:
    book = Definitions()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return plait.attention(x, x, x, True, 3), x

    with book.running(None):
        run(X)
        records = sums_after_mistakes(book, run, X, LAYER, {"micro-batch 0": OTHER})
        assert not sums_after_mistakes(book, lambda x: run(x)[0][0, 0], X, LAYER, {}), "no sequence of rows"
        assert not sums_after_mistakes(book, lambda x: run(x)[0] > 0, X, LAYER, {}), "no numbers"
    names = [f"it is what the layer gives with a window of {other} instead of 3" for other in (4, 2)]
    assert list(records) == [RecordKey(MISTAKEN, LAYER, name) for name in names]
    for sums, window in zip(records.values(), (4, 2), strict=True):
        torch.testing.assert_close(sums, of_sums(attended(X, window)), rtol=0, atol=1e-13)


def test_another_ranks_document_ids_in_mask_or_positions_are_recognised() -> None:
    book = Definitions()

    def run(x: Tensor) -> Tensor:
        return plait.attention(x, x, x) + plait.positions(x[:, 0])[:, None, :, None]

    def placed(ids: Tensor) -> Tensor:
        return positions_in(ids)[:, None, :, None]

    others = {"micro-batch 0": OTHER, "itself": IDS.clone(), "a shorter one": OTHER[:, 1:]}
    with book.running(IDS):
        records = sums_after_mistakes(book, run, X, LAYER, others)
    expected = {}
    for name, ids in (("the documents of micro-batch 0", OTHER), ("each row as one document", IDS * 0)):
        expected |= {
            f"it is what the layer gives for {name}": attended(X, None, ids) + placed(ids),
            f"its attention mask is that for {name}": attended(X, None, ids) + placed(IDS),
            f"its positions (rotary angles) are those for {name}": attended(X, None, IDS) + placed(ids),
        }
    assert [key.name for key in records] == list(expected)
    for sums, output in zip(records.values(), expected.values(), strict=True):
        torch.testing.assert_close(sums, of_sums(output), rtol=0, atol=1e-13)


def test_document_ids_of_another_micro_batch_are_recognised() -> None:
    ids = {
        RecordScope(step, number, evaluated): torch.tensor([step, number])
        for step, number, evaluated in (
            (0, 0, False),
            (0, 1, False),
            (0, 0, True),
            (1, 0, False),
            (1, 1, False),
        )
    }
    found = other_documents(ids, RecordScope(1, 1))
    assert {name: one.tolist() for name, one in found.items()} == {
        "micro-batch 0": [1, 0],
        "micro-batch 0 of the step before": [0, 0],
        "micro-batch 1 of the step before": [0, 1],
    }
    assert other_documents(ids, RecordScope(0, 0)) == {}


def test_a_mistake_is_recognised_where_all_sums_are_equal_up_to_rounding() -> None:
    expected = of_sums(X)
    sums = [("right", expected), ("of another shape", expected[:1]), ("off in one", expected.clone())]
    sums[2][1][1, 0, 2] += 1e-3
    assert [name for name, _ in fitting_mistakes(X, 1e-9, sums)] == ["right"]
    assert [name for name, _ in fitting_mistakes(X, 1e-3 / (1.5 * 4) * 1.001, sums)] == [
        "right",
        "off in one",
    ]
    assert [name for name, _ in fitting_mistakes(X, 1e-3 / (1.5 * 4) * 0.999, sums)] == ["right"]
    assert all(value is X for _, value in fitting_mistakes(X, 1e-9, sums))
    for actual in (X[0, 0], X.long()):
        assert not list(fitting_mistakes(actual, 1e9, [("any", of_sums(actual.double()))]))
