"""Collectives in shared memory, and their errors when a rank is gone, late or has ended."""

from __future__ import annotations

import gc
import os
import re
import signal

import pytest
import torch

from plait.errors import CommunicationError, RankError
from plait.ranks import (
    Group,
    Handle,
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
)
from plait.ranks.collectives import SMALLEST_SHARED, shared_zeros
from plait.ranks.transport.shared_memory import shared_staging, transport

RANKS = (2, 3, 4)
CPU = torch.device("cpu")


def numbers(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def error_of(group: Group) -> str:
    """The error of an all-reduce that is not checked."""
    with pytest.raises(CommunicationError) as error:
        all_reduce(torch.ones(4), group, checked=False).wait()
    return str(error.value)


def unfinished(group: Group) -> dict[int, bytes]:
    """The calls that this rank has still to finish: while there is one, no place is given back."""
    return dict(group.transport.channels._unfinished)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_of_whole_tensors_and_in_chunks_gives_the_same_bits(rank_pool, ranks):
    def body():
        group = Mesh(tp=ranks).group("tp")
        totals = []
        for size in (0, 1, 2, 1000, 70_001):
            mine = numbers(group.index, size)
            for reduction in (transport.all_reduce_whole, transport.all_reduce_in_ranges):
                totals.append(torch.empty(size))
                reduction(mine, totals[-1], "sum", group.transport.staging).wait()
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
        own, other = (shared_zeros(100_000, torch.float32, CPU, group).fill_(group.index) for _ in range(2))
        handles = []
        for number in range(8):
            mine = torch.full((8, 4), float(number + group.index))
            large = torch.full((200_000,), float(number + group.index))
            handles += [all_gather(mine, group, checked=False), reduce_scatter(mine, group, checked=False)]
            handles += [all_reduce(mine, group, checked=False), all_reduce(large, group, checked=False)]
        handles += [all_reduce(own, group, checked=False), reduce_scatter(other, group, checked=False)]
        handles += [broadcast(torch.full((2,), float(group.index)), group, 3, checked=False)]
        seen = [set(handle.wait().flatten().tolist()) for handle in reversed(handles)]
        return seen[::-1], unfinished(group)

    wanted = [
        seen
        for number in range(8)
        for seen in ({number + index for index in range(4)}, *[{4.0 * number + 6}] * 3)
    ]
    assert rank_pool.run(body, ranks=4) == [([*wanted, {6.0}, {6.0}, {3.0}], {})] * 4


def gathered(size: int, dtype: torch.dtype, inside: bool) -> tuple[bool, torch.Tensor, int]:
    """Whether the result is `out`, the result, and the bytes counted; `inside`: from the own part of it."""
    mesh = Mesh(dp=torch.distributed.get_world_size())
    group = mesh.group("dp")
    out = torch.zeros(group.size * size, dtype=dtype)
    mine = out[group.index * size :][:size] if inside else torch.empty(size, dtype=dtype)
    mine.copy_(numbers(group.index, size).to(dtype))
    result = all_gather(mine, group, out=out, checked=False).wait()
    return result is out, result, mesh.traffic.snapshot()["dp"]["all_gather"].bytes


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 70_001])
def test_tensors_are_gathered_in_order_of_ranks(rank_pool, size, dtype, inside):
    wanted = torch.cat([numbers(rank, size).to(dtype) for rank in range(3)])
    for is_out, whole, sent in rank_pool.run(gathered, size, dtype, inside, ranks=3):
        assert is_out
        assert torch.equal(whole, wanted)
        assert sent == size * dtype.itemsize


def test_the_input_of_a_started_all_gather_may_change(rank_pool):
    """As for reductions: what counts is what it was. In place its new value is written over."""

    def body():
        group = Mesh(tp=2).group("tp")
        mine, whole = torch.full((3,), float(group.index)), torch.zeros(2)
        whole[group.index] = group.index
        handles = [
            all_gather(mine, group, checked=False),
            all_gather(whole[group.index :][:1], group, out=whole, checked=False),
        ]
        mine.fill_(100)
        return [handle.wait().tolist() for handle in handles]

    assert rank_pool.run(body, ranks=2) == [[[0.0, 0, 0, 1, 1, 1], [0.0, 1]]] * 2


def test_tensors_above_the_staging_limit_are_sent_by_the_backend(rank_pool):
    def body():
        group = Mesh(dp=2).group("dp")
        limit, transport.STAGING_LIMIT = transport.STAGING_LIMIT, 2**10
        try:
            ways = [
                group.transport.algorithm(one, torch.zeros(size))
                for one in ("all_gather", "all_to_all")
                for size in (256, 257)
            ]
            own_range = torch.full((258,), float(group.index))
            results = [one(own_range, group, checked=False).wait() for one in (all_gather, all_to_all)]
            return ways, [whole.unique_consecutive().tolist() for whole in results]
        finally:
            transport.STAGING_LIMIT = limit

    wanted = ["whole", "backend", "whole", "backend"], [[0.0, 1.0], [0.0, 1.0]]
    assert rank_pool.run(body, ranks=2) == [wanted] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 70_001])
def test_all_to_all_in_shared_memory_gives_what_torch_gives(rank_pool, size, dtype):
    def body():
        group = Mesh(dp=3).group("dp")
        mine = numbers(group.index, 3 * size).to(dtype).view(3, size)
        sent = mine.t().contiguous().t() if size else mine  # with strides
        first = all_to_all(sent, group, checked=False)
        over_torch = torch.empty_like(mine)
        group.transport.over_torch().all_to_all(mine, over_torch).wait()
        sent.zero_()  # what counts is what it was
        return torch.equal(first.wait(), over_torch), over_torch

    for index, (equal, ranges) in enumerate(rank_pool.run(body, ranks=3)):
        assert equal
        wanted = [numbers(rank, 3 * size).to(dtype).view(3, size)[index] for rank in range(3)]
        assert torch.equal(ranges, torch.stack(wanted))


def scattered(size: int, dtype: torch.dtype, op: str, place: str) -> tuple[torch.Tensor, bool, bool]:
    """A sum of tensors in shared memory: this rank's range, and whether the rest stayed what it was.

    `place` is where the range goes: `own` range of the tensor, some `other` memory, or `none` given.
    """
    group = Mesh(dp=torch.distributed.get_world_size()).group("dp")
    tensor = shared_zeros(group.size * size, dtype, CPU, group)
    mine = (numbers(group.index, group.size * size) * 8).to(dtype)
    tensor.copy_(mine)
    own = tensor[group.index * size :][:size]
    out = {"own": own, "other": torch.empty(size, dtype=dtype), "none": None}[place]
    result = reduce_scatter(tensor, group, op, out=out, checked=False).wait()
    is_out = out is None or result is out or result.data_ptr() == out.data_ptr()
    own_range = result.clone()
    own.copy_(mine[group.index * size :][:size])
    return own_range, is_out, torch.equal(tensor, mine)


@pytest.mark.parametrize("place", ["own", "other", "none"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tensors_in_shared_memory_are_scattered_where_they_lie(rank_pool, dtype, op, place):
    size = SMALLEST_SHARED + 3  # elements of a range: of several blocks, and not all of one size
    results = rank_pool.run(scattered, size, dtype, op, place, ranks=3)
    wide = [
        (numbers(rank, 3 * size) * 8).to(dtype).to(torch.promote_types(dtype, torch.float32))
        for rank in range(3)
    ]
    total = torch.maximum(wide[0], wide[1]).maximum(wide[2]) if op == "max" else wide[0] + wide[1] + wide[2]
    wanted = (total / 3 if op == "mean" else total).to(dtype)
    assert torch.equal(torch.cat([own_range for own_range, _, _ in results]), wanted)
    assert all(is_out and rest_stayed for _, is_out, rest_stayed in results)


def test_an_in_place_reduce_scatter_ends_only_when_all_ranks_have_read(rank_pool):
    """Several rounds in place: each rank may write to its tensor again as soon as it has waited."""

    def body():
        group = Mesh(dp=4).group("dp")
        size, sums = SMALLEST_SHARED, set()
        tensor = shared_zeros(group.size * size, torch.float32, CPU, group)
        own = tensor[group.index * size :][:size]
        for number in range(5):
            tensor.fill_(number + group.index)
            handle = reduce_scatter(tensor, group, out=own, checked=False)
            sums.add((number, *handle.wait().unique().tolist()))
        return sums

    assert rank_pool.run(body, ranks=4) == [{(number, 4.0 * number + 6) for number in range(5)}] * 4


def test_an_abandoned_operation_neither_reads_nor_writes_its_tensors(rank_pool):
    """All ranks drop what they have started, and go on: later operations find what they need."""

    def body():
        group = Mesh(dp=2, timeout=10).group("dp")
        capacity, shared_staging.CAPACITY = shared_staging.CAPACITY, 2**16
        try:
            own = shared_zeros(2 * SMALLEST_SHARED, torch.float32, CPU, group).fill_(7)
            whole, done = torch.zeros(2048), []
            for _ in range(20):  # more than there is room for, if places were not given back
                whole.fill_(5)
                handles = [
                    all_gather(whole[1024 * group.index :][:1024], group, out=whole, checked=False),
                    reduce_scatter(
                        own, group, out=own[SMALLEST_SHARED * group.index :][:SMALLEST_SHARED], checked=False
                    ),
                    all_reduce(torch.ones(8), group, checked=False),
                ]
                done += [handle.abandon() for handle in handles]
            broadcast(torch.ones(1), group, 0, checked=False).abandon()
            untouched = (whole == 5).all().item() and (own == 7).all().item()
            total = all_reduce(torch.ones(1), group, checked=False).wait().item()
            return all(done), untouched, total, unfinished(group)
        finally:
            shared_staging.CAPACITY = capacity

    assert rank_pool.run(body, ranks=2) == [(True, True, 2.0, {})] * 2


def test_the_input_of_a_started_all_reduce_may_change(rank_pool):
    def body():
        group = Mesh(tp=2).group("tp")
        tensor, out = torch.ones(1000), torch.empty(1000)
        handle = all_reduce(tensor, group, out=out, checked=False)
        tensor.fill_(100)
        return set(handle.wait().tolist())

    assert rank_pool.run(body, ranks=2) == [{2.0}, {2.0}]


def test_a_rank_that_does_not_come_ends_the_group_for_all(rank_pool):
    def body():
        patient, hasty = Mesh(tp=2, timeout=30).group("tp"), Mesh(tp=2, timeout=1.0).group("tp")
        all_reduce(torch.ones(4), hasty).wait()
        if patient.index == 0:
            errors = [error_of(hasty), error_of(hasty)]
            all_reduce(torch.ones(1), patient).wait()
            return errors
        all_reduce(torch.ones(1), patient).wait()  # too late for the other, which has given up
        tensor = torch.ones(4)
        assert all_reduce(tensor, hasty, checked=False).wait().tolist() == [2.0] * 4  # its tensor was staged
        return [error_of(hasty), error_of(hasty)]

    (silence, after_silence), (gone, after_gone) = rank_pool.run(body, ranks=2)
    assert silence == (
        "rank 0 waits for all_reduce over tp with 1: no answer within 1 s; "
        "see what that rank is doing, or give the mesh more time."
    )
    assert after_silence == silence
    assert gone == (
        "rank 1 waits for all_reduce over tp with 0: connection closed by peer; "
        "rank 0 waited for all_reduce over tp with 1 in vain."
    )
    assert after_gone == gone


@pytest.mark.full
def test_a_stopped_rank_is_an_error_after_the_timeout(rank_pool):
    def body():
        group = Mesh(tp=2, timeout=1.0).group("tp")
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

    assert "all_reduce over tp with 1: no answer within 1 s" in rank_pool.run(body, ranks=2)[0]


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


def test_operations_beyond_the_capacity_of_the_staging_buffers_complete(rank_pool):
    def body():
        group = Mesh(tp=2, timeout=10).group("tp")
        capacity, shared_staging.CAPACITY = shared_staging.CAPACITY, 2**22
        try:
            tensors = [torch.full((2**18,), float(number + group.index)) for number in range(10)]
            handles = [all_reduce(tensor, group, checked=False) for tensor in tensors]
            return [set(handle.wait().tolist()) for handle in handles]
        finally:
            shared_staging.CAPACITY = capacity

    assert rank_pool.run(body, ranks=2) == [[{2.0 * number + 1} for number in range(10)]] * 2


def test_closing_a_mesh_closes_its_shared_memory_connections(rank_pool):
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


def test_a_rank_with_full_staging_buffers_does_not_deadlock_with_a_waiting_peer(rank_pool):
    """The other has room, stages the second tensor, and waits for that first."""

    def body():
        group = Mesh(tp=2, timeout=5).group("tp")
        all_reduce(torch.ones(1), group).wait()
        capacity = shared_staging.CAPACITY
        try:
            if group.index == 0:
                shared_staging.CAPACITY = 2**14
            small, large = (all_reduce(torch.ones(size), group, checked=False) for size in (4, 2**12))
            return large.wait().sum().item(), small.wait().sum().item()
        finally:
            shared_staging.CAPACITY = capacity

    assert rank_pool.run(body, ranks=2) == [(2.0**13, 8.0)] * 2


def test_after_an_error_what_is_under_way_may_be_abandoned(rank_pool):
    """So that the error which is told is the first."""

    def body():
        mesh = Mesh(dp=2, timeout=10)
        group = mesh.group("dp")
        all_reduce(torch.ones(1), group).wait()
        if group.index == 1:
            mesh.close()
            return []
        first, *others = (all_gather(torch.ones(4), group, checked=False) for _ in range(3))
        with pytest.raises(CommunicationError, match="connection closed by peer"):
            first.wait()
        return [handle.abandon() for handle in others]

    assert rank_pool.run(body, ranks=2) == [[True, True], []]


def ones(group: Group, usual: int = 6, odd: int = 12) -> torch.Tensor:
    return torch.ones(odd if group.index == 1 else usual)


def in_place(group: Group) -> Handle[torch.Tensor]:
    first, second = (shared_zeros(size, torch.float32, CPU, group) for size in (2**17, 2**16))
    return all_reduce(second if group.index == 1 else first, group, checked=False)


def uneven(group: Group, most: int | None) -> Handle[torch.Tensor]:
    """Index 1 sends two elements to index 0, which expects one."""
    sent = [2 if group.index == 1 else 1, 1, 1]
    received = [2 if group.index == 1 else 1, 1, 1]
    received[group.index] = sent[group.index]
    return all_to_all_uneven(torch.ones(sum(sent)), group, sent, received, most=most, checked=False)


def other(group: Group) -> int:
    return int(group.index == 1)


UNLIKE = {
    "all_reduce sum of float32[6] or all_reduce sum of float32[12]": lambda group: all_reduce(
        ones(group), group, checked=False
    ),
    "all_reduce sum of int32[6] or all_reduce sum of float32[6]": lambda group: all_reduce(
        torch.ones(6, dtype=(torch.int32, torch.float32)[other(group)]), group, checked=False
    ),
    "all_reduce sum of float32[6] or all_reduce max of float32[6]": lambda group: all_reduce(
        torch.ones(6), group, ("sum", "max")[other(group)], checked=False
    ),
    "reduce_scatter sum of float32[6] or reduce_scatter sum of float32[12]": lambda group: reduce_scatter(
        ones(group), group, checked=False
    ),
    "all_gather of float32[6] or all_gather of float32[12]": lambda group: all_gather(
        ones(group), group, checked=False
    ),
    "all_to_all of float32[6] or all_to_all of float32[12]": lambda group: all_to_all(
        ones(group), group, checked=False
    ),
    "broadcast from 0 of float32[6] or broadcast from 0 of float32[12]": lambda group: broadcast(
        ones(group), group, checked=False
    ),
    "gather to 0 of float32[6] or gather to 0 of float32[12]": lambda group: gather(
        ones(group), group, checked=False
    ),
    "scatter from 0 of float32[2] or scatter from 0 of float32[4]": lambda group: scatter(
        ones(group), group, out=ones(group, 2, 4), checked=False
    ),
    "reduce sum to 0 of float32[6] or reduce sum to 0 of float32[12]": lambda group: reduce(
        ones(group), group, checked=False
    ),
    "all_gather of float32[6] or barrier": lambda group: (
        barrier(group, checked=False) if other(group) else all_gather(ones(group), group, checked=False)
    ),
    "all_reduce sum of float32[131072] or all_reduce sum of float32[65536]": in_place,
    "all_reduce sum of float32[6] or all_reduce sum of float32[524300]": lambda group: all_reduce(
        ones(group, 6, 2**19 + 12), group, checked=False
    ),
}
"""What one rank of three calls otherwise, without a check: Gloo then ends the process, or sums are wrong."""
NEVER_STAGED = "reduce sum"


@pytest.mark.parametrize(
    "staged",
    [pytest.param(True, id="staged"), pytest.param(False, id="sent by the backend", marks=pytest.mark.full)],
)
def test_mismatched_unchecked_calls_are_refused_on_every_rank(rank_pool, staged):
    def body():
        limit, transport.STAGING_LIMIT = transport.STAGING_LIMIT, 2**25 if staged else 0
        # What one rank may have begun in Gloo ends with the timeout, before the ranks leave.
        of_gloo, told = Mesh(dp=3, timeout=2 if staged else 6), {}
        mesh = Mesh(dp=3, timeout=30) if staged else of_gloo
        try:
            for name, call in UNLIKE.items():
                group = (of_gloo if name.startswith(NEVER_STAGED) else mesh).new_group([range(3)], "some")
                with pytest.raises(CommunicationError) as error:
                    call(group).wait()
                told[name] = str(error.value)
        finally:
            transport.STAGING_LIMIT = limit
        return told

    for told in rank_pool.run(body, ranks=3):
        for name, sentence in told.items():
            usual, odd = name.split(" or ")
            both = rf"(?=.*ranks? (0|2|0, 2): {re.escape(usual)}(;|\)))(?=.*rank 1: {re.escape(odd)}(;|\)))"
            assert re.search(rf"make different calls \({both}", sentence), f"{name}: {sentence}"


def test_a_staged_tensor_of_unexpected_size_is_refused(rank_pool):
    def body():
        group = Mesh(dp=3).group("dp")
        try:
            uneven(group, 4).wait()
        except CommunicationError as error:
            return str(error)
        return ""

    told = rank_pool.run(body, ranks=3)
    assert "index 1 sends 2 elements to index 0, which expects 1" in told[0]


def test_an_operation_that_is_never_awaited_holds_up_no_shared_memory(rank_pool):
    def body():
        group = Mesh(tp=2).group("tp")
        all_reduce(torch.ones(2**18), group).wait()
        kept = broadcast(torch.full((4,), float(group.index)), group, 1)
        broadcast(torch.ones(4), group, 0)  # whose handle is dropped at once
        for _ in range(6):
            all_reduce(torch.ones(2**18), group).wait()
        blocks = group.transport.staging._used // 2**20
        return blocks, unfinished(group), kept.wait().tolist()

    for blocks, left, late in rank_pool.run(body, ranks=2):
        assert blocks <= 2, "as without the operations that nobody awaits"
        assert left == {}
        assert late == [1.0] * 4
