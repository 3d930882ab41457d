from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from plait.errors import DataError, PlanError
from plait.tensor.microbatches import Microbatches, row_count, split, split_both
from plait.tensor.nested_values import (
    Value,
    leaf_of,
    map_tensors,
    signature,
    signatures,
    tensors_of,
    with_tensors,
)

Pair = namedtuple("Pair", "left right")
ONE, TWO, THREE = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
NESTED = {"b": (ONE, "text", [TWO]), "a": Pair(THREE, None)}


def test_tensors_of_nested_values_come_in_a_fixed_order() -> None:
    assert [tensor.item() for tensor in tensors_of(NESTED)] == [1.0, 2.0, 3.0]
    assert list(tensors_of("text")) == []


def test_mapping_tensors_keeps_the_structure_and_other_values() -> None:
    doubled = map_tensors(lambda tensor: 2 * tensor, NESTED)
    assert repr(doubled) == repr({"b": (2 * ONE, "text", [2 * TWO]), "a": Pair(2 * THREE, None)})
    assert isinstance(doubled["a"], Pair)
    assert NESTED["b"][0].item() == 1.0  # type: ignore[index,union-attr]


def test_splitting_a_batch_into_micro_batches_gives_views() -> None:
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


def test_splitting_a_scalar_is_refused() -> None:
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


def test_micro_batches_are_a_tuple_whatever_they_are_given_in() -> None:
    values = ONE, {"x": TWO}
    assert Microbatches(list(values)).values == values
    assert Microbatches(iter(values)).values == values


@pytest.mark.parametrize("given", [torch.zeros(4, 2), {"x": ONE}])
def test_one_value_is_not_taken_for_micro_batches(given: object) -> None:
    with pytest.raises(DataError, match="give a list, one per micro-batch"):
        Microbatches(given)


def double(value: Value) -> Value:
    return map_tensors(lambda tensor: tensor * 2, value)


def same(value: Value) -> Value:
    return value


def test_given_microbatches_are_not_split_again() -> None:
    given = Microbatches([{"x": ONE, "name": "kept"}, TWO, ()])
    inputs, targets = split_both(given, Microbatches([TWO, ONE, THREE]), 3, (double, same))
    assert inputs == [{"x": 2 * ONE, "name": "kept"}, 2 * TWO, ()]
    assert targets == [TWO, ONE, THREE]


def test_a_whole_batch_is_split_into_micro_batches() -> None:
    inputs, targets = split_both(torch.arange(4), {"x": torch.arange(2)}, 2, (double, same))
    assert [one.tolist() for one in inputs] == [[0, 2], [4, 6]]
    assert [one["x"].tolist() for one in targets] == [[0], [1]]


@pytest.mark.parametrize("given", [1, 3])
def test_another_number_of_micro_batches_than_the_plans_is_refused(given: int) -> None:
    some, right = Microbatches([ONE] * given), Microbatches([ONE] * 2)
    for inputs, targets, what in ((some, right, "inputs"), (right, some, "targets")):
        with pytest.raises(PlanError, match=f"the {what} are {given} micro-batches, but the plan runs 2"):
            split_both(inputs, targets, 2, (same, same))


def test_microbatches_beside_a_whole_batch_are_refused() -> None:
    given = Microbatches([ONE, ONE])
    for inputs, targets, what in ((given, torch.zeros(2), "targets"), (torch.zeros(2), given, "inputs")):
        with pytest.raises(DataError, match=f"the {what} are not Microbatches, but the others are"):
            split_both(inputs, targets, 2, (same, same))


def test_splitting_microbatches_again_is_refused() -> None:
    with pytest.raises(DataError, match=r"the inputs are Microbatches, which only"):
        split(Microbatches([ONE, ONE]), 2, "inputs")


def test_tensors_of_nested_values_are_replaced_in_order() -> None:
    filled = with_tensors(NESTED, [None, 5, ONE])
    assert filled == {"b": (None, "text", [5]), "a": Pair(ONE, None)}


def test_signatures_of_different_micro_batches_are_shortened_to_a_digest() -> None:
    long, short = torch.zeros(1, 7), torch.zeros(1, 3)
    assert signatures([long, long]) == signature(long)
    one, other = signatures([long, short, long]), signatures([long, long, short])
    assert one.startswith("2 shapes ")
    assert one.endswith(f"({signature(long)}, {signature(short)}, {signature(long)})")
    assert one[:20] != other[:20], "what is cut off in a message still tells them apart"


@pytest.mark.parametrize("value", [torch.ones(2, 0), {"tokens": torch.ones(2, 0), "mask": torch.ones(2, 0)}])
def test_rows_without_an_element_are_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"the inputs have 2 rows without an element, of shape \[2, 0\]"):
        split(value, 2, "inputs")
    assert row_count({"tokens": torch.ones(2, 3), "none": torch.ones(2, 0)}, "inputs") == 2
