"""What does sequence parallelism cost on two ranks? Prints the tables of README.md.

All that is compared runs in turn in the same two ranks (A B C A B C …); ratios are taken inside a turn, and
the median over turns counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import plait
from plait.engine import Engine
from plait.models.gpt2 import MLP
from plait.ranks import Group
from plait.ranks.collectives import all_gather, all_reduce, reduce_scatter
from plait.ranks.transport.shared_memory.transport import SharedMemoryTransport
from plait.rules import column, entrance, row, sequence

BLOCKS, HIDDEN, HEADS, VOCAB, CONTEXT, MICROBATCHES = 2, 256, 8, 1024, 256, 2
ACTIVATION = CONTEXT * HIDDEN * 4
"""Bytes, of one micro-batch."""
CHOICES = ("none", "keep", "regather")
LAYERS, FEW = 16, 8
"""Of the comparison with DTensor: layers, and features of each of two tokens."""
RULES = {"*": sequence, "*.norm": entrance, "*.up": column, "*.down": row}

Turn = Callable[[], object]


def turns(work: Mapping[str, Turn], count: int, repeat: int = 1) -> dict[str, list[float]]:
    """Seconds of each, in turn, after a first turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(count + 1):
        for name, one in work.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                one()
            if number:
                seconds[name].append((time.perf_counter() - start) / repeat)
    return seconds


def ratio(over: list[float], under: list[float]) -> str:
    return f"{median(one / other for one, other in zip(over, under, strict=True)):.2f}"


def show(title: str, seconds: Mapping[str, list[float]], base: str, unit: float = 1e3) -> list[str]:
    """A table: medians, and ratios to `base`."""
    name = {1e3: "ms", 1e6: "µs"}[unit]
    rows = [
        f"| {what} | {median(times) * unit:.2f} | {ratio(times, seconds[base])} |"
        for what, times in seconds.items()
    ]
    return [f"\n| {title} | {name} | × {base} |", "|---|---|---|", *rows]


def build() -> nn.Sequential:
    """GPT-2, small enough for a few turns."""
    return plait.models.gpt2(
        layers=BLOCKS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, context=CONTEXT, tied=False
    )


def steps(count: int) -> list[str]:
    """A step of training, and its collectives alone."""
    tokens = torch.randint(VOCAB, (MICROBATCHES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    engines: dict[str, Engine] = {}
    for choice in CHOICES:
        plan = plait.Plan(tp=2, microbatches=MICROBATCHES, precision="fp32", sequence_parallel=choice)  # type: ignore[arg-type]
        engines[choice] = plait.parallelize(build(), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    work: dict[str, Turn] = {
        choice: lambda engine=engine: engine.forward_backward(inputs, targets)
        for choice, engine in engines.items()
    }
    lines = show("a step", turns(work, count), "none")
    alone = {choice: collectives_of(engine) for choice, engine in engines.items()}
    return lines + show("its collectives alone", turns(alone, count), "none")


def collectives_of(engine: Engine) -> Turn:
    """Those of the last step that carry activations, one after the other."""
    group, traffic = engine.mesh.group("tp"), engine.traffic()["tp"]
    calls = {kind: round(count.bytes / ACTIVATION) for kind, count in traffic.items()}
    calls["all_gather"] = (
        round(2 * traffic["all_gather"].bytes / ACTIVATION) if "all_gather" in traffic else 0
    )
    whole = torch.zeros(CONTEXT, HIDDEN)
    part = whole[: CONTEXT // 2]

    def run() -> None:
        for _ in range(calls.get("all_reduce", 0)):
            all_reduce(whole, group, checked=False).wait()
        for _ in range(calls["all_gather"]):
            all_gather(part, group, checked=False).wait()
        for _ in range(calls.get("reduce_scatter", 0)):
            reduce_scatter(whole, group, checked=False).wait()

    return run


def overheads(count: int) -> list[str]:
    """A stack of MLP layers on two tokens, so small that nothing but overhead is left; per layer."""
    plan = plait.Plan(tp=2, precision="fp32", sequence_parallel="keep")
    layers = [MLP(FEW, 0.02) for _ in range(LAYERS)]
    with torch.device("meta"):
        stack = nn.Sequential(*(MLP(FEW, 0.02) for _ in range(LAYERS)))
    engine = plait.parallelize(stack, plan, plait.Mesh(plan), loss=plait.cross_entropy, rules=RULES)
    peer = nn.Sequential(*layers)
    styles = {
        "*.norm": SequenceParallel(),
        "*.up": ColwiseParallel(input_layouts=Shard(1)),
        "*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(peer, DeviceMesh("cpu", [0, 1]), styles)
    inputs, targets = torch.ones(1, 2, FEW), torch.zeros(1, 2, dtype=torch.int64)

    def forward() -> Tensor:
        output: Tensor = peer(inputs[:, :1])
        return functional.cross_entropy(output.flatten(0, 1), targets[0, :1], reduction="sum")

    def forward_only() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        forward().backward()  # type: ignore[no-untyped-call]

    lines = []
    for title, ours, theirs in (
        ("forward", lambda: engine.evaluate(inputs, targets), forward_only),
        ("forward and backward", lambda: engine.forward_backward(inputs, targets), both),
    ):
        seconds = turns({"DTensor": theirs, "plait": ours}, count, repeat=5)
        each = {name: [one / LAYERS for one in times] for name, times in seconds.items()}
        lines += show(f"{title}, a layer", each, "DTensor", 1e6)
    return lines


def chunks(count: int) -> list[str]:
    """A gather that stands before a product, against gathers of parts while others are multiplied."""
    group = plait.Mesh(tp=2).group("tp")
    part, weight = torch.randn(CONTEXT // 2, HIDDEN), torch.randn(HIDDEN, 2 * HIDDEN)
    lines = []
    for title, start in (("shared memory", shown), ("Gloo", sent)):
        work: dict[str, Turn] = {
            "no gather": lambda: torch.cat([part, part]) @ weight,
            "one": lambda start=start: product(part, weight, group, 1, start),
            "2 chunks": lambda start=start: product(part, weight, group, 2, start),
            "4 chunks": lambda start=start: product(part, weight, group, 4, start),
        }
        lines += show(f"gather and product, {title}", turns(work, count, repeat=10), "one")
    return lines


def shown(part: Tensor, group: Group) -> Callable[[], Tensor]:
    return all_gather(part, group, checked=False).wait


def sent(part: Tensor, group: Group) -> Callable[[], Tensor]:
    whole = part.new_empty(2 * len(part), *part.shape[1:])
    assert isinstance(group.transport, SharedMemoryTransport)
    under_way = group.transport.over_torch().all_gather(part, whole)

    def finish() -> Tensor:
        under_way.wait()
        return whole

    return finish


def product(
    part: Tensor,
    weight: Tensor,
    group: Group,
    count: int,
    start: Callable[[Tensor, Group], Callable[[], Tensor]],
) -> Tensor:
    """The rows of all ranks times `weight`, chunk by chunk: the next is gathered while one is multiplied."""
    parts = part.chunk(count)
    under_way = start(parts[0], group)
    output = part.new_empty(count, 2 * len(parts[0]), weight.shape[1])
    for number in range(count):
        whole = under_way()
        if number + 1 < count:
            under_way = start(parts[number + 1], group)
        torch.mm(whole, weight, out=output[number])
    return output


def measure(count: int) -> list[str]:
    """What a rank prints."""
    return [*steps(count), *overheads(3 * count), *chunks(3 * count)]


def main() -> None:
    """Run on two ranks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    print("\n".join(plait.launch(measure, arguments.turns, ranks=2, threads=1)[0]))


if __name__ == "__main__":
    main()
