"""PyTorch's side: the step of a rank by a schedule of torch.distributed.pipelining, and of one plain process.

What its documentation offers is used where it helps: outputs are not collected, and the loss is scaled
instead of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from work import LIMIT, MICROBATCHES, Step, build, cut, filled, loss_of, optimizer_of, stage_of

from plait.models.layers.layer_sequence import sequence_of

AnySchedule = (
    ScheduleGPipe
    | Schedule1F1B
    | ScheduleInterleaved1F1B
    | ScheduleInterleavedZeroBubble
    | ScheduleZBVZeroBubble
)


class Peer(NamedTuple):
    """A schedule, the policy of plait whose cut its stages get, and where a rank's stages stand."""

    kind: Callable[..., AnySchedule]
    like: str
    places: str = "line"


PEERS = {
    "GPipe": Peer(ScheduleGPipe, "gpipe"),
    "1F1B": Peer(Schedule1F1B, "1f1b"),
    "Interleaved1F1B": Peer(ScheduleInterleaved1F1B, "interleaved", "loop"),
    "InterleavedZeroBubble": Peer(ScheduleInterleavedZeroBubble, "interleaved", "loop"),
    "ZBVZeroBubble": Peer(ScheduleZBVZeroBubble, "zb-v", "v"),
}


def piped(
    name: str, *, microbatches: int = MICROBATCHES, counts: Sequence[int] | None = None
) -> tuple[AnySchedule, list[PipelineStage]]:
    """The schedule of this name on this rank, and the rank's stages."""
    peer, rank, ranks = PEERS[name], distributed.get_rank(), distributed.get_world_size()
    counts = counts or cut(peer.like, ranks)
    second = {"line": (), "loop": (rank + ranks,), "v": (2 * ranks - 1 - rank,)}[peer.places]
    stages = [
        PipelineStage(stage_of(number, counts), number, len(counts), torch.device("cpu"))
        for number in (rank, *second)
    ]
    single = peer.places == "line"
    return peer.kind(stages[0] if single else stages, microbatches, loss_of, scale_grads=False), stages


def pipeline(name: str, counts: Sequence[int] | None = None) -> Step:
    """Trains by the schedule of this name."""
    schedule, stages = piped(name, counts=counts)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = optimizer_of(parameters)
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if first else []),
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        square = get_total_norm(gradients).square()
        distributed.all_reduce(square)
        clip_grads_with_norm_(parameters, LIMIT, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach() if last else None

    return step


def plain() -> Step:
    """Trains in this process alone."""
    model = filled(sequence_of(build()).layers)
    optimizer = optimizer_of(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        for row, target in zip(inputs.split(1), targets.split(1), strict=True):
            loss = loss_of(model(row), target)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
