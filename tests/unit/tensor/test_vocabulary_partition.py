from __future__ import annotations

import pytest
import torch

from plait.errors import ModelError
from plait.ranks import Group, Traffic
from plait.tensor.parallel.partition import Vocabulary


def vocabulary(classes: int, ranks: int, index: int) -> Vocabulary:
    return Vocabulary(classes, Group("tp", tuple(range(ranks)), index, None, Traffic(), 1.0))


def test_each_rank_has_its_classes_and_knows_the_others_sizes() -> None:
    parts = [vocabulary(10, 4, index) for index in range(4)]
    assert [part.own for part in parts] == [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    assert {part.sizes for part in parts} == {(3, 3, 2, 2)}
    assert len(vocabulary(2, 3, 2).own) == 0


def test_logits_of_this_ranks_classes_are_accepted_unchanged() -> None:
    logits = torch.zeros(2, 5, 3)
    assert vocabulary(10, 4, 1).require_vocabulary_shard(logits) is logits


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (torch.zeros(2, 10), r"of shape \[2, 10\]"),
        (torch.zeros(()), r"of shape \[\]"),
        ((torch.zeros(2, 3),), "tuple"),
    ],
)
def test_logits_of_another_size_than_this_ranks_classes_are_refused(output: object, told: str) -> None:
    with pytest.raises(ModelError, match=rf"on rank 1 is {told}.*over tp.*\[\.\.\., 3\].*10 classes"):
        vocabulary(10, 4, 1).require_vocabulary_shard(output)
