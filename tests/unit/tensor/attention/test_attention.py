"""`plait.attention` on one rank: tensors that do not fit are refused, where blocks would leave them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.errors import ModelError
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.running_sequence import ContextParallelism, running

SHAPE = (4, 2, 6, 8)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1]] * 4)


@pytest.mark.parametrize(
    ("query", "key", "value", "ids", "message"),
    [
        (SHAPE, SHAPE, SHAPE, IDS[:2], "document ids of 2 rows"),
        (SHAPE, SHAPE, SHAPE, IDS[0], "whole numbers"),
        (SHAPE, SHAPE, SHAPE, IDS.float(), "whole numbers"),
        (SHAPE, SHAPE, SHAPE, IDS.to("meta"), "have no values on the meta device"),
        ((4, 2, 9, 8), SHAPE, SHAPE, IDS, "a query"),
        ((2, 2, 6, 8), SHAPE, SHAPE, IDS, "a query"),
        (SHAPE, SHAPE, (4, 2, 7, 8), IDS, "the same rows, heads and positions"),
        ((4, 3, 6, 8), SHAPE, SHAPE, IDS, "give a multiple"),
    ],
)
def test_attention_refuses_tensors_and_document_ids_that_do_not_fit(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], ids: torch.Tensor, message: str
) -> None:
    tensors = [torch.zeros(shape) for shape in (query, key, value)]
    with pytest.raises(ModelError, match=message):
        plait.attention(*tensors, documents=ids)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(2, 1), 0.0])
def test_sinks_are_a_score_of_each_head(sinks: Any) -> None:
    with pytest.raises(ModelError, match="for 2 query heads: give a tensor"):
        plait.attention(*[torch.zeros(SHAPE)] * 3, sinks=sinks)


def test_attention_on_meta_refuses_document_ids_that_are_not_in_the_batch() -> None:
    """A tensor that a layer refers to, but does not keep, is not on meta: its rows and length do not fit."""
    tensors = [torch.zeros(SHAPE, device="meta")] * 3
    with pytest.raises(ModelError, match="give document_ids in the batch of the engine"):
        plait.attention(*tensors, documents=IDS)


def test_documents_in_a_running_sequence_are_of_its_length_and_take_the_place_of_its_own() -> None:
    tensors = list(torch.randn(3, *SHAPE))
    whole, first = plait.attention(*tensors), plait.attention(*tensors, documents=IDS)
    other = plait.attention(*tensors, documents=IDS[:, [0, 0, 0, 0, 3, 3]])
    assert not torch.allclose(first, other)
    with running(ContextParallelism.of_one_rank().sequence(6, document_bounds(IDS))):
        for ids, expected in (
            (IDS, first),
            (IDS[:, [0, 0, 0, 0, 3, 3]], other),
            (torch.zeros_like(IDS), whole),
        ):
            torch.testing.assert_close(plait.attention(*tensors, documents=ids), expected)
        with pytest.raises(
            ModelError, match=r"documents \[4, 5\], where sequences have 6 positions: give ids"
        ):
            plait.attention(*tensors, documents=IDS[:, :5])


class ScaledDropout(nn.Dropout1d):
    """A dropout of somebody else."""


@pytest.mark.parametrize("options", [{"documents": IDS}, {"softcap": 5.0}], ids=["documents", "softcap"])
def test_a_dropout_whose_mask_is_not_known_is_refused_where_attention_is_in_blocks(options: Any) -> None:
    tensors = [torch.ones(SHAPE)] * 3
    with pytest.raises(ModelError, match=r"the dropout ScaledDropout, whose mask is not known by position"):
        plait.attention(*tensors, dropout=ScaledDropout(0.5), **options)
    assert plait.attention(*tensors, dropout=ScaledDropout(0.5).eval(), **options).isfinite().all()


def test_attention_refuses_arguments_of_wrong_types_by_name() -> None:
    for name, wrong, told in (
        ("dropout", nn.Identity(), "give a module with a probability p"),
        ("query", 3, "a query an object of int: give a tensor"),
        ("value", torch.ones(4, 6, 8), r"a value \[4, 6, 8\]: give a tensor \[rows, heads, length, size\]"),
        ("causal", 1, "causal = 1: give True or False"),
        ("window", 2.0, r"window = 2\.0: give a number, or None"),
        ("window", True, "window = True: give a number, or None"),
        ("scale", "1", "scale = '1': give a number, or None"),
        ("softcap", 0.0, "softcap = 0: give a bound above 0, or None"),
        ("documents", [0], "documents, an object of list: give a tensor of ids"),
        ("documents", IDS[:, :5], "keys .* of 6 positions, where this rank has 5"),
    ):
        given: dict[str, Any] = dict.fromkeys(("query", "key", "value"), torch.ones(SHAPE))
        with pytest.raises(ModelError, match=told):
            plait.attention(**{**given, name: wrong})
