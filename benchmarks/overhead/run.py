"""What does the host spend on a small layer and micro-batch? Prints the table of README.md.

32 layers of width 16, 8 micro-batches of 2 rows, one rank, one thread. Every row runs the same arithmetic.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait

WIDTH, LAYERS, MICROBATCHES, ROWS = 16, 32, 8, 2
PER = LAYERS * MICROBATCHES
Step = Callable[[], object]


class Residual(nn.Module):
    """Two linears, ReLU and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


LAYER_KINDS: dict[str, Callable[[], nn.Module]] = {
    "one linear": lambda: nn.Linear(WIDTH, WIDTH),
    "two linears": Residual,
}


def layers_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(LAYER_KINDS[kind]() for _ in range(LAYERS)))


def accumulate(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> Step:
    """Return a step of plain PyTorch: all micro-batches one after the other, gradients added up."""
    batch = torch.zeros(MICROBATCHES, ROWS, WIDTH)
    run = forward or model

    def step() -> None:
        for rows in batch:
            nn.functional.mse_loss(run(rows), rows).backward()

    return step


def plain(kind: str) -> Step:
    return accumulate(layers_of(kind))


def checkpointed(kind: str) -> Step:
    model = layers_of(kind)

    def forward(rows: Tensor) -> Tensor:
        for layer in model:
            rows = checkpoint(layer, rows, use_reentrant=False)
        return rows

    return accumulate(model, forward)


def fsdp2(kind: str) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = layers_of(kind)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return accumulate(model)


def with_plait(recompute: str, compile: bool | str = False) -> Callable[[str], Step]:
    def make(kind: str) -> Step:
        plan = plait.Plan(microbatches=MICROBATCHES, recompute=recompute, compile=compile)  # type: ignore[arg-type]
        engine = plait.parallelize(
            layers_of(kind), plan, plait.Mesh(plan), nn.functional.mse_loss, broadcast=True
        )
        batch = torch.zeros(MICROBATCHES * ROWS, WIDTH)
        return lambda: engine.forward_backward(batch, batch)

    return make


CASES: dict[str, Callable[[str], Step]] = {
    "plain PyTorch": plain,
    "plait": with_plait("none"),
    "plait, selective recompute": with_plait("selective"),
    "plait, full recompute": with_plait("full"),
    "plait, compiled": with_plait("none", True),
    "plait, compiled, no generated code": with_plait("none", "graphs"),
    "plait, compiled, selective recompute": with_plait("selective", True),
    "plain, torch.utils.checkpoint": checkpointed,
    "FSDP2, one rank": fsdp2,
}


def python_calls(step: Step) -> int:
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def processor_time(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(kind: str, rounds: int) -> None:
    steps = {name: make(kind) for name, make in CASES.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    calls = {name: python_calls(step) / PER for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):  # in turn, so that a slow moment meets all
        for name, step in steps.items():
            times[name].append(processor_time(step) / PER * 1e6)
    base = median(times["plain PyTorch"])
    for name in steps:
        micros = median(times[name])
        over, ratio = micros - base, micros / base
        print(f"| {kind} | {name} | {calls[name]:.0f} | {micros:.0f} | {over:+.0f} | {ratio:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29544")
    dist.init_process_group("gloo", rank=0, world_size=1)
    print("| layer | | Python calls | µs | over plain | × plain |\n|---|---|---|---|---|---|")
    for kind in LAYER_KINDS:
        measure(kind, rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
