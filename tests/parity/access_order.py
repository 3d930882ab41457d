"""A check that conflicting accesses of memory are ordered on a GPU: a vector clock per stream and thread.

Ranks run as threads under NCCL's rules, and their CPU tensors stand for a GPU's, except those that
`plait.ranks.accelerator` allocates for the host. A *lane* is what runs by itself: the compute stream of a
rank, its stream of a communicator, a thread. Each access (a range of bytes of a storage) has a position on
its lane; each lane knows up to which position it comes after the others:

- an operation of torch runs on the compute stream, after what its thread had done before;
- an operation of a group runs on its communicator's stream, after what was on the compute stream by then; a
  wait puts it before what the compute stream does next;
- events, synchronisation, and reading a number put the compute stream before what a thread does next;
- freed storage may be used anew by the compute stream at once.

Two accesses of which one is a write, and neither comes after the other, are a race, whichever was first here.
The algorithm is that of race detectors of threads: Flanagan and Freund 2009, "FastTrack".
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plait
from parity import stream_rules, stream_transport
from parity.stream_rules import Part, StreamOperation, StreamRules
from plait.checkpoint import saving
from plait.ranks import accelerator, gpu_sharing, mesh, rank_device
from plait.ranks.accelerator import StreamEvent
from plait.ranks.transport.threads.transport import RankThread, current_thread_rank

SOURCE = Path(plait.__file__).parent
RULES = {Path(one.__file__ or "") for one in (stream_rules, stream_transport)}
LOCAL = SOURCE / "ranks" / "transport" / "local"
Lane: TypeAlias = Hashable
READ_BY_HOST = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
ON_CPU = ("ranks/text_collectives.py", "tensor/parallel/embedding_and_norm.py")
"""Files whose numbers are in CPU memory, or not read where there is a GPU."""
WITHOUT_ACCESS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")


@dataclass(frozen=True)
class Access:
    """A read or a write of the bytes `start … end` of a storage."""

    lane: Lane
    position: int
    start: int
    end: int
    writes: bool
    what: str

    def conflicts(self, other: Access) -> bool:
        overlap = self.start < other.end and other.start < self.end
        return overlap and (self.writes or other.writes) and self.lane != other.lane

    def replaces(self, other: Access) -> bool:
        """Whether what comes after this access comes after the `other` as well."""
        inside = self.start <= other.start and other.end <= self.end
        return inside and self.lane == other.lane and (self.writes or not other.writes)


class AccessOrder:
    """The accesses of all ranks, and the races among them."""

    def __init__(self) -> None:
        self.clocks: dict[Lane, dict[Lane, int]] = defaultdict(lambda: defaultdict(int))
        """By lane, up to which position it comes after each other lane."""
        self.accesses: dict[int, list[Access]] = defaultdict(list)
        """By storage."""
        self.races: list[str] = []
        self.count = 0
        self._storages: dict[int, torch.UntypedStorage] = {}
        """All that were accessed: none is freed, so that none gets the address of another."""
        self._host: set[int] = set()

    # ── lanes ──

    def after(self, lane: Lane, clock: dict[Lane, int]) -> None:
        """What `lane` does next comes after all that `clock` covers."""
        own = self.clocks[lane]
        for other, position in clock.items():
            own[other] = max(own[other], position)

    def advance(self, lane: Lane) -> None:
        """Begin the next position of a lane, after what this thread has done."""
        self.after(lane, self.clocks[thread()])
        self.clocks[lane][lane] += 1

    def synchronize(self) -> None:
        """This thread waits for its rank's compute stream."""
        self.after(thread(), self.clocks[compute()])

    # ── memory ──

    def of_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def allocate_on_host(self, tensor: Tensor) -> Tensor:
        """The tensor is in CPU memory where ranks have a GPU."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        self._host.add(storage._cdata)
        return tensor

    def access(self, lane: Lane, tensor: Tensor, what: str, *, writes: bool) -> None:
        if tensor.is_meta or not tensor.numel():
            return
        start = tensor.storage_offset() * tensor.element_size()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (steps + 1) * tensor.element_size()
        self._note(tensor.untyped_storage(), Access(lane, self.clocks[lane][lane], start, end, writes, what))

    def free(self, storage: torch.UntypedStorage) -> None:
        """The compute stream may use the memory anew."""
        lane = compute()
        self.advance(lane)
        self._note(storage, Access(lane, self.clocks[lane][lane], 0, storage.nbytes(), True, "freeing"))
        self.accesses.pop(storage._cdata)

    def _note(self, storage: torch.UntypedStorage, new: Access) -> None:
        self.count += 1
        self._storages.setdefault(storage._cdata, storage)
        earlier, clock = self.accesses[storage._cdata], self.clocks[new.lane]
        for old in earlier:
            if new.conflicts(old) and clock[old.lane] < old.position:
                race = f"rank {rank_of(new.lane)}: {new.what} is not ordered after {old.what}"
                self.races.append(race)
        earlier[:] = [old for old in earlier if not new.replaces(old)]
        earlier.append(new)


def thread() -> Lane:
    return threading.current_thread()


def rank_of(lane: Any) -> int | str:
    """The rank of a lane; the name of a thread that is none of a rank."""
    if isinstance(lane, tuple):
        return int(lane[-1])
    return lane.rank.rank if isinstance(lane, RankThread) else str(lane.name)


def compute() -> Lane:
    """The compute stream of this thread's rank."""
    rank = current_thread_rank()
    return "compute", -1 if rank is None else rank.rank


class OrderedRules(StreamRules):
    """NCCL's rules that note what operations of groups access."""

    def __init__(self, order: AccessOrder) -> None:
        super().__init__("early")
        self.order = order
        self._ends: dict[tuple[StreamOperation, int], dict[Lane, int]] = {}

    def queue(self, operation: StreamOperation, index: int, part: Part) -> None:
        lane, order = ("stream", operation.communicator, operation.ranks[index]), self.order
        order.after(lane, order.clocks[compute()])
        order.advance(lane)
        for tensor, writes in ((part.read, False), (part.written, True)):
            if tensor is not None:
                order.access(
                    lane, tensor, f"{operation.name} ({'writes' if writes else 'reads'})", writes=writes
                )
        self._ends[operation, index] = dict(order.clocks[lane])
        super().queue(operation, index, part)

    def wait(self, operation: StreamOperation, index: int) -> None:
        super().wait(operation, index)
        self.order.after(compute(), self._ends.pop((operation, index), {}))


class ComputeAccesses(TorchDispatchMode):
    """Notes what the operations of torch on this thread access."""

    def __init__(self, order: AccessOrder) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        where = caller(sys._getframe(1))
        if where is None or name in WITHOUT_ACCESS or func.is_view:
            return result
        order, written = self.order, list(_written(func, args, kwargs))
        given = list(_tensors((args, kwargs)))
        known = {one.untyped_storage()._cdata for one in given}
        fresh = [one for one in _tensors(result) if one.untyped_storage()._cdata not in known]
        only_host = bool(given) and all(map(order.of_host, given))
        reads_number = bool(written) and all(map(order.of_host, written)) and name != "copy_"
        on_host = only_host or reads_number
        if reads_number and not only_host:
            order.synchronize()  # a number of the GPU is an argument
        lane = thread() if on_host else compute()
        order.advance(lane)
        for one in given:
            order.access(lane, one, f"{name} in {where} (reads)", writes=False)
        for one in (*written, *fresh):
            order.access(lane, one, f"{name} in {where} (writes)", writes=True)
        if on_host:
            for one in fresh:
                order.allocate_on_host(one)
        waits = (
            name == "copy_"
            and any(map(order.of_host, given))
            and not kwargs.get("non_blocking", any(args[2:]))
        )
        if waits or (name in READ_BY_HOST and where.partition(" ")[0] not in ON_CPU):
            order.synchronize()
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(tree) if isinstance(one, Tensor) and not one.is_meta)


def caller(frame: FrameType | None) -> str | None:
    """The innermost function of plait; None within the rules; "user"."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path in RULES or path.is_relative_to(LOCAL):
            return None
        if path.is_relative_to(SOURCE) and path.name not in ("accelerator.py", "rank_threads.py"):
            return f"{path.relative_to(SOURCE)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "user"


def stand_for_gpus(monkeypatch: pytest.MonkeyPatch, order: AccessOrder) -> None:
    """Let `plait.ranks.accelerator` take all tensors for a GPU's, except those it allocates for the host."""
    for name, new in _device_room(order).items():
        original = getattr(accelerator, name)
        for module in [one for path, one in sys.modules.items() if path.startswith("plait.")]:
            if getattr(module, name, None) is original and module not in (
                accelerator,
                gpu_sharing,
                mesh,
                rank_device,
            ):
                monkeypatch.setattr(module, name, new)
    start, join, resize = threading.Thread.start, threading.Thread.join, torch.UntypedStorage.resize_
    after = saving._after

    def recorded(self: StreamEvent, where: torch.device, *, timed: bool = False) -> None:
        self.event, self.clock = None, dict(order.clocks[compute()])  # type: ignore[attr-defined]

    def started(self: threading.Thread) -> None:
        order.after(self, order.clocks[thread()])
        start(self)

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        order.after(thread(), order.clocks[self])

    def resized(self: torch.UntypedStorage, size: int) -> None:
        if size < self.nbytes():
            order.free(self)
        resize(self, size)

    def read(events: Any, copy: Tensor) -> Tensor:
        order.advance(thread())
        order.access(thread(), after(events, copy), "the writer of a checkpoint (reads)", writes=False)
        return copy

    monkeypatch.setattr(StreamEvent, "__init__", recorded)
    monkeypatch.setattr(StreamEvent, "wait", lambda self: order.after(thread(), self.clock))
    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(threading.Thread, "join", joined)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    monkeypatch.setattr(saving, "_after", read)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: order.of_host(self))


def _device_room(order: AccessOrder) -> dict[str, Callable[..., Any]]:
    def moved_later(tensor: Tensor, where: torch.device, *, copy: bool = False) -> Tensor:
        if not copy and not order.of_host(tensor):
            return tensor
        return torch.empty_like(tensor).copy_(tensor, non_blocking=True)

    def sent(tensor: Tensor, where: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        return moved_later(tensor.to(dtype=dtype), where)

    def read_later(tensor: Tensor) -> Callable[[], Tensor]:
        copy = order.allocate_on_host(torch.empty_like(tensor))
        copy.copy_(tensor, non_blocking=True)
        done = StreamEvent(tensor.device)

        def read() -> Tensor:
            done.wait()
            return copy

        return read

    return {
        "is_accelerator": lambda one: not (isinstance(one, Tensor) and order.of_host(one)),
        "synchronize": lambda where: order.synchronize(),
        "synchronize_stream": lambda where: order.synchronize(),
        "host_zeros": lambda size, dtype, beside: order.allocate_on_host(torch.zeros(size, dtype=dtype)),
        "host_bytes": lambda size, *, pinned: order.allocate_on_host(torch.empty(size, dtype=torch.uint8)),
        "keep_random_state": lambda where: torch.random.fork_rng([]),
        "moved_later": moved_later,
        "sent": sent,
        "read_later": read_later,
    }
