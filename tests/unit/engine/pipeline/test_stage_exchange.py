from __future__ import annotations

import pytest
import torch

from plait.engine.pipeline.stage_exchange import BufferPool, Exchange, receive_buffers
from plait.models.layers.shape_inference import TensorInfo
from plait.schedules.action import Action

CPU = torch.device("cpu")
SMALL, LARGE = TensorInfo((2, 3), torch.float32, True), TensorInfo((4,), torch.float64, False)
MASK, EMPTY = TensorInfo((5,), torch.bool, False), TensorInfo((0, 4), torch.float32, True)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("info", [SMALL, LARGE, MASK, EMPTY])
def test_a_receive_buffer_is_reused_for_any_shape(info: TensorInfo) -> None:
    pool = BufferPool(CPU)
    one = pool.take(LARGE, 40)
    pool.give_back(one)
    other = pool.take(info, 40)
    assert address(one) == address(other)
    assert (tuple(other.shape), other.dtype) == (info.shape, info.dtype)
    assert other.is_contiguous()
    assert address(pool.take(info, 40)) != address(other)
    assert address(pool.take(info, 41)) not in (address(one), address(other))
    assert len(pool.buffers) == 3


def test_receive_buffers_grow_with_messages_in_flight_only() -> None:
    pool = BufferPool(CPU)
    for _ in range(10):
        held = [pool.take(SMALL, 24), pool.take(SMALL, 24)]
        for buffer in held:
            pool.give_back(buffer)
    assert len(pool.buffers) == 2


def test_a_buffer_pool_recognises_views_of_its_buffers() -> None:
    pool = BufferPool(CPU)
    buffer = pool.take(SMALL, 24)
    assert pool.owns(buffer)
    assert pool.owns(buffer.detach()[1:].t())
    assert not pool.owns(buffer.clone())
    pool.give_back(buffer)
    assert pool.owns(buffer)  # it will be written again


def test_clearing_a_buffer_pool_forgets_all_buffers() -> None:
    pool = BufferPool(CPU)
    buffer = pool.take(SMALL, 24)
    pool.give_back(buffer)
    pool.clear()
    assert not pool.owns(buffer)
    assert len(pool.buffers) == 0
    assert address(pool.take(SMALL, 24)) != address(buffer)


@pytest.mark.parametrize(
    ("needs", "sizes"),
    [
        ({100}, {100: 100}),
        ({99, 50, 30}, {99: 100, 50: 100, 30: 30}),
        ({49}, {49: 49}),
        ({101}, {101: 101}),
        ({0}, {0: 1}),
        ({7, 12}, {7: 10, 12: 12}),
    ],
)
def test_buffers_of_about_the_size_are_kept_and_others_forgotten(
    needs: set[int], sizes: dict[int, int]
) -> None:
    pool = BufferPool(CPU)
    held = {size: pool.take(EMPTY, size) for size in (10, 100)}
    for buffer in held.values():
        pool.give_back(buffer)
    assert pool.fit(needs) == sizes
    kept = {10, 100} & set(sizes.values())
    assert {size for size, buffer in held.items() if pool.owns(buffer)} == kept
    assert len(pool.buffers) == len(kept)


def test_a_buffer_pool_does_not_forget_buffers_in_use() -> None:
    pool = BufferPool(CPU)
    lent, free = pool.take(EMPTY, 10), pool.take(EMPTY, 10)
    pool.give_back(free)
    pool.fit({1000})
    assert pool.owns(lent)
    pool.give_back(lent)
    assert len(pool.buffers) == 1
    pool.fit({1000})
    assert len(pool.buffers) == 0


def row(length: int) -> list[TensorInfo]:
    """What one stage sends of a micro-batch: hidden and, without a gradient, positions."""
    return [
        TensorInfo((length, 8), torch.float32, True),
        TensorInfo((length,), torch.int64, requires_grad=False),
    ]


def buffers_of(exchange: Exchange, action: str) -> list[torch.Tensor]:
    received = receive_buffers(Action.parse(action), exchange.crossing, exchange._sizes)
    return [exchange.pool.take(info, size) for info, size in received]


def test_micro_batches_of_a_step_share_buffers_of_the_longest() -> None:
    exchange = Exchange(0, {}, CPU)
    exchange.begin([[row(5), row(7), [*row(2), MASK]]])
    first = buffers_of(exchange, "1F0")
    assert [tuple(tensor.shape) for tensor in first] == [(5, 8), (5,)]
    assert [tensor.untyped_storage().nbytes() for tensor in first] == [7 * 8 * 4, 7 * 8]
    for tensor in first:
        exchange.pool.give_back(tensor)
    for action, shapes in {
        "1F1": [(7, 8), (7,)],
        "1F2": [(2, 8), (2,), (5,)],
        "0I2": [(2, 8)],
        "0I1": [(7, 8)],
    }.items():
        buffers = buffers_of(exchange, action)
        assert [tuple(tensor.shape) for tensor in buffers] == shapes
        for tensor in buffers:
            exchange.pool.give_back(tensor)
    assert len(exchange.pool.buffers) == 3
    exchange.begin([[row(6), row(4), row(3)]])
    assert address(buffers_of(exchange, "1F1")[0]) == address(first[0])
    assert len(exchange.pool.buffers) == 2
