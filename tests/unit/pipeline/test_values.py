from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from plait.errors import DataError, PlanError
from plait.pipeline.values import leaf_of, map_tensors, signature, split, tensors_of

Pair = namedtuple("Pair", "left right")
ONE, TWO, THREE = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
NESTED = {"b": (ONE, "text", [TWO]), "a": Pair(THREE, None)}


def test_tensors_come_in_one_order() -> None:
    assert [tensor.item() for tensor in tensors_of(NESTED)] == [1.0, 2.0, 3.0]
    assert list(tensors_of("text")) == []


def test_mapping_keeps_structure_and_everything_else() -> None:
    doubled = map_tensors(lambda tensor: 2 * tensor, NESTED)
    assert repr(doubled) == repr({"b": (2 * ONE, "text", [2 * TWO]), "a": Pair(2 * THREE, None)})
    assert isinstance(doubled["a"], Pair)
    assert NESTED["b"][0].item() == 1.0  # type: ignore[index,union-attr]


def test_split_gives_views() -> None:
    whole = {"x": torch.arange(12).view(6, 2), "y": (torch.arange(6), "kept")}
    parts = split(whole, 3, "inputs")
    assert len(parts) == 3
    assert parts[1]["x"].tolist() == [[4, 5], [6, 7]]
    assert parts[1]["y"][0].tolist() == [2, 3]
    assert parts[1]["y"][1] == "kept"
    assert parts[0]["x"].untyped_storage().data_ptr() == whole["x"].untyped_storage().data_ptr()


@pytest.mark.parametrize("rows", [5, 0, 1])
def test_split_refuses_rows_that_do_not_divide(rows: int) -> None:
    message = f"the targets have {rows} rows, which do not divide into 2 micro-batches"
    with pytest.raises(PlanError, match=message):
        split(torch.zeros(rows, 3), 2, "targets")


def test_split_refuses_scalars() -> None:
    with pytest.raises(PlanError, match="the inputs have 0 rows"):
        split(torch.tensor(1.0), 1, "inputs")


@pytest.mark.parametrize(
    "value", [(torch.zeros(2), torch.zeros(4)), [], "text", (torch.zeros(2), torch.tensor(0))]
)
def test_split_refuses_tensors_that_disagree(value: object) -> None:
    with pytest.raises(DataError, match="give tensors that share their dim 0, the batch"):
        split(value, 2, "inputs")


def test_a_leaf_shares_memory_and_no_graph() -> None:
    source = torch.ones(2, requires_grad=True)
    grown = source * 2
    leaf = leaf_of(grown, True)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.data_ptr() == grown.data_ptr()
    assert not leaf_of(grown, False).requires_grad


def test_signature_tells_shapes_dtypes_and_structure() -> None:
    values = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.float64),
        (torch.zeros(2, 3),),
        {"x": torch.zeros(2, 3)},
        {"y": torch.zeros(2, 3)},
        (torch.zeros(2, 3), 1),
        (torch.zeros(2, 3), 2),
    ]
    assert len({signature(value) for value in values}) == len(values)
    assert signature(torch.ones(2, 3)) == signature(values[0])
