"""Tensors in shared memory are reduced as messages would reduce them, and fall back to messages."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest
import torch

from plait.errors import RankError
from plait.ranks.collectives import SMALLEST_SHARED, all_reduce, shared_zeros
from plait.ranks.mesh import Mesh
from plait.ranks.transport.shared_memory import host_discovery

CPU = torch.device("cpu")
SIZE = SMALLEST_SHARED  # elements, so enough bytes for every dtype
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def filled(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=generator) * 8).to(dtype)


def in_rank_order(ranks: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = filled(0, size, dtype).to(wide)
    for rank in range(1, ranks):
        total += filled(rank, size, dtype).to(wide)
    return total.to(dtype)


def reduced(size: int, dtype: torch.dtype) -> tuple[bool, torch.Tensor, object]:
    mesh = Mesh(dp=torch.distributed.get_world_size())
    group = mesh.group("dp")
    tensor = shared_zeros(size, dtype, CPU, group)
    assert not tensor.any()
    tensor.copy_(filled(mesh.rank, size, dtype))
    result = all_reduce(tensor, group, checked=False).wait()
    assert result is tensor or result.data_ptr() == tensor.data_ptr()
    return group.transport.shares(tensor), tensor.clone(), mesh.traffic.snapshot()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "size"), [(2, SIZE), (3, SIZE + 7), (4, SIZE + 1)])
def test_a_sum_of_shared_tensors_adds_ranks_in_order(rank_pool, ranks, size, dtype):
    wanted = in_rank_order(ranks, size, dtype)
    for lies_in_shared_memory, tensor, traffic in rank_pool.run(reduced, size, dtype, ranks=ranks):
        assert lies_in_shared_memory
        assert torch.equal(tensor, wanted)
        assert traffic["dp"]["all_reduce"].calls == 1
        assert traffic["dp"]["all_reduce"].bytes == tensor.nbytes


def test_small_shared_tensors_are_summed_by_messages(rank_pool):
    for lies_in_shared_memory, tensor, _ in rank_pool.run(reduced, 100, torch.float32, ranks=2):
        assert not lies_in_shared_memory
        assert torch.equal(tensor, in_rank_order(2, 100, torch.float32))


def reduced_apart(size: int) -> tuple[bool, torch.Tensor, object]:
    if torch.distributed.get_rank() == 1:
        host_discovery.host_identity = lambda: {"host": "another"}  # type: ignore[assignment]
    return reduced(size, torch.float32)


def test_tensors_of_ranks_on_other_hosts_are_summed_by_messages(rank_pool):
    for lies_in_shared_memory, tensor, _ in rank_pool.run(reduced_apart, SIZE, ranks=2):
        assert not lies_in_shared_memory
        assert torch.equal(tensor, in_rank_order(2, SIZE, torch.float32))
    rank_pool.close()  # the next test starts ranks that are on one host again


def several_rounds() -> list[float]:
    mesh = Mesh(dp=2)
    group = mesh.group("dp")
    tensors = [shared_zeros(SIZE, torch.float32, CPU, group) for _ in range(3)]
    seen = []
    for round in range(4):
        for number, tensor in enumerate(tensors):
            tensor.fill_(10 * round + number + mesh.rank)
        handles = [all_reduce(tensor, group, checked=False) for tensor in tensors]
        for handle in reversed(handles):
            handle.wait()
        for tensor in tensors:
            assert (tensor == tensor[0]).all()
            seen.append(tensor[0].item())
    return seen


def test_sums_of_shared_tensors_in_flight_at_once_do_not_mix(rank_pool):
    wanted = [2.0 * (10 * round + number) + 1 for round in range(4) for number in range(3)]
    assert rank_pool.run(several_rounds, ranks=2) == [wanted, wanted]


def let_go() -> tuple[bool, bool]:
    group = Mesh(dp=2).group("dp")
    tensor = shared_zeros(SIZE, torch.float32, CPU, group)
    shared, alive = group.transport.shares(tensor), weakref.ref(tensor)
    del tensor
    gc.collect()
    return shared, alive() is not None


def test_shared_memory_is_freed_with_its_tensor(rank_pool):
    assert rank_pool.run(let_go, ranks=2) == [(True, False)] * 2


def one_dies() -> None:
    mesh = Mesh(dp=2)
    group = mesh.group("dp")
    tensor = shared_zeros(SIZE, torch.float32, CPU, group)
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(tensor, group, checked=False).wait()


def test_a_lost_rank_ends_a_sum_of_shared_tensors_with_an_error(rank_pool):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        rank_pool.run(one_dies, ranks=2)


def test_shared_zeros_for_one_rank_is_an_ordinary_tensor():
    assert shared_zeros(5, torch.float64, CPU, None).tolist() == [0.0] * 5
    assert shared_zeros(5, torch.float64, CPU, Mesh().group("dp")).tolist() == [0.0] * 5
