"""Ranks as threads: the results of processes, turns in order, deadlocks that are reported at once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.errors import CommunicationError, MeshError, RankError
from plait.ranks import (
    Group,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_uneven,
    barrier,
    broadcast,
    gather,
    receive,
    reduce,
    reduce_scatter,
    scatter,
    send,
)


def on_threads(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    return plait.launch(function, *arguments, ranks=ranks, ranks_as="threads", threads=1)


def every_collective(ranks: int, members: int) -> list[torch.Tensor]:
    """What each gives on this rank, among the first `members` ranks."""
    mesh = Mesh(dp=ranks)
    group = mesh.new_group([range(members)], "some")
    if group is None:
        return []
    mine = torch.randn(2 * members, 3, generator=torch.Generator().manual_seed(group.index))
    own = torch.empty(2, 3)
    sent = [(2 * group.index + peer) % 3 for peer in range(members)]
    received = [(2 * peer + group.index) % 3 for peer in range(members)]
    tensors = [
        all_reduce(mine.clone(), group).wait(),
        all_reduce(mine, group, "max", out=torch.empty_like(mine)).wait(),
        reduce_scatter(mine, group, "mean").wait(),
        all_gather(mine[:2], group).wait(),
        all_to_all(mine, group).wait(),
        all_to_all_uneven(mine.view(-1)[: sum(sent)], group, sent, received).wait(),
        broadcast(mine.clone(), group, 1).wait(),
        scatter(mine if group.index == 1 else None, group, 1, out=own).wait(),
        all_reduce(mine.bfloat16(), group).wait(),
    ]
    gathered = gather(mine[:1], group, 1).wait()
    reduced = reduce((mine * 8).round(), group, destination=1).wait()  # Gloo has an order of its own
    if group.index == 1:
        assert gathered is not None
        tensors += [gathered, reduced]
    barrier(group).wait()
    return tensors


@pytest.mark.parametrize(("ranks", "members"), [(2, 2), (4, 3)])
def test_collectives_of_threads_have_the_bits_of_processes(rank_pool: Any, ranks: int, members: int) -> None:
    threads = on_threads(every_collective, ranks, members, ranks=ranks)
    processes = rank_pool.run(every_collective, ranks, members, ranks=ranks)
    for mine, others in zip(threads, processes, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))


def test_messages_between_threads_keep_their_order_and_their_tag() -> None:
    def body() -> list[float]:
        group = Mesh(pp=2).group("pp")
        if group.index == 0:
            handles = [send(torch.full((3,), float(i)), group, 1, tag=i % 2) for i in range(6)]
            for handle in handles:
                handle.wait()
            return []
        order = [1, 3, 5, 0, 2, 4]
        received = [receive(torch.empty(3), group, 0, tag=i % 2) for i in order]
        return [handle.wait()[0].item() for handle in received]

    assert on_threads(body, ranks=2)[1] == [1.0, 3.0, 5.0, 0.0, 2.0, 4.0]


def test_ranks_as_threads_print_in_order_of_ranks() -> None:
    seen: list[str] = []

    def body() -> None:
        mesh = Mesh(dp=3)
        seen.append(f"{mesh.rank} begins")
        barrier(mesh.group("dp"), checked=False).wait()
        seen.append(f"{mesh.rank} ends")

    on_threads(body, ranks=3)
    assert seen == ["0 begins", "1 begins", "2 begins", "0 ends", "1 ends", "2 ends"]


def test_ranks_as_threads_draw_the_random_numbers_of_processes(rank_pool: Any) -> None:
    def body() -> list[tuple[float, float]]:
        group, drawn = Mesh(dp=2).group("dp"), []
        for _ in range(3):
            drawn.append((torch.rand(()).item(), random.random()))
            barrier(group, checked=False).wait()
        return drawn

    before = torch.get_rng_state()
    assert on_threads(body, ranks=2) == rank_pool.run(body, ranks=2)
    assert torch.equal(torch.get_rng_state(), before)


def waits_for_the_other(group: Group) -> None:
    receive(torch.empty(1), group, (group.index + 1) % group.size, label="1F0").wait()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_operations_of_ranks_as_threads_start_no_threads() -> None:
    """MKL does where it may, for functions of some hundred elements; its threads then spin for a while."""

    def body() -> set[str]:
        before = set(os.listdir("/proc/self/task"))
        for _ in range(10):
            torch.rand(592, dtype=torch.float64).erfinv()
        return set(os.listdir("/proc/self/task")) - before

    assert on_threads(body, ranks=1) == [set()]


def test_a_deadlock_is_reported_with_its_cycle() -> None:
    def body() -> None:
        waits_for_the_other(Mesh(pp=3).group("pp"))

    with pytest.raises(CommunicationError) as error:
        on_threads(body, ranks=3)
    assert str(error.value) == (
        "rank 0 waits for 1F0 from rank 1 over pp: deadlock: rank 0 waits for 1F0 from rank 1 over pp, "
        "rank 1 waits for 1F0 from rank 2 over pp, rank 2 waits for 1F0 from rank 0 over pp"
    )


def test_collectives_in_another_order_on_one_thread_are_an_error() -> None:
    def body() -> None:
        mesh = Mesh(tp=2, dp=2)
        groups = [mesh.group("tp"), mesh.group("world")]
        for group in reversed(groups) if mesh.rank == 3 else groups:
            barrier(group, checked=False).wait()

    with pytest.raises(CommunicationError) as error:
        on_threads(body, ranks=4)
    assert str(error.value).endswith(
        "deadlock: rank 2 waits for barrier over tp with 3, rank 3 waits for barrier over world with 0, 1, 2"
    )


def test_different_collectives_on_two_threads_are_an_error_at_once() -> None:
    def body() -> None:
        group = Mesh(dp=2).group("dp")
        all_reduce(torch.ones(2 + group.index), group, checked=False).wait()

    with pytest.raises(CommunicationError, match=r"different calls.*float32\[3\].*float32\[2\]"):
        on_threads(body, ranks=2)


def test_a_rank_that_fails_ends_all_with_its_error() -> None:
    def body() -> None:
        group = Mesh(dp=3).group("dp")
        if group.index == 1:
            raise ValueError("no such number")
        barrier(group, checked=False).wait()

    with pytest.raises(RankError, match="rank 1 failed: ValueError: no such number") as error:
        on_threads(body, ranks=3)
    assert isinstance(error.value.__cause__, ValueError)


def test_a_rank_that_returns_early_is_named() -> None:
    def body() -> None:
        group = Mesh(dp=2).group("dp")
        if group.index == 0:
            barrier(group, checked=False).wait()

    with pytest.raises(CommunicationError, match="barrier over dp with 1: rank 1 ended before it took part"):
        on_threads(body, ranks=2)


def test_a_rank_that_runs_too_long_is_named() -> None:
    def body() -> None:
        group = Mesh(dp=2, timeout=0.2).group("dp")
        if group.index == 1:
            import time

            time.sleep(0.6)
        barrier(group, checked=False).wait()

    with pytest.raises(CommunicationError, match=r"rank 1 has run for 0\.2 s without waiting"):
        on_threads(body, ranks=2)


def test_a_result_is_written_by_the_thread_of_its_rank() -> None:
    """Or a dispatch mode of that thread, as recomputation has one, would not see it."""

    class Counting(TorchDispatchMode):
        copies = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.copies += func is torch.ops.aten.copy_.default
            return func(*args, **(kwargs or {}))

    def body() -> int:
        group = Mesh(dp=2).group("dp")
        with Counting() as counting:
            all_reduce(torch.ones(4), group, checked=False).wait()
        return counting.copies

    assert on_threads(body, ranks=2) == [1, 1]


def test_the_input_of_an_abandoned_collective_may_change() -> None:
    def body() -> tuple[float, float]:
        group = Mesh(dp=2).group("dp")
        mine, out = torch.ones(4), torch.zeros(4)
        handle = all_reduce(mine, group, out=out, checked=False)
        if group.index == 0:
            assert handle.abandon()
            mine.fill_(100)
        else:
            handle.wait()
        return out[0].item(), all_reduce(torch.ones(1), group, checked=False).wait().item()

    assert on_threads(body, ranks=2) == [(0.0, 2.0), (2.0, 2.0)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"ranks_as": "fibres"}, "ranks_as is 'fibres'"),
        ({"ranks_as": "threads", "device": "cuda"}, "run on the CPU"),
        ({"ranks_as": "threads", "ranks": 0}, "ranks is 0: give a whole number"),
    ],
)
def test_launch_refuses_options_that_threads_cannot_have(options: Any, what: str) -> None:
    with pytest.raises(MeshError, match=what):
        plait.launch(Mesh, **{"ranks": 1, **options})


def test_launch_of_other_ranks_inside_a_thread_is_refused() -> None:
    def body() -> None:
        plait.launch(Mesh, ranks=1)

    with pytest.raises(MeshError, match="inside rank 0 of 2"):
        on_threads(body, ranks=2)


def test_tools_of_torch_distributed_are_refused_on_threads() -> None:
    with pytest.raises(MeshError, match="no threads as ranks"):
        on_threads(lambda: Mesh(dp=2).device_mesh(["shard"]), ranks=2)
