"""Messages between stages on different ranks: receives posted ahead into reused buffers, sends under way.

A buffer belongs to the micro-batch it was received for until `release` (the stage's weight work may still
read it), then to the pool. So memory is what the schedule keeps in flight, whatever the number of
micro-batches. Forward and backward traffic run in groups of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.point_to_point import receive, send
from plait.pipeline.boundary import TensorInfo
from plait.pipeline.stage import Gradients
from plait.schedules.action import Action, Kind

SENDS_UNDER_WAY = 2
"""Per channel. More would only hold tensors longer: the receiver posts one receive ahead."""


@dataclass
class BufferPool:
    """Buffers by shape and dtype, reused. `made` counts how many exist."""

    device: torch.device
    free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )
    pointers: set[int] = field(default_factory=set)
    made: int = 0

    def take(self, info: TensorInfo) -> Tensor:
        """A buffer for a tensor like `info`, its contents undefined."""
        stock = self.free[info.shape, info.dtype]
        if stock:
            return stock.pop()
        self.made += 1
        buffer = torch.empty(info.shape, dtype=info.dtype, device=self.device)
        self.pointers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Nothing reads `buffer` any more."""
        self.free[tuple(buffer.shape), buffer.dtype].append(buffer)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in one of the pool's buffers."""
        return tensor.untyped_storage().data_ptr() in self.pointers

    def clear(self) -> None:
        """Forget all buffers: other shapes are to come."""
        self.free.clear()
        self.pointers.clear()
        self.made = 0


class Exchange:
    """The boundary traffic of one rank of the `pp` axis."""

    def __init__(self, forward: Group, backward: Group, device: torch.device) -> None:
        self.groups = {Kind.F: forward, Kind.I: backward}
        self.pool = BufferPool(device)
        self.crossing: Mapping[int, Sequence[TensorInfo]] = {}
        self._posted: dict[Action, tuple[list[Tensor], list[Handle[Tensor]]]] = {}
        self._lent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._sends: dict[tuple[int, Kind], list[list[Handle[None]]]] = defaultdict(list)

    def begin(self, crossing: Mapping[int, Sequence[TensorInfo]]) -> None:
        """Start a step. `crossing[s]` is what stage `s` sends forward; its differentiable part comes back."""
        if crossing != self.crossing:
            self.pool.clear()
            self.crossing = crossing

    def _expected(self, action: Action) -> list[TensorInfo]:
        if action.kind is Kind.F:
            return list(self.crossing[action.stage - 1])
        return [info for info in self.crossing[action.stage] if info.requires_grad]

    def post(self, action: Action, peer: int) -> None:
        """Start receiving what `action` needs from `peer` of the `pp` axis."""
        buffers = [self.pool.take(info) for info in self._expected(action)]
        group = self.groups[action.kind]
        handles = [receive(buffer, group, peer, label=str(action)) for buffer in buffers]
        self._posted[action] = buffers, handles

    def take(self, action: Action) -> list[Tensor]:
        """Wait for what `action` needs. CommunicationError that names the action when it does not come."""
        buffers, handles = self._posted.pop(action)
        for handle in handles:
            handle.wait()
        self._lent[action.stage, action.microbatch].extend(buffers)
        return buffers

    def send(self, action: Action, tensors: Sequence[Tensor], peer: int) -> None:
        """Start sending the result of `action` to `peer`, after at most `SENDS_UNDER_WAY - 1` others."""
        under_way = self._sends[peer, action.kind]
        while len(under_way) >= SENDS_UNDER_WAY:
            for handle in under_way.pop(0):
                handle.wait()
        group = self.groups[action.kind]
        outgoing = [self.outlasting(tensor) for tensor in tensors]
        under_way.append([send(tensor, group, peer, label=str(action)) for tensor in outgoing])

    def outlasting(self, tensor: Tensor) -> Tensor:
        """`tensor`, or a copy where it lies in a buffer: a layer may pass on what it received."""
        return tensor.clone() if self.pool.owns(tensor) else tensor

    def send_gradients(self, action: Action, gradients: Gradients, peer: int) -> None:
        """Send the gradients of the stage's input; where none flowed, the other side expects zeros."""
        tensors = []
        for info, gradient in zip(self.crossing[action.stage - 1], gradients, strict=True):
            if info.requires_grad:
                tensors.append(self._zeros(info) if gradient is None else gradient)
        self.send(action, tensors, peer)

    def _zeros(self, info: TensorInfo) -> Tensor:
        return torch.zeros(info.shape, dtype=info.dtype, device=self.pool.device)

    def release(self, stage: int, microbatch: int) -> None:
        """The stage needs nothing of the micro-batch any more: its buffers go back to the pool."""
        for buffer in self._lent.pop((stage, microbatch), ()):
            self.pool.give_back(buffer)

    def finish(self) -> None:
        """Wait until every send is out."""
        for under_way in self._sends.values():
            for handles in under_way:
                for handle in handles:
                    handle.wait()
            under_way.clear()

    def clear(self) -> None:
        """Forget what is under way, after an exception in the middle of a step."""
        self._posted.clear()
        self._lent.clear()
        self._sends.clear()
        self.pool.clear()
