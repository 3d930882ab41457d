from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks import (
    Count,
    Group,
    Mesh,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    shared_zeros,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8]
EVERY_DTYPE = [*DTYPES, torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn]
SHAPES: list[tuple[int, ...]] = [(6,), (4, 3), (0,), (3, 0)]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """What a rank hands in: a few small whole numbers, so that every dtype can hold sums and products."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "no error"


def alone() -> Group:
    return Group("dp", (5,), 0, None, Traffic(), 1.0)


OPS = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.mean(0),
    "product": lambda stack: stack.prod(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
}


def over_messages(group: Group) -> Group:
    """The same ranks, as if they were on several hosts."""
    return replace(group, transport=group.transport.over_torch())


WAYS = {
    "whole": (12, False),
    "ranges": (100_003, False),
    "exchange": (12, True),
    "backend": (100_000, True),
}
"""Elements of float64 on four ranks, and whether they send messages."""


@pytest.mark.parametrize("way", WAYS)
def test_all_reduce_in_place_and_elsewhere(rank_pool, way):
    elements, messages = WAYS[way]

    def body():
        mesh = Mesh(dp=4)
        group = over_messages(mesh.group("dp")) if messages else mesh.group("dp")
        answers = {}
        for op in OPS:
            before = mesh.traffic.snapshot()
            tensor = value(mesh.rank, (elements,))
            taken = group.transport.algorithm("all_reduce", tensor)
            other = all_reduce(tensor, group, op, out=torch.empty_like(tensor)).wait()
            assert torch.equal(tensor, value(mesh.rank, (elements,)))
            result = all_reduce(tensor, group, op).wait()
            answers[op] = taken, result is tensor, result, other, mesh.traffic.since(before)["dp"]
        return answers

    for answers in rank_pool.run(body, ranks=4):
        for op, (taken, same, result, other, traffic) in answers.items():
            expected = OPS[op](torch.stack([value(rank, (elements,)) for rank in range(4)]))
            assert taken == way
            assert same
            assert torch.equal(result, expected), op
            assert torch.equal(other, expected), op
            assert traffic == {"all_reduce": Count(2, 2 * 8 * elements)}


@pytest.mark.parametrize("messages", [False, True], ids=["whole", "exchange"])
def test_reduce_scatter_and_reduce(rank_pool, messages):
    def body():
        group = Mesh(dp=4).group("dp")
        group = over_messages(group) if messages else group
        answers = {}
        for op in OPS:
            mine = value(group.rank, (8, 3))
            out = torch.empty(2, 3, dtype=torch.float64)
            result = reduce_scatter(mine, group, op, out=out).wait()
            reduced = reduce(mine.clone(), group, op, destination=2).wait()
            own = reduce_scatter(mine, group, op, out=mine[2 * group.index :][:2]).wait()
            same = torch.equal(own, result) and out.data_ptr() == result.data_ptr()
            answers[op] = same, result, reduced
        return answers

    ranks = rank_pool.run(body, ranks=4)
    for op, combine in OPS.items():
        expected = combine(torch.stack([value(rank, (8, 3)) for rank in range(4)]))
        results = [answers[op] for answers in ranks]
        assert all(same for same, _, _ in results), op
        assert torch.equal(torch.cat([one for _, one, _ in results]), expected), op
        assert torch.equal(results[2][2], expected), op


def test_sums_are_the_same_bits_on_every_rank_and_in_every_round(rank_pool):
    def body(elements, messages):
        group = Mesh(dp=4).group("dp")
        group = over_messages(group) if messages else group
        mine = torch.randn(elements, generator=torch.Generator().manual_seed(group.rank))
        return [all_reduce(mine.clone(), group).wait() for _ in range(3)]

    for elements, messages in ((1000, False), (200_000, False), (1000, True), (200_000, True)):
        sums = [result for rank in rank_pool.run(body, elements, messages, ranks=4) for result in rank]
        assert all(torch.equal(result, sums[0]) for result in sums)
        handed_in = [torch.randn(elements, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        in_order = handed_in[0] + handed_in[1] + handed_in[2] + handed_in[3]
        assert torch.equal(sums[0], in_order) or (messages and elements == 200_000)  # the backend's own order


@pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
def test_small_bfloat16_sums_round_once(rank_pool, messages):
    def body():
        group = Mesh(dp=4).group("dp")
        group = over_messages(group) if messages else group
        mine = torch.tensor([256.0 if group.index == 0 else 1.0], dtype=torch.bfloat16)
        whole = all_reduce(mine.clone(), group).wait()
        return whole, reduce_scatter(mine.repeat(4), group).wait()

    for whole, one in rank_pool.run(body, ranks=4):
        # 256 + 1 is 256 in bfloat16, so rounding thrice gives 256
        assert whole.item() == one.item() == 260.0


@pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
@pytest.mark.parametrize("shape", [*SHAPES, ()], ids=str)
def test_all_reduce_sums_every_dtype_and_shape(rank_pool, shape, messages):
    def body():
        group = Mesh(dp=2).group("dp")
        group = over_messages(group) if messages else group
        return [all_reduce(value(group.rank, shape, dtype), group).wait() for dtype in DTYPES]

    for results in rank_pool.run(body, ranks=2):
        for dtype, result in zip(DTYPES, results, strict=True):
            expected = value(0, shape, dtype) + value(1, shape, dtype)
            assert result.dtype == dtype
            assert torch.equal(result, expected)


@pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathers_and_broadcasts_move_every_dtype_and_shape(rank_pool, shape, messages):
    double = (2 * shape[0], *shape[1:])

    def moved(group, dtype):
        mine, pair = value(group.rank, shape, dtype), value(group.rank, double, dtype)
        results = [
            all_gather(mine, group).wait(),
            all_to_all(pair, group).wait(),
            broadcast(mine.clone(), group, 1).wait(),
            gather(mine, group, 1).wait(),
            scatter(pair if group.index == 0 else None, group, out=torch.empty_like(mine)).wait(),
        ]
        return [None if tensor is None else tensor.to(torch.complex64) for tensor in results]

    def body():
        group = Mesh(dp=2).group("dp")
        group = over_messages(group) if messages else group
        return [moved(group, dtype) for dtype in EVERY_DTYPE]

    ranks = rank_pool.run(body, ranks=2)
    for dtype, *of_ranks in zip(EVERY_DTYPE, *ranks, strict=True):
        a, b = (value(rank, shape, dtype).to(torch.complex64) for rank in range(2))
        pair_a, pair_b = (value(rank, double, dtype).to(torch.complex64).chunk(2) for rank in range(2))
        both = torch.cat([a, b])
        expected = [
            [both, torch.cat([pair_a[0], pair_b[0]]), b, None, pair_a[0]],
            [both, torch.cat([pair_a[1], pair_b[1]]), b, both, pair_a[1]],
        ]
        for of_rank, expected_of_rank in zip(of_ranks, expected, strict=True):
            for got, wanted in zip(of_rank, expected_of_rank, strict=True):
                assert got is None if wanted is None else torch.equal(got, wanted), dtype


def test_a_zero_dimensional_tensor_counts_as_one_row(rank_pool):
    def body():
        group = Mesh(dp=2).group("dp")
        scalar = torch.tensor(float(group.index))
        sent = broadcast(scalar.clone(), group, 1).wait()
        return all_gather(scalar, group).wait().tolist(), sent.item(), sent.shape

    assert rank_pool.run(body, ranks=2) == [([0.0, 1.0], 1.0, torch.Size([]))] * 2


@pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
def test_collectives_accept_strided_tensors_and_outputs(rank_pool, messages):
    def body():
        group = Mesh(dp=2).group("dp")
        group = over_messages(group) if messages else group
        mine = value(group.rank, (4, 2))
        results = [all_reduce(mine.clone().t(), group).wait(), broadcast(mine.clone().t(), group, 1).wait()]
        results.append(all_gather(mine.t(), group, out=torch.empty(4, 4, dtype=mine.dtype).t()).wait())
        results.append(reduce_scatter(mine.t(), group, out=torch.empty(4, 1, dtype=mine.dtype).t()).wait())
        whole = torch.empty(8, 2, dtype=mine.dtype)
        whole[4 * group.index :][:4] = mine
        results.append(all_gather(whole[4 * group.index :][:4], group, out=whole).wait())
        return results

    a, b = value(0, (4, 2)), value(1, (4, 2))
    for index, results in enumerate(rank_pool.run(body, ranks=2)):
        one = (a + b).t()[index : index + 1]
        expected = [(a + b).t(), b.t(), torch.cat([a.t(), b.t()]), one, torch.cat([a, b])]
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("checked", [True, False])
def test_collectives_in_flight_at_once_do_not_mix(rank_pool, checked):
    def body():
        group = Mesh(dp=4).group("dp")
        sizes = [5, 300_000, 7, 50_000, 1]
        tensors = [torch.full((size,), float(10 * i + group.index)) for i, size in enumerate(sizes)]
        handles = [all_reduce(tensor, group, checked=checked) for tensor in tensors]
        gathered = all_gather(torch.tensor([float(group.index)]), group, checked=checked)
        result = gathered.wait()
        sums = [handle.wait() for handle in reversed(handles)][::-1]
        again = [handle.wait() for handle in handles]
        return [set(total.tolist()) for total in sums], result.tolist(), all(map(torch.equal, sums, again))

    expected = [{40.0 * i + 6} for i in range(5)]
    assert rank_pool.run(body, ranks=4) == [(expected, [0.0, 1.0, 2.0, 3.0], True)] * 4


def test_each_axis_sums_only_its_own_ranks(rank_pool):
    def body():
        mesh = Mesh(dp=2, tp=2)
        number = 10.0**mesh.rank
        sums = [
            all_reduce(torch.tensor([number]), mesh.group(axis)).wait().item()
            for axis in ("dp", "tp", "world")
        ]
        return sums, mesh.traffic.snapshot()

    results = rank_pool.run(body, ranks=4)
    assert [sums for sums, _ in results] == [
        [101.0, 11.0, 1111.0],
        [1010.0, 11.0, 1111.0],
        [101.0, 1100.0, 1111.0],
        [1010.0, 1100.0, 1111.0],
    ]
    counted = {axis: {"all_reduce": Count(1, 4)} for axis in ("dp", "tp", "world")}
    assert all(traffic == counted for _, traffic in results)


def test_traffic_counts_what_the_rank_hands_in(rank_pool):
    def body():
        mesh = Mesh(dp=2)
        group = mesh.group("dp")
        four = torch.ones(4)
        all_gather(four, group).wait()
        reduce_scatter(four, group).wait()
        all_to_all(four, group).wait()
        gather(four, group).wait()
        reduce(four.clone(), group).wait()
        broadcast(four.clone(), group).wait()
        scatter(four if group.index == 0 else None, group, out=torch.empty(2)).wait()
        barrier(group).wait()
        return mesh.traffic.snapshot()["dp"]

    first, second = rank_pool.run(body, ranks=2)
    kinds = ["all_gather", "reduce_scatter", "all_to_all", "gather", "reduce", "broadcast", "scatter"]
    assert first == {kind: Count(1, 16) for kind in kinds} | {"barrier": Count(1, 0)}
    assert second == first | {"scatter": Count(1, 0)}


def scatter_shared(group: Group) -> object:
    """Of tensors in shared memory; rank 2 has copied its own to other memory."""
    tensor = shared_zeros(2**18, torch.float32, torch.device("cpu"), group)
    return reduce_scatter(tensor.clone() if group.index == 2 else tensor, group)


MISMATCHES: dict[str, Callable[[Group], object]] = {
    "size": lambda group: all_reduce(torch.ones(4 + (group.index == 2)), group),
    "shape": lambda group: all_gather(torch.ones(*((2, 3) if group.index == 2 else (3, 2))), group),
    "dtype": lambda group: all_reduce(
        torch.ones(4, dtype=(torch.int64, torch.float64)[group.index == 2]), group
    ),
    "operation": lambda group: (all_to_all if group.index == 2 else all_gather)(torch.ones(4), group),
    "op": lambda group: all_reduce(torch.ones(4), group, "max" if group.index == 2 else "min"),
    "source": lambda group: broadcast(torch.ones(4), group, source=int(group.index == 2)),
    "barrier": lambda group: barrier(group) if group.index == 2 else all_reduce(torch.ones(4), group),
    "flaw of one": lambda group: all_gather(torch.ones(1), group, out=torch.ones(4 + (group.index == 2))),
    "memory": scatter_shared,
    "late in a long shape": lambda group: all_reduce(torch.ones(*[1] * 99, 1 + (group.index == 2)), group),
}


def test_a_mismatch_of_collectives_is_an_error_on_every_rank_and_later_calls_work(rank_pool):
    def body():
        mesh, found = Mesh(dp=4), {}
        group = mesh.group("dp")
        for what, call in MISMATCHES.items():
            before = mesh.traffic.snapshot()
            message = error_of(lambda: call(group))  # noqa: B023 (called at once)
            counted = mesh.traffic.since(before)
            found[what] = message, counted, all_reduce(torch.ones(1), group).wait().item()
        return found

    results = rank_pool.run(body, ranks=4)
    assert results == [results[0]] * 4
    assert results[0].keys() == MISMATCHES.keys()
    for what, (message, counted, after) in results[0].items():
        assert "the ranks of dp do not agree" in message, what
        assert "rank 2: " in message, what
        assert (counted, after) == ({}, 4.0), what


def test_a_mismatch_says_who_calls_what(rank_pool):
    def body():
        group = Mesh(dp=4).group("dp")
        return error_of(lambda: all_reduce(torch.ones(4, 2 + (group.index == 2)), group))

    assert (
        rank_pool.run(body, ranks=4)
        == [
            "the ranks of dp do not agree (ranks 0, 1, 3: all_reduce sum of float32[4, 2]; "
            "rank 2: all_reduce sum of float32[4, 3]): make the same call with the same shapes on each."
        ]
        * 4
    )


def test_collectives_with_invalid_arguments_on_every_rank_are_refused(rank_pool):
    def body():
        group = Mesh(dp=2).group("dp")
        return [
            error_of(lambda: all_reduce(torch.ones(2), group, "median")),
            error_of(lambda: all_reduce(torch.ones(2, dtype=torch.int64), group, "mean")),
            error_of(lambda: all_reduce(torch.ones(2, dtype=torch.complex64), group)),
            error_of(lambda: reduce_scatter(torch.ones(3), group)),
            error_of(lambda: all_to_all(torch.tensor(1.0), group)),
            error_of(lambda: broadcast(torch.ones(2), group, source=2)),
            error_of(lambda: all_gather(torch.ones(2), group, out=torch.ones(3))),
        ]

    expected = [
        "the reduction 'median' is none of sum, mean, product, min, max",
        "torch.int64 has no mean",
        "complex64 cannot be reduced",
        "dim 0 does not divide into 2 equal ranges",
        "dim 0 does not divide into 2 equal ranges",
        "indices 0 to 1 only",
        "float32[3] and not float32[4]",
    ]
    for messages in rank_pool.run(body, ranks=2):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_a_peer_that_is_gone_is_an_error_from_wait(rank_pool):
    def body():
        mesh = Mesh(dp=2, timeout=20)
        group = mesh.group("dp")
        if group.index == 1:
            mesh.close()
            del group, mesh
            return None
        handle = all_reduce(torch.ones(4), group, checked=False)
        return error_of(handle.wait), error_of(handle.wait)

    first, again = rank_pool.run(body, ranks=2)[0]
    assert "rank 0 waits for all_reduce over dp with 1: connection closed by peer" in first
    assert again == first


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(rank_pool):
    def body():
        mesh = Mesh(dp=2, timeout=0.3)
        group = mesh.group("dp")
        if group.index == 0:
            return error_of(lambda: all_reduce(torch.ones(4), group))
        return "absent"

    message = rank_pool.run(body, ranks=2)[0]
    assert "rank 0 waits for the consistency check of all_reduce sum of float32[4] over dp" in message


def test_a_rank_alone_needs_no_backend():
    group = alone()
    tensor = torch.arange(4.0)
    assert all_reduce(tensor, group, "mean").wait() is tensor
    assert reduce(tensor, group).wait() is tensor
    assert broadcast(tensor, group).wait() is tensor
    assert reduce_scatter(tensor, group).wait() is tensor
    assert torch.equal(all_gather(tensor, group).wait(), tensor)
    assert all_gather(torch.tensor(1.0), group).wait().shape == (1,)
    assert torch.equal(all_to_all(tensor, group).wait(), tensor)
    assert torch.equal(gather(tensor, group, out=torch.zeros(4)).wait(), tensor)
    assert torch.equal(scatter(tensor, group, out=torch.zeros(4)).wait(), tensor)
    assert barrier(group).wait() is None
    assert group.traffic.snapshot() == {}


def test_collectives_of_one_rank_refuse_invalid_arguments():
    with pytest.raises(CommunicationError, match=r"rank 5 cannot call broadcast from 1 .*indices 0 to 0"):
        broadcast(torch.ones(1), alone(), source=1)
