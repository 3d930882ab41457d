"""Ranks of one host: what becomes of their lines and of who waits when a rank is gone, late or done."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch

from plait.comm import Group, Handle, Mesh, all_reduce, nearby, reduce_scatter, shared_zeros
from plait.comm.host import scratch
from plait.errors import CommunicationError, RankError

RANKS = (2, 3, 4)


def numbers(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def error_of(group: Group) -> str:
    """The error of an all-reduce that is not checked."""
    with pytest.raises(CommunicationError) as error:
        all_reduce(torch.ones(4), group, checked=False).wait()
    return str(error.value)


@pytest.mark.parametrize("ranks", RANKS)
def test_whole_and_in_pieces_are_the_same_bits(rank_pool, ranks):
    def body():
        group = Mesh(tp=ranks).group("tp")
        totals = []
        for size in (0, 1, 2, 1000, 70_001):
            mine = numbers(group.index, size)
            for reduction in (nearby.reduce_whole, nearby.reduce_in_pieces):
                totals.append(torch.empty(size))
                reduction(mine, totals[-1], "sum", group).wait()
        return totals

    results = rank_pool.run(body, ranks=ranks)
    for number, size in enumerate((0, 1, 2, 1000, 70_001)):
        in_order = numbers(0, size)
        for rank in range(1, ranks):
            in_order += numbers(rank, size)
        for totals in results:
            assert torch.equal(totals[2 * number], in_order)
            assert torch.equal(totals[2 * number + 1], in_order)


def test_operations_of_all_kinds_are_under_way_at_once(rank_pool):
    def body():
        group = Mesh(dp=4).group("dp")
        own = shared_zeros(100_000, torch.float32, torch.device("cpu"), group).fill_(group.index)
        handles = []
        for number in range(30):
            mine = torch.full((8, 4), float(number + group.index))
            large = torch.full((200_000,), float(number + group.index))
            handles += [all_reduce(mine, group, checked=False), reduce_scatter(mine, group, checked=False)]
            handles += [all_reduce(large, group, checked=False)]
        handles.append(all_reduce(own, group, checked=False))
        seen = [set(handle.wait().flatten().tolist()) for handle in reversed(handles)]
        return seen[::-1]

    wanted = [{4.0 * number + 6} for number in range(30) for _ in range(3)]
    assert rank_pool.run(body, ranks=4) == [[*wanted, {6.0}]] * 4


def test_what_is_handed_in_may_change_once_it_is_started(rank_pool):
    def body():
        group = Mesh(tp=2).group("tp")
        tensor, out = torch.ones(1000), torch.empty(1000)
        handle = all_reduce(tensor, group, out=out, checked=False)
        tensor.fill_(100)
        return set(handle.wait().tolist())

    assert rank_pool.run(body, ranks=2) == [{2.0}, {2.0}]


def test_a_rank_that_does_not_come_ends_the_group_for_all(rank_pool):
    def body():
        patient, hasty = Mesh(tp=2, timeout=30).group("tp"), Mesh(tp=2, timeout=0.3).group("tp")
        all_reduce(torch.ones(4), hasty).wait()
        if patient.index == 0:
            errors = [error_of(hasty), error_of(hasty)]
            all_reduce(torch.ones(1), patient).wait()
            return errors
        all_reduce(torch.ones(1), patient).wait()  # too late for the other, which has given up
        tensor = torch.ones(4)
        assert all_reduce(tensor, hasty, checked=False).wait().tolist() == [2.0] * 4  # it had shown its own
        return [error_of(hasty), error_of(hasty)]

    (silence, after_silence), (gone, after_gone) = rank_pool.run(body, ranks=2)
    assert silence == (
        "rank 0 waits for all_reduce over tp with 1: no answer within 0.3 s; "
        "see what that rank is doing, or give the mesh more time."
    )
    assert after_silence == silence
    assert gone == (
        "rank 1 waits for all_reduce over tp with 0: connection closed by peer; "
        "it ended first, so look for its error."
    )
    assert after_gone == gone


def test_a_stopped_rank_is_an_error_after_the_timeout(rank_pool):
    def body():
        group = Mesh(tp=2, timeout=0.5).group("tp")
        numbers = torch.tensor([0, 0])
        numbers[group.index] = os.getpid()
        process = int(all_reduce(numbers, group).wait()[1 - group.index])
        if group.index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        try:
            return error_of(group)
        finally:
            os.kill(process, signal.SIGCONT)

    assert "all_reduce over tp with 1: no answer within 0.5 s" in rank_pool.run(body, ranks=2)[0]


def test_a_killed_rank_is_noticed(rank_pool):
    def body():
        group = Mesh(tp=2, timeout=50).group("tp")
        all_reduce(torch.ones(4), group).wait()
        if group.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(error_of(group))

    with pytest.raises(RankError, match=r"(all_reduce over tp with 1: connection closed by peer|by SIGKILL)"):
        rank_pool.run(body, ranks=2)


def test_any_failed_operation_of_a_group_ends_it_for_all(rank_pool):
    def body():
        group = Mesh(tp=2, timeout=30).group("tp")
        all_reduce(torch.ones(4), group).wait()
        if group.index == 1:
            return error_of(group)

        def fails() -> None:
            raise RuntimeError("no memory")

        with pytest.raises(CommunicationError, match="no memory"):
            Handle(fails, lambda: None, "something", group).wait()
        return error_of(group)

    own, others = rank_pool.run(body, ranks=2)
    assert own == "rank 0 waits for all_reduce over tp with 1: an operation before it failed (no memory)"
    assert "connection closed by peer" in others


def test_more_is_under_way_than_the_scratch_holds(rank_pool):
    def body():
        group = Mesh(tp=2, timeout=10).group("tp")
        capacity, scratch.CAPACITY = scratch.CAPACITY, 2**22
        try:
            tensors = [torch.full((2**18,), float(number + group.index)) for number in range(10)]
            handles = [all_reduce(tensor, group, checked=False) for tensor in tensors]
            return [set(handle.wait().tolist()) for handle in handles]
        finally:
            scratch.CAPACITY = capacity

    assert rank_pool.run(body, ranks=2) == [[{2.0 * number + 1} for number in range(10)]] * 2


def test_a_mesh_gives_its_connections_back(rank_pool):
    def body(close):
        Mesh(dp=2)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        mesh = Mesh(tp=2)
        group = mesh.group("tp")
        idle = len(os.listdir("/proc/self/fd"))
        all_reduce(torch.ones(4), group).wait()
        busy = len(os.listdir("/proc/self/fd"))
        all_reduce(torch.ones(4), mesh.group("world")).wait()
        if close:
            mesh.close()
            assert "the mesh is closed" in error_of(group)
        del mesh, group
        gc.collect()
        return busy - idle, before - len(os.listdir("/proc/self/fd"))

    for used, left in rank_pool.run(body, True, ranks=2):
        assert used == 2
        assert left >= 0
