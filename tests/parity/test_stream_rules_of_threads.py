"""NCCL's rules among threads: a breach is an error or a wrong number, whenever operations complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parity.ruled_threads import run_ruled_threads
from parity.stream_rules import Completion, StreamRules
from plait.errors import CommunicationError, RankError
from plait.ranks.collectives import (
    all_gather,
    all_reduce,
    all_to_all_uneven,
    barrier,
    broadcast,
    reduce_scatter,
)
from plait.ranks.launch.rank_threads import run_threads
from plait.ranks.mesh import Mesh
from plait.ranks.point_to_point import receive, send

COMPLETIONS: tuple[Completion, ...] = ("early", "late", 1, 2, 3)


def run(body: Callable[..., Any], completion: Completion = "late", ranks: int = 2, **options: bool) -> Any:
    return run_ruled_threads(body, (), ranks, 1, StreamRules(completion, **options))


def group(axis: str = "dp") -> Any:
    mesh = Mesh(dp=2) if axis == "dp" else Mesh(pp=2)
    return mesh.group(axis)


def own(index: int, size: int = 4) -> torch.Tensor:
    return torch.arange(float(size)) + 10 * index


def swapped(mine: torch.Tensor, dp: Any, odd: int = 0, **options: Any) -> Any:
    """Rank 0 sends its four numbers to rank 1, which expects `odd` more, keeps three and sends one."""
    sent, received = ([0, 4], [0, 1]) if dp.index == 0 else ([1, 3], [4 + odd, 3])
    return all_to_all_uneven(mine, dp, sent, received, checked=False, **options)


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_collectives_under_stream_rules_give_the_results_without_them(completion: Completion) -> None:
    def body() -> list[torch.Tensor]:
        dp = group()
        mine = own(dp.index)
        total = all_reduce(mine.clone(), dp, checked=False)
        whole = torch.zeros(8)
        whole[4 * dp.index : 4 * dp.index + 4] = mine
        gathered = all_gather(whole[4 * dp.index : 4 * dp.index + 4], dp, out=whole, checked=False)
        one = reduce_scatter(mine.clone(), dp, checked=False)
        told = broadcast(mine.clone(), dp, 1, checked=False)
        uneven = swapped(mine.clone(), dp)
        barrier(dp, checked=False).wait()
        return [told.wait(), one.wait(), gathered.wait(), total.wait(), uneven.wait()]

    for ours, theirs in zip(run(body, completion), run_threads(body, (), 2, 1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_output_is_nan_until_it_is_awaited() -> None:
    def body() -> tuple[bool, bool]:
        dp = group()
        handle = all_reduce(total := own(dp.index), dp, checked=False)
        before = bool(total.isnan().all())
        return before, bool(handle.wait().isnan().any())

    assert run(body) == [(True, False)] * 2


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_writing_to_the_input_of_a_running_operation_is_an_error(completion: Completion) -> None:
    def body() -> None:
        dp = group()
        handle = all_gather(mine := own(dp.index), dp, checked=False)
        if dp.index == 0:
            mine.add_(1)
        handle.wait()

    with pytest.raises(CommunicationError, match=r"rank 0 wrote to the input of all_gather"):
        run(body, completion)


def test_an_uneven_all_to_all_keeps_the_rules() -> None:
    def body(touch: str) -> tuple[bool, list[float]]:
        dp = group()
        out = torch.zeros(1 if dp.index == 0 else 7)
        handle = swapped(mine := own(dp.index), dp, out=out)
        before = bool(out.isnan().all())
        if touch == "write" and dp.index == 1:
            mine.add_(1)
        return before, [] if touch == "forget" else handle.wait().tolist()

    assert run(lambda: body("nothing")) == [(True, [10.0]), (True, [0.0, 1, 2, 3, 11, 12, 13])]
    with pytest.raises(CommunicationError, match="rank 1 wrote to the input of all_to_all in uneven ranges"):
        run(lambda: body("write"))
    with pytest.raises(RankError, match=r"rank . ended and has not waited for all_to_all in uneven ranges"):
        run(lambda: body("forget"))


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_messages_of_different_sizes_are_an_error_under_stream_rules(completion: Completion) -> None:
    def body() -> str:
        dp = group()
        with pytest.raises(CommunicationError) as caught:
            swapped(own(dp.index), dp, odd=1).wait()
        return str(caught.value)

    wanted = "index 0 sends 4 elements to index 1, which expects 5"
    assert all(wanted in told for told in run(body, completion))


@pytest.mark.parametrize("what", ["input", "output"])
def test_freeing_memory_of_a_running_operation_is_an_error(what: str) -> None:
    def body() -> None:
        dp = group()
        mine, whole = own(dp.index), torch.empty(8)
        handle = all_gather(mine, dp, out=whole, checked=False)
        (mine if what == "input" else whole).untyped_storage().resize_(0)
        handle.wait()

    with pytest.raises(CommunicationError, match=f"freed the {what} of all_gather"):
        run(body)


def test_an_operation_that_is_never_awaited_is_an_error() -> None:
    def body() -> None:
        dp = group()
        first, second = (all_reduce(own(dp.index), dp, checked=False) for _ in range(2))
        second.wait()
        del first

    with pytest.raises(RankError, match=r"rank 0 ended and has not waited for all_reduce .*dp, 1"):
        run(body)


def test_other_calls_on_one_rank_are_an_error_under_stream_rules() -> None:
    def body() -> None:
        dp = group()
        (all_reduce if dp.index else all_gather)(own(dp.index), dp, checked=False).wait()

    with pytest.raises(CommunicationError, match=r"different calls: all_gather .* and all_reduce"):
        run(body)


def both_ways() -> list[float]:
    """Each rank posts its receive first, and then sends."""
    pp = group("pp")
    received = receive(torch.empty(4), pp, 1 - pp.index, label=f"{pp.index}F0")
    sent = send(own(pp.index), pp, 1 - pp.index, label=f"{1 - pp.index}F0")
    sent.wait()
    return received.wait().tolist()


def test_sends_in_both_directions_on_one_communicator_deadlock() -> None:
    """As torch makes one for a pair of ranks; without the rules nothing is wrong."""
    assert run_threads(both_ways, (), 2, 1) == [[10, 11, 12, 13], [0, 1, 2, 3]]
    with pytest.raises(CommunicationError) as caught:
        run(both_ways)
    told = str(caught.value)
    assert "deadlock on streams: " in told
    assert "rank 0 has 1F0 from rank 0 to rank 1 (pp, 1) behind 0F0 from rank 1" in told
    assert "rank 1 has 0F0 from rank 1 to rank 0 (pp, 1) behind 1F0 from rank 0" in told


def in_a_chain() -> None:
    """Rank 1 posts a receive from rank 0 and sends to rank 2 meanwhile."""
    pp = Mesh(pp=3).group("pp")
    if pp.index == 1:
        first = receive(torch.empty(4), pp, 0)
        send(own(1), pp, 2).wait()
        first.wait()
    elif pp.index == 0:
        receive(torch.empty(4), pp, 2).wait()
        send(own(0), pp, 1).wait()
    else:
        receive(torch.empty(4), pp, 1).wait()
        send(own(2), pp, 0).wait()


def test_a_bound_device_makes_one_communicator_for_all_pairs() -> None:
    run(in_a_chain, ranks=3)
    with pytest.raises(CommunicationError, match="deadlock on streams"):
        run(in_a_chain, ranks=3, device_bound=True)


def test_collectives_of_two_groups_deadlock_only_if_awaited_in_two_orders() -> None:
    """On a GPU each rank's streams are independent: only waits in two orders hang."""

    def body(waits_first: bool) -> None:
        mesh = Mesh(dp=2)
        groups = [mesh.group("shard"), mesh.group("dp")][:: 1 if mesh.rank else -1]
        handles = []
        for each in groups:
            handles.append(all_reduce(own(mesh.rank), each, checked=False))
            if waits_first:
                handles[-1].wait()
        for handle in handles:
            handle.wait()

    run(lambda: body(waits_first=False))
    with pytest.raises(
        CommunicationError, match=r"deadlock on streams: rank . starts all_reduce .* after its wait for"
    ):
        run(lambda: body(waits_first=True))


def test_a_breach_of_a_stream_rule_is_a_communication_error() -> None:
    def body() -> str:
        dp = group()
        handle = all_gather(mine := own(dp.index), dp, checked=False)
        mine.zero_()
        with pytest.raises(CommunicationError) as caught:
            handle.wait()
        return str(caught.value)

    assert all("wrote to the input" in told for told in run(body))


def test_a_seed_completes_operations_in_the_same_order_again() -> None:
    def orders(seed: int) -> list[Any]:
        def body() -> list[bool]:
            dp = group()
            handles = [all_reduce(own(dp.index), dp, checked=False) for _ in range(6)]
            seen = [not bool(handle._finish().isnan().any()) for handle in handles]
            for handle in handles:
                handle.wait()
            return seen

        return run(body, seed)  # type: ignore[no-any-return]

    assert orders(1) == orders(1)
    assert len({str(orders(seed)) for seed in range(8)}) > 1
