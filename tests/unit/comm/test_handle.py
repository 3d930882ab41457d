"""What the host does to start an operation."""

from __future__ import annotations

import sys
from types import FrameType
from unittest.mock import Mock

import torch

from plait.comm import Group, Traffic, all_reduce


def group_of(ranks: int) -> Group:
    """A group of `ranks` ranks whose operations do nothing."""
    return Group("dp", tuple(range(ranks)), 1, Mock(shares=lambda tensor: False), Traffic(), 1.0)


def calls_to_start(ranks: int) -> int:
    """Calls of Python functions, generators' turns included, that start the second operation of a group."""
    group, calls = group_of(ranks), 0
    all_reduce(torch.zeros(2), group, checked=False)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        all_reduce(torch.zeros(2), group, checked=False)
    finally:
        sys.setprofile(None)
    return calls


def test_a_start_does_not_take_longer_in_a_larger_group() -> None:
    assert calls_to_start(2) == calls_to_start(512)


def test_a_group_says_who_the_others_are() -> None:
    group = group_of(3)
    assert group.others == (0, 2)
    assert group.with_others == "dp with 0, 2"
