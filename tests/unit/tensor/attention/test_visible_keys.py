"""The interval of keys that a query sees equals the mask, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import visible
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ModelError
from plait.tensor.attention.visible_keys import document_bounds, needed_keys, visible_indices, visible_range


def test_document_bounds_give_the_start_and_stop_of_each_document() -> None:
    bounds = document_bounds(torch.tensor([[7, 7, 7, 2, 7, 7], [1, 2, 3, 3, 3, 3]]))
    assert bounds.starts == ((0, 3, 4), (0, 1, 2))
    starts, stops = bounds.by_position().tolist()
    assert starts == [[0, 0, 0, 3, 4, 4], [0, 1, 2, 2, 2, 2]]
    assert stops == [[3, 3, 3, 4, 6, 6], [1, 2, 6, 6, 6, 6]]
    assert bounds.are_packed
    assert bounds.longest == 4
    assert bounds == document_bounds(torch.tensor([[0, 0, 0, 1, 2, 2], [3, 4, 5, 5, 5, 5]]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 1)])
def test_document_bounds_of_no_rows_or_one_token_are_not_packed(shape: tuple[int, int]) -> None:
    bounds = document_bounds(torch.zeros(shape, dtype=torch.int32))
    assert bounds.by_position().shape == (2, *shape)
    assert bounds.by_position()[1].all()
    assert not bounds.by_position()[0].any()
    assert not bounds.are_packed
    assert bounds.longest == (0 if 0 in shape else 1)


@given(
    ids=st.integers(0, 12).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 2), min_size=length, max_size=length), min_size=1, max_size=3
        )
    ),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_visible_ranges_of_keys_equal_the_mask(
    ids: list[list[int]], causal: bool, window: int | None, packed: bool, seed: int
) -> None:
    documents = torch.tensor(ids, dtype=torch.int64)
    length = documents.shape[1]
    bounds = document_bounds(documents) if packed else None
    torch.manual_seed(seed)
    queries, keys = ((torch.rand(length) < 0.6).nonzero().squeeze(1) for _ in range(2))
    found = visible_range(queries.numpy(), length, causal=causal, window=window, documents=bounds)
    lo, hi = (torch.from_numpy(one) for one in found)
    expected = visible(queries, keys, causal=causal, window=window, ids=documents if packed else None)
    assert lo.shape == hi.shape == expected.shape[:2]
    assert torch.equal((lo[..., None] <= keys) & (keys < hi[..., None]), expected)
    needed = needed_keys(*visible_indices(*found, keys.numpy()), len(keys))
    assert needed.tolist() == expected.any(0).any(0).tolist()


def test_only_keys_within_a_window_are_needed() -> None:
    seen = visible_range(np.arange(10, 12), 20, causal=True, window=4)
    needed = needed_keys(*visible_indices(*seen, np.arange(1, 20, 2)), 10)
    assert np.flatnonzero(needed).tolist() == [3, 4, 5]  # positions 7, 9, 11


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_tokens_is_refused(window: int) -> None:
    with pytest.raises(ModelError, match=f"a window of {window} tokens: give at least 1"):
        visible_range(np.arange(3), 3, causal=True, window=window)
