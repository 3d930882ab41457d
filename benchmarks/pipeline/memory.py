"""Memory by micro-batches: what a rank keeps alive in a step, and its receive buffers, beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from live import LiveBytes
from peers import piped
from torch import distributed, nn
from work import batch, cut
from woven import weave

import plait
from plait.engine import Runtime

RANKS, LENGTH = 2, 64
"""`LENGTH` is that of a sequence, in tokens: what is counted grows with it, on both sides alike."""
COUNTS = (8, 16, 32)
"""Of micro-batches."""
PAIRS = {"1f1b": "1F1B", "zb-v": "ZBVZeroBubble"}
"""Policies of plait, and PyTorch's schedules."""


class Kept(NamedTuple):
    """By a rank."""

    most: int
    """Bytes that were alive at most, without parameters and their gradients."""
    buffers: int
    """For what is received."""


def measure(policy: str, *, ours: bool) -> list[list[Kept]]:
    """For each number of micro-batches: each rank."""
    side = _by_plait if ours else _by_torch
    name, layers = policy if ours else PAIRS[policy], cut(policy, RANKS)
    return [
        plait.launch(side, name, count, layers, ranks=RANKS, threads=1, device="cpu", timeout=120)
        for count in COUNTS
    ]


def _by_plait(policy: str, microbatches: int, layers: tuple[int, ...]) -> Kept:
    engine = weave(policy, RANKS, microbatches=microbatches, layers_per_stage=layers)
    inputs, targets = (tensor[:, :LENGTH] for tensor in batch(0, microbatches))
    made = 0

    def look(_instruction: object, runtime: Runtime) -> None:
        nonlocal made
        made = len(runtime.pipeline.exchange.pool.buffers)

    parameters = list(engine.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None  # as after zero_grad; the memory stays
        engine.forward_backward(inputs, targets)

    engine.observe(look)
    return Kept(_most(step, parameters), made)


def _by_torch(name: str, microbatches: int, layers: tuple[int, ...]) -> Kept:
    schedule, stages = piped(name, microbatches=microbatches, counts=layers)
    inputs, targets = (tensor[:, :LENGTH] for tensor in batch(0, microbatches))
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))

    def step() -> None:
        schedule.step(
            *([inputs] if first else []),
            target=targets if last else None,
            losses=[] if last else None,
            return_outputs=False,
        )
        distributed.barrier()

    most = _most(step, [parameter for stage in stages for parameter in stage.submod.parameters()])
    infos = [
        info
        for stage in stages
        for received in (stage.args_recv_info, stage.grad_recv_info)
        for infos in received.values()
        for info in infos
    ]
    return Kept(most, sum(getattr(info, "buffer", None) is not None for info in infos))


def _most(step: Callable[[], object], parameters: Sequence[nn.Parameter]) -> int:
    """Bytes alive in a second step: the first one makes gradients and whatever else stays."""
    with LiveBytes(parameters) as live:
        step()
        live.most = live.count()
        step()
    gradients = {parameter.grad.untyped_storage() for parameter in parameters if parameter.grad is not None}
    return live.most - sum(storage.nbytes() for storage in gradients)
