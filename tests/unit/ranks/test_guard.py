"""A guarded mesh: a call that is not the same on every rank is an error on all, checked or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks import (
    Count,
    Group,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_uneven,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    shared_zeros,
)
from plait.schedules.action import Kind

CPU = torch.device("cpu")
ODD = 2
"""The rank that does something else."""


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "no error"


def ones(group: Group, usual: int = 4, odd: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(odd if group.index == ODD else usual, dtype=dtype)


def of_a_dtype(group: Group) -> torch.Tensor:
    return torch.ones(4, dtype=torch.float64 if group.index == ODD else torch.int64)


def in_another_order(group: Group) -> None:
    calls = [lambda: all_gather(torch.ones(2), group, checked=False), lambda: barrier(group, checked=False)]
    for call in reversed(calls) if group.index == ODD else calls:
        call().wait()


def reduced_where_they_lie(group: Group) -> None:
    """Two tensors in memory that all ranks reach, as gradients are: one rank begins with the other."""
    first, second = (shared_zeros(size, torch.float32, CPU, group) for size in (2**17, 2**16))
    all_reduce(second if group.index == ODD else first, group, checked=False).wait()


def one_elsewhere(group: Group) -> Tensor:
    """Memory that all ranks reach, but on one rank a tensor of its own: they would reduce in two ways."""
    shared = shared_zeros(2**16, torch.float32, CPU, group)
    return shared.clone() if group.index == ODD else shared


MISMATCHES: dict[str, tuple[Callable[[Group], object], str, str]] = {
    "size": (
        lambda group: all_reduce(ones(group), group, checked=False),
        "all_reduce sum of float32[4]",
        "all_reduce sum of float32[8]",
    ),
    "dtype": (
        lambda group: all_reduce(of_a_dtype(group), group, checked=False),
        "all_reduce sum of int64[4]",
        "all_reduce sum of float64[4]",
    ),
    "operation": (
        lambda group: (all_to_all if group.index == ODD else all_gather)(torch.ones(4), group, checked=False),
        "all_gather of float32[4]",
        "all_to_all of float32[4]",
    ),
    "reduction": (
        lambda group: all_reduce(
            ones(group, 4, 4), group, "max" if group.index == ODD else "min", checked=False
        ),
        "all_reduce min of float32[4]",
        "all_reduce max of float32[4]",
    ),
    "order": (in_another_order, "all_gather of float32[2]", "barrier"),
    "flaw": (
        lambda group: reduce_scatter(ones(group, 4, 5), group, checked=False),
        "reduce_scatter sum of float32[4]",
        "reduce_scatter sum of float32[5] but dim 0 does not divide into 4 equal ranges",
    ),
    "memory": (
        lambda group: all_reduce(one_elsewhere(group), group, checked=False),
        "all_reduce sum in shared memory of float32[65536]",
        "all_reduce sum of float32[65536]",
    ),
    "shared memory": (
        reduced_where_they_lie,
        "all_reduce sum in shared memory of float32[131072]",
        "all_reduce sum in shared memory of float32[65536]",
    ),
}


def test_a_mismatch_names_both_calls_on_every_rank_and_harms_nothing(rank_pool: Any) -> None:
    def body() -> list[tuple[str, Any, float]]:
        mesh, found = Mesh(dp=4, guarded=True), []
        group = mesh.group("dp")
        for call, _, _ in MISMATCHES.values():
            before = mesh.traffic.snapshot()
            message = error_of(lambda: call(group))  # noqa: B023 (called at once)
            counted = mesh.traffic.since(before)
            after = all_reduce(torch.ones(1), group, checked=False).wait().item()
            found.append((message, counted, after))
        return found

    wanted = [
        f"the ranks of dp do not agree (ranks 0, 1, 3: {usual}; rank 2: {odd}): make the same call with the "
        "same shapes on each."
        for _, usual, odd in MISMATCHES.values()
    ]
    assert rank_pool.run(body, ranks=4) == [[(told, {}, 4.0) for told in wanted]] * 4


def test_a_guarded_mesh_checks_every_collective(rank_pool: Any) -> None:
    """Rank 1 makes another call first, and hears of each."""
    calls: list[Callable[[Group], object]] = [
        lambda group: all_gather(torch.ones(2), group, checked=False),
        lambda group: all_reduce(torch.ones(2), group, checked=False),
        lambda group: all_to_all(torch.ones(2), group, checked=False),
        lambda group: all_to_all_uneven(torch.ones(2), group, [0, 2], [0, 1], checked=False),
        lambda group: broadcast(torch.ones(2), group, checked=False),
        lambda group: gather(torch.ones(2), group, checked=False),
        lambda group: reduce(torch.ones(2), group, checked=False),
        lambda group: reduce_scatter(torch.ones(2), group, checked=False),
        lambda group: scatter(torch.ones(4), group, out=torch.empty(2), checked=False),
        lambda group: barrier(group, checked=False),
    ]

    def body() -> list[str]:
        group = Mesh(dp=2, guarded=True).group("dp")

        def other() -> object:
            return all_gather(torch.ones(99), group, checked=False)

        return [
            error_of(other if group.index else lambda call=call: call(group))  # type: ignore[misc]
            for call in calls
        ]

    for messages in rank_pool.run(body, ranks=2):
        assert len(messages) == 10
        assert all("rank 1: all_gather of float32[99]" in message for message in messages)


def test_all_groups_of_a_mesh_are_guarded_and_none_unless_asked(rank_pool: Any) -> None:
    def body(**options: bool) -> list[bool]:
        mesh = Mesh(pp=2, dp=2, **options)
        made = mesh.new_group([range(4)], "tie")
        assert made is not None
        axes = ("pp", "replicate", "shard", "tp", "dp", "model", "world")
        channels = mesh.channel_groups([(0, 1, Kind.F)]).values()
        groups = [*channels, made, *(mesh.group(axis) for axis in axes)]
        return [mesh.guarded, *(group.guarded for group in groups)]

    assert rank_pool.run(lambda: body(guarded=True), ranks=4) == [[True] * 10] * 4
    assert rank_pool.run(body, ranks=4) == [[False] * 10] * 4


def test_a_guarded_mesh_gives_the_same_bits_and_counts_its_checks(rank_pool: Any) -> None:
    def body(guarded: bool) -> tuple[torch.Tensor, Any]:
        mesh = Mesh(dp=2, guarded=guarded)
        group = mesh.group("dp")
        mine = torch.randn(1000, generator=torch.Generator().manual_seed(group.index))
        under_way = [all_reduce(mine.clone(), group, checked=checked) for checked in (False, True)]
        ranges = all_gather(mine, group, checked=False).wait()
        return torch.cat([*(handle.wait() for handle in under_way), ranges]), mesh.traffic.snapshot()

    plain = {"dp": {"all_reduce": Count(2, 8000), "all_gather": Count(1, 4000)}}
    guarded = {"dp": plain["dp"] | {"guard": Count(3, 3 * 256)}}
    for (result, traffic), (wanted, counted) in zip(
        rank_pool.run(body, True, ranks=2), rank_pool.run(body, False, ranks=2), strict=True
    ):
        assert torch.equal(result, wanted)
        assert (traffic, counted) == (guarded, plain)


def test_a_guarded_mesh_of_one_rank_sends_nothing() -> None:
    mesh = Mesh(guarded=True)
    tensor = torch.ones(2)
    assert all_reduce(tensor, mesh.group("dp"), checked=False).wait() is tensor
    with pytest.raises(CommunicationError, match="rank 0 cannot call broadcast from 1"):
        broadcast(tensor, mesh.group("dp"), source=1, checked=False)
    assert mesh.traffic.snapshot() == {}
