from __future__ import annotations

import pytest
import torch

from plait.tensor import dropout_mask
from plait.tensor.cuda_graph_dropout_keys import MaskCall, MaskNotes, MaskTable
from plait.tensor.dropout import key_of
from plait.tensor.dropout_mask import DimPart, MaskKey, keep_mask

CPU = torch.device("cpu")
CALL = MaskCall("layer.drop", 0, 1)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((4, 5), {}),
        ((4, 5, 6), {1: DimPart(5, 15)}),
        ((4, 3, 7), {-1: DimPart(7, 21), 1: DimPart(1, 9, 2)}),
        ((40, 50, 60), {}),  # more than one block
    ],
)
@pytest.mark.parametrize("first_row", [0, 3])
def test_a_mask_with_its_key_in_the_table_is_that_of_the_key(
    shape: tuple[int, ...], parts: dict[int, DimPart], first_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dropout_mask.BLOCK, "cpu", 4096)
    notes = MaskNotes()
    given = {**parts, 0: DimPart(0, 0)}
    assert notes.key_and_parts(1, CALL, given, shape) == (1, given)
    table = MaskTable(notes.elements, CPU)
    for step in range(2):
        key, rows = key_of(7, step, CALL.path, 0), {**parts, 0: DimPart(first_row, 0)}
        table.fill([key], first_row)
        placed, where = table.key_and_parts(key, CALL, rows, shape)
        assert isinstance(placed, MaskKey)
        assert where[0].start == 0
        expected = keep_mask(key, shape, 0.3, rows, CPU)
        assert torch.equal(keep_mask(placed, shape, 0.3, where, CPU), expected)


def test_a_table_says_whether_it_has_the_keys_of_a_step() -> None:
    table = MaskTable({CALL: 6, MaskCall("other", 0, 1): 2}, CPU)
    table.fill([3, -4], first_row=2)
    assert table.holds([3, -4], first_row=2)
    assert not table.holds([3, -4], first_row=1)
    assert not table.holds([3, 4], first_row=2)


def test_a_call_that_was_not_noted_has_no_row() -> None:
    table = MaskTable({CALL: 6}, CPU)
    with pytest.raises(KeyError):
        table.key_and_parts(1, MaskCall("layer.drop", 1, 1), {0: DimPart(0, 0)}, (2, 6))
