"""Which document each token of a router is of, and which are padding."""

from __future__ import annotations

import torch

from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.dropout_mask import DimPart
from plait.tensor.experts.token_documents import TokenDocuments, without_padding
from plait.tensor.running_sequence import ContextParallelism, running

IDS = torch.tensor([[4, 4, 7, -1, -1], [2, 2, 2, 2, 2], [-1, 3, 3, -5, 3]])
NUMBERS = [[0, 0, 1, 8, 8], [3, 3, 3, 3, 3], [8, 5, 5, 8, 7]]


def of_ids() -> TokenDocuments:
    sequence = ContextParallelism.of_one_rank().sequence(5, document_bounds(IDS))
    return TokenDocuments.of(torch.zeros(3, 5, dtype=torch.int64), sequence)


def test_documents_are_numbered_over_rows_and_padding_has_the_number_of_all() -> None:
    documents = of_ids()
    assert documents.count == 8
    assert documents.numbers(slice(0, 5), torch.device("cpu")).view(3, 5).tolist() == NUMBERS
    assert documents.sizes.tolist() == [2, 1, 0, 5, 0, 2, 0, 1]
    assert documents.counted == 11


def test_a_part_of_the_sequence_has_the_numbers_of_its_positions() -> None:
    found = of_ids().numbers(slice(1, 3), torch.device("cpu"))
    assert found.view(3, 2).tolist() == [row[1:3] for row in NUMBERS]


def test_without_ids_each_row_is_a_document() -> None:
    tokens = TokenDocuments.of(torch.zeros(2, 3, dtype=torch.int64), None)
    assert tokens.numbers(slice(0, 3), torch.device("cpu")).tolist() == [0, 0, 0, 1, 1, 1]
    assert (tokens.sizes.tolist(), tokens.counted) == ([3, 3], 6)


def test_inputs_of_features_have_a_token_a_row_or_a_position() -> None:
    assert TokenDocuments.of(torch.zeros(4, 6), None).counted == 4
    assert TokenDocuments.of((torch.zeros(4, 3, 6), torch.zeros(4)), None).counted == 12


def test_padding_has_no_experts_and_other_tokens_keep_theirs() -> None:
    indices = torch.arange(30).view(15, 2)
    assert without_padding(indices, None) is indices
    with running(of_ids().sequence):
        found = without_padding(indices, None)
        part = without_padding(indices[:6], lambda size: DimPart(3, 5))
    padding = torch.tensor(NUMBERS).flatten() == 8
    assert (found[padding] == -1).all()
    assert torch.equal(found[~padding], indices[~padding])
    assert (part == -1).all(1).tolist() == [True, True, False, False, True, False]
