"""Dropout of attention weights, against the mask of all weights at once; on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.pairs import in_turns
from plait.tensor.dropout import Dropout, DropoutGenerator, key_of, names_of, set_region_part
from plait.tensor.dropout_mask import keep_mask

ROWS, HEADS, KEY_HEADS, LENGTH, SIZE, P = 3, 4, 2, 300, 6, 0.4
IDS = torch.stack([torch.arange(LENGTH) // documents for documents in (7, 150, LENGTH)])
SMALLEST = 5e-324
"""A probability above 0 by which nothing is dropped."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    query = drawn(ROWS, HEADS, LENGTH, SIZE, seed=1)
    key, value = drawn(2, ROWS, KEY_HEADS, LENGTH, SIZE, seed=2)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def by_hand(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, factors: Tensor) -> Tensor:
    """The softmax of all scores, times `factors`."""
    key, value = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (key, value))
    scores = (query @ key.mT / math.sqrt(SIZE)).masked_fill(hidden, -math.inf)
    result: Tensor = (scores.softmax(-1) * factors) @ value
    return result


def hidden_pairs(causal: bool, window: int | None, documents: Tensor | None) -> Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = ((distance < 0) & causal | (distance.abs() >= (window or LENGTH)))[None, None]
    return hidden if documents is None else hidden | (documents[:, :, None] != documents[:, None])[:, None]


def with_gradients(call: Any) -> list[Tensor]:
    given = tensors()
    output = call(*given)
    return [output, *torch.autograd.grad(output, given, drawn(ROWS, HEADS, LENGTH, SIZE, seed=3))]


def generated(dropout: Dropout, row: int = 0) -> DropoutGenerator:
    generator = DropoutGenerator(seed=7, step=5, rows=[range(row, row + ROWS)])
    generator.attach_to([dropout])
    return generator


@pytest.mark.parametrize(
    ("causal", "window", "documents"),
    [(True, None, None), (True, 40, None), (True, None, IDS), (False, 9, IDS)],
    ids=["causal", "window", "documents", "both sides"],
)
def test_a_blocks_weight_dropout_mask_is_its_part_of_the_mask_of_all_weights(
    causal: bool, window: int | None, documents: Tensor | None
) -> None:
    """Rows 5, 6, 7 of the batch; of the heads the second half."""
    dropout = Dropout(P)
    set_region_part(dropout, 1, 1, 2)
    generator = generated(dropout, row=5)

    def run(*given: Tensor) -> Tensor:
        with generator.running(0, "a.drop", names_of(dropout)):
            return plait.attention(*given, causal, window, documents, dropout=dropout)

    key, shape = key_of(7, 5, "a.drop", 0), (5 + ROWS, 2 * HEADS, LENGTH, LENGTH)
    keep = keep_mask(key, shape, P, {}, torch.device("cpu"))[5:, HEADS:]
    hidden = hidden_pairs(causal, window, documents)
    expected = with_gradients(lambda *given: by_hand(*given, hidden, keep.double() / (1 - P)))
    for one, other in zip(with_gradients(run), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "window"), in_turns({"torch": nn.Dropout, "plait": Dropout}, {"none": None, "40": 40})
)
def test_weight_dropout_in_plain_pytorch_drops_all_at_p_1_and_none_in_eval(
    kind: Any, window: int | None
) -> None:
    plain = plait.attention(*tensors(), window=window)
    dropped = plait.attention(*tensors(), window=window, dropout=kind(SMALLEST))
    torch.testing.assert_close(dropped, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(plait.attention(*tensors(), window=window, dropout=kind(0.5).eval()), plain)
    assert not plait.attention(*tensors(), window=window, dropout=kind(1.0)).any()
    first, second = (plait.attention(*tensors(), window=window, dropout=kind(0.5)) for _ in range(2))
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, plain)
