from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.errors import CommunicationError
from plait.ranks.collectives import all_reduce
from plait.ranks.failure.failure_log import FailureLog, FailureRecord, FailureTrace, failure_log_of_world
from plait.ranks.handle import Handle
from plait.ranks.mesh import Mesh
from plait.ranks.point_to_point import receive

NO_TIME = 0.0


def everyone(count: int, store: Any = None) -> list[FailureLog]:
    store = dist.HashStore() if store is None else store
    return [FailureLog(store, rank) for rank in range(count)]


def test_failure_records_lead_to_the_rank_that_wrote_none() -> None:
    zero, one, two, _ = everyone(4)
    two.record("1F0 from rank 3", (3,))
    one.record("0I0 from rank 2", (2,))
    zero.record("all", (1, 2, 3))
    trace = zero.search((1,), NO_TIME)
    assert trace.silent == (3,)
    assert trace.records == {
        1: FailureRecord("0I0 from rank 2", (2,)),
        2: FailureRecord("1F0 from rank 3", (3,)),
    }


def test_the_first_failure_record_of_a_rank_counts() -> None:
    zero, one = everyone(2)
    one.record("the first", (0,))
    one.record("a later one", (0,))
    assert zero.search((1,), NO_TIME) == FailureTrace({1: FailureRecord("the first", (0,))}, ())


def test_a_rank_that_searched_shares_its_result_with_later_searchers() -> None:
    """So that those who notice later need not wait again."""
    zero, one, _ = everyone(3)
    one.record("1F0 from rank 2", (2,))
    assert one.search((2,), NO_TIME).silent == (2,)
    before = time.monotonic()
    trace = zero.search((1,), 60.0)
    assert time.monotonic() - before < 30
    assert trace == FailureTrace({1: FailureRecord("1F0 from rank 2", (2,), (2,))}, (2,))


def test_a_search_for_the_failed_rank_waits_for_late_records() -> None:
    zero, one, _ = everyone(3)
    timer = threading.Timer(0.1, one.record, ("1F0 from rank 2", (0,)))
    timer.start()
    assert zero.search((1,), 30.0) == FailureTrace({1: FailureRecord("1F0 from rank 2", (0,))}, ())
    timer.join()


def test_a_search_takes_another_ranks_result_where_several_ranks_wrote_nothing() -> None:
    zero, one, _, _ = everyone(4)
    one.record("1F0 from rank 3", (3,))
    one.search((3,), NO_TIME)
    assert zero.search((1, 2, 3), 60.0).silent == (3,), "rank 2 may not have noticed yet"


def test_a_search_waits_longer_where_several_ranks_wrote_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.ranks.failure.failure_log._PATIENCE_WITH_SEVERAL", 30.0)
    zero, one, _ = everyone(3)
    timer = threading.Timer(0.1, one.record, ("all", (0, 2)))
    timer.start()
    assert zero.search((1, 2), NO_TIME).silent == (2,)
    timer.join()


def test_ranks_that_suspect_each_other_end_the_search() -> None:
    ranks = everyone(3)
    for log in ranks:
        log.record("all", tuple({0, 1, 2} - {log.rank}))
    assert ranks[0].search((1, 2), NO_TIME).silent == ()
    assert sorted(ranks[0].search((1, 2), NO_TIME).records) == [1, 2]


def test_failure_records_of_another_mesh_do_not_count() -> None:
    store = dist.HashStore()
    everyone(2, store)[1].record("the first mesh", (0,))
    zero, one = everyone(2, store)
    assert zero.search((1,), NO_TIME).silent == (1,)
    one.record("the second mesh", (0,))
    assert zero.search((1,), NO_TIME).records == {1: FailureRecord("the second mesh", (0,))}


class Gone:
    """A store whose host has died."""

    def __init__(self) -> None:
        self.hangs = threading.Event()

    def add(self, key: str, amount: int) -> int:
        return 1

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset by peer")

    def get(self, key: str) -> bytes:
        raise RuntimeError("connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self.hangs.wait(60)


def test_a_failure_log_does_not_wait_for_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.ranks.failure.failure_log._MOST_SECONDS", 0.05)
    store = Gone()
    log = FailureLog(store, 0)
    log.record("1F0 from rank 1", (1,))
    assert log.search((1,), NO_TIME) == FailureTrace({}, (1,))
    store.hangs.set()


class Deaf(Gone):
    """A store that has been cut off: from the call `name` on nothing comes back."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.unanswered: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.reach("set")

    def check(self, keys: list[str]) -> bool:
        self.reach("check")
        return False

    def reach(self, name: str) -> None:
        if self.unanswered or name == self.name:
            self.unanswered.append(name)
            self.hangs.wait(60)


@pytest.mark.parametrize("name", ["set", pytest.param("check", marks=pytest.mark.full)])
def test_a_failure_log_waits_once_for_a_store_that_does_not_answer(name: str) -> None:
    """Each wait comes on top of a timeout that has passed: there is one deadline for all, a share of it."""
    store = Deaf(name)
    log = FailureLog(store, 0, timeout=2.0)
    assert log.seconds_left() <= 0.2
    log.record("1F0 from rank 1", (1,))
    for _ in range(3):
        assert log.search((1, 2), 60.0) == FailureTrace({}, (1, 2))
    assert log.seconds_left() == 0
    assert store.unanswered == [name]
    store.hangs.set()


def test_a_search_for_the_failed_rank_ends_at_the_deadline() -> None:
    zero = FailureLog(dist.HashStore(), 0, timeout=2.0)
    zero.record("1F0 from rank 1", (1,))
    assert zero.search((1, 2), 3600.0).silent == (1, 2)


# ── in the errors of handles ──


def body_of_a_chain() -> str:
    """Rank 2 comes not; rank 1 waits for it, and rank 0 for rank 1."""
    mesh = Mesh(pp=3, timeout=3.0 if dist.get_rank() == 0 else 1.0)
    group = mesh.group("pp")
    all_reduce(torch.ones(1), mesh.group("world")).wait()
    if mesh.rank == 2:
        wait_for_ends(0, 1)
        return ""
    handle = receive(torch.ones(2), group, mesh.rank + 1, label=f"{mesh.rank + 1}F0")
    with pytest.raises(CommunicationError) as caught:
        handle.wait()
    store_of_the_world().set(f"ended-{mesh.rank}", "yes")
    return str(caught.value)


def store_of_the_world() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def wait_for_ends(*ranks: int) -> None:
    """Do nothing until these ranks have given up."""
    store_of_the_world().wait([f"ended-{rank}" for rank in ranks])


def test_a_timeout_error_names_the_rank_that_the_peer_waited_for(rank_pool: Any) -> None:
    zero, one, _ = rank_pool.run(body_of_a_chain, ranks=3)
    assert one == (
        "rank 1 waits for 2F0 from rank 2 over pp: no answer within 1 s; "
        "see what that rank is doing, or give the mesh more time."
    )
    assert zero.startswith("rank 0 waits for 1F0 from rank 1 over pp: ")
    assert "; rank 1 waited for 2F0 from rank 2 over pp in vain; " in zero
    assert "rank 2 " in zero.rpartition("in vain; ")[2]


def body_about() -> str:
    group = Mesh(tp=2, timeout=1.0).group("tp")
    all_reduce(torch.ones(4), group).wait()
    if group.index == 1:
        wait_for_ends(0)
        return ""
    handle = all_reduce(torch.ones(4), group, checked=False).about("gradient of head")
    with pytest.raises(CommunicationError) as caught:
        handle.wait()
    store_of_the_world().set("ended-0", "yes")
    return str(caught.value)


@pytest.mark.full
def test_a_timeout_error_names_the_purpose_of_the_operation(rank_pool: Any) -> None:
    assert rank_pool.run(body_about, ranks=2)[0].startswith(
        "rank 0 waits for all_reduce over tp with 1 (gradient of head): no answer within 1 s"
    )


def test_a_timeout_error_names_the_peer_where_it_wrote_no_record(rank_pool: Any) -> None:
    def fails() -> None:
        raise RuntimeError("Connection closed by peer")

    handle: Handle[None] = Handle(fails, lambda: None, "nothing", Mesh().group("tp"), 5)
    with pytest.raises(CommunicationError, match=r"closed by peer; it ended first, so look for its error\.$"):
        handle.wait()


def test_the_store_of_the_world_is_where_the_default_group_keeps_it(rank_pool: Any) -> None:
    """What is relied on: a private function of torch gives it, and it is one for all ranks."""

    def body() -> tuple[str, bool]:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"here-{dist.get_rank()}", "yes")
        store.wait(["here-0", "here-1"])
        return store.get("here-1").decode(), failure_log_of_world(dist.get_rank(), 1.0) is not None

    assert rank_pool.run(body, ranks=2) == [("yes", True)] * 2
    assert failure_log_of_world(0, 1.0) is None, "there is no world here"
