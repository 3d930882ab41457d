from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.proof.position_proof import distinctive_sizes, resized


def sizes_for(length: int, module: nn.Module, *more: int) -> tuple[int, int, int]:
    return distinctive_sizes("head", module, torch.zeros(2, length, *more, device="meta"))


@pytest.mark.parametrize(
    ("length", "lengths"),
    [(1024, (1021, 1019)), (16, (13, 11)), (8, (7, 5)), (7, (7, 5)), (6, (5, 7)), (3, (5, 7)), (0, (5, 7))],
)
def test_distinctive_lengths_are_the_largest_primes_within_the_context(
    length: int, lengths: tuple[int, int]
) -> None:
    assert sizes_for(length, nn.Identity())[:2] == lengths


def test_no_size_of_a_layer_is_a_multiple_of_a_distinctive_length() -> None:
    layer = nn.Sequential(nn.Linear(26, 4), nn.Conv1d(3, 3, 22))
    assert sizes_for(16, layer)[:2] == (7, 5)
    assert sizes_for(16, layer, 14)[:2] == (5, 17)
    layer[0].extra = (3, 35)
    layer[0].table = torch.zeros(2, 17)
    assert sizes_for(16, layer, 14) == (19, 23, 29)


def test_the_distinctive_number_of_rows_differs_from_all_sizes() -> None:
    assert sizes_for(16, nn.Linear(3, 5)) == (13, 11, 7)


@pytest.mark.parametrize(
    "like", [(torch.zeros(2, 4), torch.zeros(2, 5)), torch.zeros(4)], ids=["two lengths", "no sequence"]
)
def test_tensors_without_one_sequence_are_refused(like: object) -> None:
    with pytest.raises(ModelError, match=r"layer 'head' is given tensors of shapes \[.* cuts dim 1"):
        distinctive_sizes("head", nn.Identity(), like)


def test_inputs_are_resized_to_distinctive_rows_and_length() -> None:
    like: dict[str, object] = {
        "x": torch.zeros(4, 8, 3),
        "shared": (torch.zeros(1, 8, dtype=torch.int64), torch.zeros(4), torch.zeros(())),
        "name": "kept",
    }
    given = resized(like, rows=3, length=7)
    shapes = [tuple(given["x"].shape), *(tuple(one.shape) for one in given["shared"])]
    assert shapes == [(3, 7, 3), (1, 7), (3,), ()]
    first: Tensor = given["shared"][0]
    assert first.is_meta
    assert first.dtype is torch.int64
    assert given["name"] == "kept"
