"""Which way to reduce, gather or exchange is the fastest among the CPU ranks of one host? Prints the tables.

All ways take turns (A B C A B C …) in the same ranks, which meet before each turn. A turn is several
operations, each waited for before the next; its time is the slowest rank's; the median over rounds counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.ranks import Group, Mesh, barrier
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.transport.rank_order_reduction import fold
from plait.ranks.transport.shared_memory import transport
from plait.ranks.transport.shared_memory.transport import SharedMemoryTransport
from plait.ranks.transport.torch_distributed import TorchTransport

KIB = 1024
SIZES = [4 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB, 4096 * KIB, 32768 * KIB]
LARGEST_TURN = 10 * 1024 * KIB
NAMES = {
    "backend": "Gloo",
    "exchange": "exchange over Gloo",
    "whole": "shared, whole",
    "ranges": "shared, ranges",
}
Ways = dict[str, Callable[[], object]]


def over_torch(group: Group) -> TorchTransport:
    """The same ranks without shared memory."""
    return in_shared_memory(group).over_torch()


def in_shared_memory(group: Group) -> SharedMemoryTransport:
    assert isinstance(group.transport, SharedMemoryTransport)
    return group.transport


def ways_to_all_reduce(tensor: Tensor, group: Group) -> Ways:
    """Each reduces `tensor` to another place, as `all_reduce(tensor, group, out=...)` does."""
    out, process_group = torch.empty_like(tensor), over_torch(group).process_group
    staging = in_shared_memory(group).staging
    return {
        "backend": lambda: dist.all_reduce(out.copy_(tensor), group=process_group),
        "exchange": partial(exchange, tensor.expand(group.size, -1), out, group),
        "whole": lambda: transport.all_reduce_whole(tensor, out, "sum", staging).wait(),
        "ranges": lambda: transport.all_reduce_in_ranges(tensor, out, "sum", staging).wait(),
    }


def ways_to_reduce_scatter(tensor: Tensor, group: Group) -> Ways:
    """Each reduces this rank's range of `tensor`."""
    out, process_group = torch.empty(tensor.numel() // group.size), over_torch(group).process_group
    staging = in_shared_memory(group).staging
    return {
        "backend": lambda: dist.reduce_scatter_single(out, tensor, group=process_group),
        "exchange": partial(exchange, tensor, out, group),
        "whole": lambda: transport.reduce_scatter_staged(tensor, out, "sum", staging).wait(),
    }


def ways_to_all_gather(tensor: Tensor, group: Group) -> Ways:
    """Each fills `tensor` from the ranks' ranges, of which this rank's stands there already."""
    own, staging = tensor.tensor_split(group.size)[group.index], in_shared_memory(group).staging
    return {
        "backend": lambda: over_torch(group).all_gather(own, tensor).wait(),
        "whole": lambda: transport.all_gather_staged(own, tensor, staging).wait(),
    }


def ways_to_exchange(tensor: Tensor, group: Group) -> Ways:
    """Each sends a range of `tensor` to every rank."""
    received, staging = torch.empty_like(tensor), in_shared_memory(group).staging
    return {
        "backend": lambda: over_torch(group).all_to_all(tensor, received).wait(),
        "whole": lambda: transport.all_to_all_staged(tensor, received, staging).wait(),
    }


class Operation(NamedTuple):
    """What is measured; sizes are those of the whole tensor."""

    title: str
    shown: Sequence[str]
    ways: Callable[[Tensor, Group], Ways]
    choose: Callable[[Tensor, Group], str]


def choose_to_all_reduce(tensor: Tensor, group: Group) -> str:
    return in_shared_memory(group).algorithm("all_reduce", tensor)


def choose_to_reduce_scatter(tensor: Tensor, group: Group) -> str:
    return in_shared_memory(group).algorithm("reduce_scatter", tensor)


def choose_to_gather(tensor: Tensor, group: Group) -> str:
    """What plait takes: it decides by the range."""
    return in_shared_memory(group).algorithm("all_gather", tensor.tensor_split(group.size)[group.index])


def choose_to_exchange(tensor: Tensor, group: Group) -> str:
    return in_shared_memory(group).algorithm("all_to_all", tensor)


OPERATIONS = {
    "all-reduce": Operation(
        "All-reduce, ms:",
        ("backend", "exchange", "whole", "ranges"),
        ways_to_all_reduce,
        choose_to_all_reduce,
    ),
    "reduce-scatter": Operation(
        "Reduce-scatter, ms:",
        ("backend", "exchange", "whole"),
        ways_to_reduce_scatter,
        choose_to_reduce_scatter,
    ),
    "all-gather": Operation(
        "All-gather, in place, ms:", ("backend", "whole"), ways_to_all_gather, choose_to_gather
    ),
    "all-to-all": Operation("All-to-all, ms:", ("backend", "whole"), ways_to_exchange, choose_to_exchange),
}


def exchange(parcels: Tensor, out: Tensor, group: Group) -> None:
    """Send each rank its parcel, and reduce what comes in rank order."""
    parcels = parcels.contiguous()
    arrived = torch.empty_like(parcels)
    over_torch(group).all_to_all(parcels, arrived).wait()
    fold(arrived.view(group.size, -1).unbind(), "sum", out)


def measure(size: int, rounds: int, name: str) -> tuple[str, dict[str, list[float]]]:
    """The way that plait takes for float32 of `size` bytes, and the seconds of an operation, by round."""
    group = Mesh(tp=dist.get_world_size()).group("tp")
    tensor = torch.randn(size // 4)
    operation = OPERATIONS[name]
    ways = operation.ways(tensor, group)
    times: dict[str, list[float]] = {way: [] for way in ways}
    turn = max(1, min(20, LARGEST_TURN // size))
    for _ in range(rounds):
        for way, run in ways.items():
            barrier(group, checked=False).wait()
            began = time.perf_counter()
            for _ in range(turn):
                run()
            times[way].append((time.perf_counter() - began) / turn)
    return operation.choose(tensor, group), times


def row(pool: RankPool, ranks: int, size: int, rounds: int, name: str) -> str:
    """A channel of the table; what plait takes is bold."""
    measured = pool.run(measure, size, rounds, name, ranks=ranks)
    cells = []
    for way in OPERATIONS[name].shown:
        slowest = [max(each) for each in zip(*(times[way] for _, times in measured), strict=True)]
        median = statistics.median(slowest[rounds // 10 :]) * 1000
        text = f"{median:.2f}" if median < 10 else f"{median:.0f}"
        cells.append(f"**{text}**" if way == measured[0][0] else text)
    label = f"{size // KIB} KiB" if size < KIB**2 else f"{size // KIB**2} MiB"
    return f"| {ranks} | {label} | {' | '.join(cells)} |"


def table(pool: RankPool, name: str, ranks: Sequence[int], rounds: int) -> None:
    """Print a table, channel by channel as it is measured."""
    names = [NAMES[way] for way in OPERATIONS[name].shown]
    print(f"\n{OPERATIONS[name].title}\n")
    print(f"| ranks | float32 | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for number in ranks:
        for size in SIZES:
            print(row(pool, number, size, rounds, name), flush=True)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    arguments = parser.parse_args()
    with RankPool(max(arguments.ranks), threads=1, timeout=300.0, device="cpu") as pool:
        for name in arguments.operations:
            table(pool, name, arguments.ranks, arguments.rounds)


if __name__ == "__main__":
    main()
