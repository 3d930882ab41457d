"""What does the host spend on a small layer where two ranks work together? The second table of README.md.

The layers, widths and micro-batches of run.py. Each way runs in two processes of its own, one thread each;
the figures are of rank 0, for each layer and micro-batch that it computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from run import (
    LAYER_KINDS,
    LAYERS,
    MICROBATCHES,
    ROWS,
    WIDTH,
    Step,
    accumulate,
    fsdp2,
    layers_of,
    processor_time,
    python_calls,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import plait
from plait.rules import column, row

RANKS = 2
Make = Callable[[str], Step]
TENSOR_RULES = {"*.up": column, "*.down": row}


def with_plait(**fields: object) -> Make:
    def make(kind: str) -> Step:
        plan = plait.Plan(microbatches=MICROBATCHES, **fields)  # type: ignore[arg-type]
        rules = TENSOR_RULES if plan.tp > 1 else None
        engine = plait.parallelize(
            layers_of(kind), plan, plait.Mesh(plan), nn.functional.mse_loss, broadcast=True, rules=rules
        )
        batch = torch.zeros(MICROBATCHES * ROWS, WIDTH)
        return lambda: engine.forward_backward(batch, batch)

    return make


def torch_pipeline(kind: str) -> Step:
    rank, share = dist.get_rank(), LAYERS // RANKS
    part = layers_of(kind)[rank * share : (rank + 1) * share]
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    batch = torch.zeros(MICROBATCHES * ROWS, WIDTH)
    return lambda: schedule.step(batch) if rank == 0 else schedule.step(target=batch)


def torch_tensor(kind: str) -> Step:
    model = layers_of(kind)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return accumulate(model)


def collectives_alone(kind: str) -> Step:
    """The collectives of `full` alone: two gathers for each layer and micro-batch, one sum a layer."""
    size = sum(parameter.numel() for parameter in layers_of(kind)[0].parameters())
    whole, part = torch.zeros(RANKS * -(-size // RANKS)), torch.zeros(-(-size // RANKS))

    def step() -> None:
        for _ in range(LAYERS):
            for _ in range(2 * MICROBATCHES):
                dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)

    return step


CASES: dict[str, tuple[Make, int]] = {
    "plait, pp 2": (with_plait(pp=2), LAYERS // RANKS),
    "plait, pp 2, zero-bubble": (with_plait(pp=2, schedule="zb-h1"), LAYERS // RANKS),
    "torch.distributed.pipelining, 1F1B": (torch_pipeline, LAYERS // RANKS),
    "plait, dp 2, full": (with_plait(dp=2, strategy="full"), LAYERS),
    "plait, dp 2, full, reduced each micro-batch": (with_plait(dp=2, strategy="full", reduce="each"), LAYERS),
    "its collectives alone": (collectives_alone, LAYERS),
    "FSDP2": (fsdp2, LAYERS),
    "plait, tp 2": (with_plait(tp=2), LAYERS),
    "DTensor": (torch_tensor, LAYERS),
}
"""How each way makes its step, and the layers that a rank computes."""


def measured(kind: str, name: str, rounds: int) -> tuple[float, float]:
    """Return rank 0's Python calls and microseconds for each layer and micro-batch."""
    make, layers = CASES[name]
    step = make(kind)
    for _ in range(3):
        step()
    per = layers * MICROBATCHES
    calls = python_calls(step) / per
    return calls, median(processor_time(step) / per * 1e6 for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a way's name")
    options = parser.parse_args()
    print("| layer | | Python calls | µs |\n|---|---|---|---|")
    for kind in LAYER_KINDS:
        for name in CASES:
            if options.only not in name or (kind == "one linear" and name in ("plait, tp 2", "DTensor")):
                continue
            turns = [
                plait.launch(measured, kind, name, options.rounds, ranks=RANKS, threads=1)[0]
                for _ in range(3)
            ]
            calls, micros = turns[0][0], median(turn[1] for turn in turns)
            print(f"| {kind} | {name} | {calls:.0f} | {micros:.0f} |", flush=True)


if __name__ == "__main__":
    main()
