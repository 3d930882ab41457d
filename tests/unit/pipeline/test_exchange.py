from __future__ import annotations

import torch

from plait.pipeline.boundary import TensorInfo
from plait.pipeline.exchange import BufferPool

CPU = torch.device("cpu")
SMALL, LARGE = TensorInfo((2, 3), torch.float32, True), TensorInfo((4,), torch.float64, False)


def test_buffers_are_reused_by_shape_and_dtype() -> None:
    pool = BufferPool(CPU)
    one, other = pool.take(SMALL), pool.take(LARGE)
    assert (tuple(one.shape), one.dtype) == ((2, 3), torch.float32)
    assert (tuple(other.shape), other.dtype) == ((4,), torch.float64)
    pool.give_back(one)
    assert pool.take(TensorInfo((2, 3), torch.float32, False)) is one
    assert pool.take(SMALL) is not one
    assert pool.made == 3


def test_memory_is_what_is_in_flight_not_how_many_there_were() -> None:
    pool = BufferPool(CPU)
    for _ in range(10):
        held = [pool.take(SMALL), pool.take(SMALL)]
        for buffer in held:
            pool.give_back(buffer)
    assert pool.made == 2


def test_views_of_a_buffer_are_known() -> None:
    pool = BufferPool(CPU)
    buffer = pool.take(SMALL)
    assert pool.owns(buffer)
    assert pool.owns(buffer.detach()[1:].t())
    assert not pool.owns(buffer.clone())
    pool.give_back(buffer)
    assert pool.owns(buffer)  # it will be written again


def test_clear_forgets_all() -> None:
    pool = BufferPool(CPU)
    buffer = pool.take(SMALL)
    pool.give_back(buffer)
    pool.clear()
    assert not pool.owns(buffer)
    assert pool.made == 0
    assert pool.take(SMALL) is not buffer
