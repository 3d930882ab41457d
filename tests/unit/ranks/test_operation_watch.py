"""On NCCL a wait raises no error: a thread sees that an operation does not finish, and ends the rank."""

import dataclasses
import gc
import pickle
import queue
import sys
import threading
import weakref
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clock import Clock

from plait import Mesh
from plait.errors import CommunicationError
from plait.ranks import all_reduce
from plait.ranks.failure import operation_watch
from plait.ranks.failure.operation_watch import OperationWatch, write_flight_record
from plait.ranks.transport.torch_distributed import set_timeout


class Event:
    """Stands in for an event on a GPU's stream."""

    def __init__(self, done: bool = False) -> None:
        self.done, self.looks = done, threading.Semaphore(0)

    def is_done(self) -> bool:
        self.looks.release()
        return self.done


class Operation:
    """Stands in for one that was waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_failure(self, cause: Exception) -> None:
        self.log.append(f"recorded {self.name}")

    def error_of(self, cause: Exception) -> CommunicationError:
        self.log.append(f"searched {self.name}")
        return CommunicationError(f"rank 3 waits for {self.name}: {cause}.")


def watch_of(events: Iterable[Event], timeout: float = 0.2) -> tuple[OperationWatch, "queue.Queue[int]"]:
    """A watch that takes its events from a list, and where it puts the exit code."""
    ended: queue.Queue[int] = queue.Queue()
    following = iter(events)
    return OperationWatch(3, timeout, lambda: next(following), ended.put), ended  # type: ignore[arg-type,return-value]


def test_the_watch_names_the_oldest_unfinished_operation(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "record-"))
    watch, ended = watch_of([Event(done=True), Event(), Event()])
    log: list[str] = []
    for name in ("1F0", "1F1", "1F2"):
        watch.add(Operation(name, log))
    assert ended.get(timeout=10) == 1
    assert log == ["recorded 1F1", "searched 1F1"]  # for the other ranks first
    said = capfd.readouterr().err
    assert said.startswith("plait: rank 3 waits for 1F1: timed out.\n")
    assert (
        "test_the_watch_names_the_oldest_unfinished_operation" in said
    )  # the stack of the thread that trains
    assert said.rstrip().endswith(f"plait: torch's flight record is in {tmp_path / 'record-3'}.")


def test_each_finished_operation_restarts_the_timeout_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda now: None)
    monkeypatch.setattr(operation_watch, "time", clock)
    events = [Event() for _ in range(4)]
    watch, ended = watch_of(events, timeout=0.04)  # of the clock, which stands; the watch looks every 0.01 s
    for _ in events:
        watch.add(Operation("", []))
    for event in events:
        for _ in range(2):  # at the second look its time has begun
            assert event.looks.acquire(timeout=60)
        clock.now += 0.03
        event.done = True
    assert ended.empty()
    watch.close()


def body() -> tuple[str, int, bool]:
    """Rank 0's all-reduce is done for the host and not for its device; rank 1 waits for another message."""
    mesh = Mesh(tp=2, timeout=1.0)
    group = mesh.group("tp")
    watch, ended = watch_of(iter(Event, None), timeout=0.5)
    watched = dataclasses.replace(group, operation_watch=watch)
    result = all_reduce(torch.ones(4), watched if mesh.rank == 0 else group, checked=False).wait()
    gone = weakref.ref(result)
    del result
    gc.collect()
    if mesh.rank == 1:
        assert group.failure_log is not None
        group.failure_log.record("1F0 from rank 5 over pp", (5,))
        return "", 0, gone() is None
    path = Path(f"{Path.cwd()}/stderr")
    with path.open("w+") as sys.stderr:
        code = ended.get(timeout=10)
    sys.stderr = sys.__stderr__
    said = path.read_text()
    path.unlink()
    return said, code, gone() is None


def test_the_error_of_a_watch_names_the_first_failed_rank(
    rank_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure log is that of errors on Gloo; the watch keeps no tensor alive."""
    monkeypatch.chdir(tmp_path)
    (said, code, gone), (_, _, other) = rank_pool.run(body, ranks=2)
    assert said.splitlines()[0] == (
        "plait: rank 0 waits for all_reduce over tp with 1: no answer within 1 s; rank 1 waited for 1F0 "
        "from rank 5 over pp in vain; see what rank 5 is doing, or give the mesh more time."
    )
    assert code == 1
    assert gone
    assert other


def test_the_flight_record_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is relied on: a private function of torch, and the name of its file."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "record-"))
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    path = write_flight_record(7)
    assert path is None or ("entries" in pickle.loads((tmp_path / "record-7").read_bytes()))


def with_another_timeout() -> bool:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    set_timeout(group, torch.device("cpu"), 0.2)
    if dist.get_rank() == 1:
        return True
    try:
        dist.barrier(group)
    except RuntimeError as error:
        return "200ms" in str(error)
    return False


def test_the_timeout_of_a_device_type_can_be_changed(rank_pool: Any) -> None:
    """What is relied on: `Backend.set_timeout`, which had another name before."""
    assert all(rank_pool.run(with_another_timeout, ranks=2))
