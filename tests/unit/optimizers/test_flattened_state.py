"""Lists of tensors in optimizer state become keys of their own, and lists again."""

from __future__ import annotations

import torch

from plait.optimizers.flattened_state import flat_state, nested_state


def test_lists_of_tensors_become_keys_and_lists_again() -> None:
    first, second, third = torch.ones(2), torch.zeros(()), torch.arange(3)
    state = {"step": 3, "mean": first, "products": [second, [], [third]], "Q": None, "names": ["a", "b"]}
    flat = flat_state(state)
    assert flat == {
        "step": 3,
        "mean": first,
        "products": ["products:0", [], ["products:2:0"]],
        "products:0": second,
        "products:2:0": third,
        "Q": None,
        "names": ["a", "b"],
    }
    assert nested_state(flat) == state


def test_state_without_lists_stays_as_it_is() -> None:
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "text": "exp_avg"}
    assert flat_state(state) == state
    assert nested_state(state) == state
