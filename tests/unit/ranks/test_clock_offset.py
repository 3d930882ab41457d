"""Clocks of ranks, compared by messages: as between hosts, with clocks that go apart."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from plait.ranks.clock_offset import PINGS, ClockOffset, clock_offset
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh

APART = 5_000_000_000
"""By how many nanoseconds each rank's clock goes ahead of the one before."""


def over_messages(group: Any) -> Group:
    """A group that knows of no common host."""
    return replace(group, transport=group.transport.over_torch())


def test_the_clock_offset_is_found_within_its_uncertainty(rank_pool: Any) -> None:
    def body() -> tuple[ClockOffset, int]:
        mesh = Mesh(pp=3)
        ahead = APART * mesh.index("pp")
        group = over_messages(mesh.group("pp"))
        offset = clock_offset(group, mesh.device, lambda: time.perf_counter_ns() + ahead)
        return offset, mesh.traffic.snapshot()["pp"]["send"].calls

    first, *others = rank_pool.run(body, ranks=3)
    assert first == (ClockOffset(0, 0), 2 * PINGS)
    for rank, (offset, calls) in enumerate(others, start=1):
        # Whatever the machine does meanwhile: the answer was given between question and answer.
        assert abs(offset.nanoseconds + APART * rank) <= offset.uncertainty
        assert calls == PINGS


def test_ranks_of_one_host_have_clock_offset_0_without_messages(rank_pool: Any) -> None:
    def body() -> tuple[ClockOffset, bool]:
        mesh = Mesh(pp=2)
        offset = clock_offset(mesh.group("pp"), torch.device("cpu"))
        return offset, "send" in mesh.traffic.snapshot().get("pp", {})

    assert rank_pool.run(body, ranks=2) == [(ClockOffset(0, 0), False)] * 2
    assert clock_offset(Mesh(alone=True).group("pp"), torch.device("cpu")) == ClockOffset(0, 0)


def test_ranks_without_a_common_host_compare_clocks_by_messages(rank_pool: Any) -> None:
    def body() -> tuple[bool, int]:
        mesh = Mesh(pp=2)
        offset = clock_offset(over_messages(mesh.group("pp")), torch.device("cpu"))
        return abs(offset.nanoseconds) <= offset.uncertainty, mesh.traffic.snapshot()["pp"]["send"].calls

    assert rank_pool.run(body, ranks=2) == [(True, PINGS)] * 2
