"""An all-to-all in ranges of different sizes, none among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks import Count, Group, Mesh, Traffic, all_reduce, all_to_all, all_to_all_uneven

SIZES = {
    "own ranges too": [[2, 0, 3], [1, 4, 0], [0, 2, 5]],
    "a rank without any": [[0, 0, 7], [0, 0, 0], [3, 0, 0]],
    "only to itself": [[0, 0, 0], [0, 4, 0], [0, 0, 0]],
    "none": [[0] * 3] * 3,
    "large": [[70_001, 3, 50_000], [0, 0, 1], [2, 300_000, 9]],
}
"""`SIZES[name][i][j]` elements go from index i to index j."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "no error"


def over_messages(group: Group) -> Group:
    """The same ranks, as if they were on several hosts."""
    return replace(group, transport=group.transport.over_torch())  # type: ignore[union-attr]


def sent_range(source: int, destination: int, size: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends to another: small whole numbers, which every dtype holds."""
    return ((torch.arange(size) + 3 * source + destination) % 7).to(dtype)


def handed_in(sizes: Sequence[Sequence[int]], index: int, dtype: torch.dtype) -> Tensor:
    return torch.cat([sent_range(index, peer, size, dtype) for peer, size in enumerate(sizes[index])])


def wanted_of(sizes: Sequence[Sequence[int]], index: int, dtype: torch.dtype) -> Tensor:
    return torch.cat([sent_range(peer, index, row[index], dtype) for peer, row in enumerate(sizes)])


def exchanged(
    sizes: Sequence[Sequence[int]], dtype: torch.dtype, messages: bool = False
) -> tuple[Tensor, bool, Tensor, Any]:
    """The result, whether another is the given `out` and equal, a third one strided, and the traffic."""
    mesh = Mesh(dp=len(sizes))
    group = over_messages(mesh.group("dp")) if messages else mesh.group("dp")
    mine = handed_in(sizes, group.index, dtype)
    sent, received = sizes[group.index], [row[group.index] for row in sizes]
    most = max(map(sum, sizes))
    result = all_to_all_uneven(mine, group, sent, received, most=most).wait()
    traffic = mesh.traffic.snapshot()["dp"]
    out = torch.empty_like(result)
    given = all_to_all_uneven(mine, group, sent, received, most=most, out=out, checked=False).wait()
    every_second = torch.stack([mine, mine], 1).view(-1)[::2]
    apart = torch.empty(2 * len(result), dtype=dtype)[::2]
    strided = all_to_all_uneven(every_second, group, sent, received, most=most, out=apart, checked=False)
    strided = strided.wait()
    same = given is out and strided is apart and torch.equal(given, result)
    return result, same, strided.contiguous(), traffic


@pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
@pytest.mark.parametrize("name", SIZES)
def test_all_to_all_uneven_joins_received_ranges_in_order_of_sending_rank(
    rank_pool: Any, name: str, messages: bool
) -> None:
    sizes = SIZES[name]
    for index, told in enumerate(rank_pool.run(exchanged, sizes, torch.float64, messages, ranks=3)):
        result, same, strided, traffic = told
        assert torch.equal(result, wanted_of(sizes, index, torch.float64))
        assert same
        assert torch.equal(strided, result)
        to_others = sum(size for peer, size in enumerate(sizes[index]) if peer != index)
        assert traffic == {"all_to_all": Count(1, 8 * to_others)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ranks_as", ["threads", "processes"])
def test_all_to_all_uneven_moves_every_dtype(rank_pool: Any, thread_ranks: Any, ranks_as: str) -> None:
    sizes = SIZES["own ranges too"]

    def body() -> list[Tensor]:
        results = [exchanged(sizes, dtype)[0] for dtype in DTYPES]
        assert [result.dtype for result in results] == DTYPES
        return [result.to(torch.complex64) for result in results]

    pool = thread_ranks if ranks_as == "threads" else rank_pool
    for index, results in enumerate(pool.run(body, ranks=3)):
        for dtype, result in zip(DTYPES, results, strict=True):
            assert torch.equal(result, wanted_of(sizes, index, dtype).to(torch.complex64)), dtype


def test_equal_sizes_give_what_all_to_all_gives(thread_ranks: Any) -> None:
    def body() -> bool:
        group = Mesh(dp=3).group("dp")
        mine = torch.arange(12.0) + 100 * group.index
        equal, uneven = all_to_all(mine, group), all_to_all_uneven(mine, group, [4] * 3, [4] * 3)
        return torch.equal(equal.wait(), uneven.wait())

    assert thread_ranks.run(body, ranks=3) == [True] * 3


@pytest.mark.parametrize("ranks_as", ["threads", "processes"])
def test_several_uneven_all_to_alls_may_be_in_flight(
    rank_pool: Any, thread_ranks: Any, ranks_as: str
) -> None:
    names = ["own ranges too", "none", "large", "a rank without any"]

    def body() -> list[Tensor]:
        group = Mesh(dp=3).group("dp")
        handles = []
        for name in names:
            sent, received = SIZES[name][group.index], [row[group.index] for row in SIZES[name]]
            mine = handed_in(SIZES[name], group.index, torch.float32)
            most = max(map(sum, SIZES[name])) if name != "none" else None
            handles.append(all_to_all_uneven(mine, group, sent, received, most=most, checked=False))
            assert all_reduce(torch.ones(2), group, checked=False).wait().tolist() == [3.0, 3.0]
        return [handle.wait() for handle in reversed(handles)][::-1]

    pool = thread_ranks if ranks_as == "threads" else rank_pool
    for index, results in enumerate(pool.run(body, ranks=3)):
        for name, result in zip(names, results, strict=True):
            assert torch.equal(result, wanted_of(SIZES[name], index, torch.float32)), name


def sends(sent: Sequence[int], received: Sequence[int], dtype: torch.dtype = torch.float32) -> Any:
    def call(group: Group) -> object:
        tensor = torch.ones(sum(sent), dtype=dtype)
        return all_to_all_uneven(tensor, group, sent, received)

    return call


UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "size": (
        sends([1, 3], [1, 2]),
        sends([2, 0], [4, 0]),
        "all_to_all in uneven ranges of float32: rank 0 sends 3 elements to rank 1, which expects 4): give "
        "the same size on both.",
    ),
    "dtype": (
        sends([1, 3], [1, 2]),
        sends([2, 0], [3, 0], torch.float64),
        "rank 0: all_to_all in uneven ranges of float32; rank 1: all_to_all in uneven ranges of float64",
    ),
    "operation": (
        sends([2, 2], [2, 2]),
        lambda group: all_to_all(torch.ones(4), group),
        "rank 0: all_to_all in uneven ranges of float32; rank 1: all_to_all of float32[4]",
    ),
    "most": (
        lambda group: all_to_all_uneven(torch.ones(4), group, [1, 3], [1, 2], most=4),
        lambda group: all_to_all_uneven(torch.ones(2), group, [2, 0], [3, 0], most=2),
        "in uneven ranges with most=4 of float32; rank 1: all_to_all in uneven ranges with most=2 of float32",
    ),
    "more than most": (
        lambda group: all_to_all_uneven(torch.ones(4), group, [1, 3], [1, 2], most=2),
        sends([2, 0], [3, 0]),
        "4 elements are sent and `most` is 2",
    ),
    "flaw of one": (
        sends([1, 3], [1, 2]),
        sends([2, 0], [3]),
        "rank 1: all_to_all in uneven ranges of float32 but 2 ranges are sent and 1 received, and the group "
        "has 2 ranks",
    ),
}


@pytest.mark.parametrize("ranks", ["thread_ranks", "rank_pool"])
def test_calls_that_do_not_agree_are_an_error_on_every_rank_and_harm_nothing(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    def body() -> list[tuple[str, Any, float]]:
        mesh, found = Mesh(dp=2), []
        group = mesh.group("dp")
        for first, second, _ in UNLIKE.values():
            before = mesh.traffic.snapshot()
            message = error_of(lambda: (second if group.index else first)(group))  # noqa: B023 (called at once)
            counted = mesh.traffic.since(before)
            found.append((message, counted, all_reduce(torch.ones(1), group).wait().item()))
        return found

    one, two = request.getfixturevalue(ranks).run(body, ranks=2)
    assert one == two
    for (message, *after), (_, _, wanted) in zip(one, UNLIKE.values(), strict=True):
        assert "the ranks of dp do not agree" in message
        assert wanted in message
        assert after == [{}, 2.0]


def test_ranks_as_threads_report_uneven_sizes_that_do_not_match(thread_ranks: Any) -> None:
    def body() -> str:
        group = Mesh(dp=2).group("dp")
        sent, received = ([0, 2], [0, 1]) if group.index == 0 else ([1, 0], [3, 0])
        tensor = torch.ones(sum(sent))
        return error_of(all_to_all_uneven(tensor, group, sent, received, checked=False).wait)

    wanted = "index 0 sends 2 elements to index 1, which expects 3"
    assert all(wanted in message for message in thread_ranks.run(body, ranks=2))


def test_threads_keep_no_sizes_of_calls_that_are_over(thread_ranks: Any) -> None:
    def body() -> int:
        group = Mesh(dp=2).group("dp")
        sizes = [1, 2] if group.index == 0 else [2, 1]
        for _ in range(3):
            all_to_all_uneven(torch.ones(3), group, sizes, sizes, checked=False).wait()
        return len(group.transport._posted._range_sizes)  # type: ignore[union-attr]

    assert thread_ranks.run(body, ranks=2) == [0, 0]


def test_a_guard_compares_the_sizes_of_an_uneven_all_to_all_and_is_counted(rank_pool: Any) -> None:
    def body(expected: int) -> tuple[str, Any]:
        mesh = Mesh(dp=2, guarded=True)
        group = mesh.group("dp")
        sent, received = ([0, 2], [0, 1]) if group.index == 0 else ([1, 0], [expected, 0])
        tensor = torch.ones(sum(sent))
        message = error_of(lambda: all_to_all_uneven(tensor, group, sent, received, checked=False).wait())
        return message, mesh.traffic.snapshot().get("dp")

    assert all("which expects 3" in message for message, _ in rank_pool.run(body, 3, ranks=2))
    guard = {"guard": Count(1, 256 + 2 * 16)}
    assert rank_pool.run(body, 2, ranks=2) == [
        ("no error", guard | {"all_to_all": Count(1, 8)}),
        ("no error", guard | {"all_to_all": Count(1, 4)}),
    ]


WRONG: dict[str, tuple[Callable[[Group], object], str]] = {
    "dims": (
        lambda group: all_to_all_uneven(torch.ones(2, 2), group, [2, 2], [2, 2]),
        "the tensor has 2 dims and not 1",
    ),
    "sum": (
        lambda group: all_to_all_uneven(torch.ones(5), group, [2, 2], [2, 2]),
        "the ranges sent have 4 elements and the tensor 5",
    ),
    "count": (
        lambda group: all_to_all_uneven(torch.ones(4), group, [4], [2, 2]),
        "1 ranges are sent and 2 received, and the group has 2 ranks",
    ),
    "negative": (
        lambda group: all_to_all_uneven(torch.ones(4), group, [5, -1], [2, 2]),
        "sizes are negative (sent [5, -1], received [2, 2])",
    ),
    "own": (
        lambda group: all_to_all_uneven(torch.ones(4), group, [2, 2], [3 - group.index, 2 + group.index]),
        "it sends 2 elements to itself and receives 3",
    ),
    "out": (
        lambda group: all_to_all_uneven(torch.ones(4), group, [2, 2], [2, 2], out=torch.ones(5)),
        "float32[5] and not float32[4]",
    ),
}


def test_all_to_all_uneven_refuses_wrong_sizes(thread_ranks: Any) -> None:
    def body() -> list[str]:
        group = Mesh(dp=2).group("dp")
        return [error_of(lambda: call(group)) for call, _ in WRONG.values()]  # noqa: B023 (called at once)

    for messages in thread_ranks.run(body, ranks=2):
        for message, (_, wanted) in zip(messages, WRONG.values(), strict=True):
            assert wanted in message
            assert "all_to_all in uneven ranges of float32" in message


def test_all_to_all_uneven_on_one_rank_returns_its_own_tensor() -> None:
    group = Group("dp", (5,), 0, None, Traffic(), 1.0)
    tensor = torch.arange(4.0)
    assert all_to_all_uneven(tensor, group, [4], [4]).wait() is tensor
    out = torch.zeros(4)
    assert all_to_all_uneven(tensor, group, [4], [4], out=out).wait().data_ptr() == out.data_ptr()
    assert torch.equal(out, tensor)
    assert group.traffic.snapshot() == {}
    with pytest.raises(CommunicationError, match=r"rank 5 cannot call .* 3 elements and the tensor 4"):
        all_to_all_uneven(tensor, group, [3], [3])
