"""Sends and receives between stages on different ranks, with receives posted ahead into reused buffers.

A buffer belongs to the micro-batch that was received into it until `release` (the stage's weight gradients
may still read it), then to the pool. All micro-batches of a step take buffers of the same size at a boundary,
that of the longest. So memory depends on what the schedule keeps in flight, not on the number and shapes of
micro-batches. Each channel has a group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from plait.engine.pipeline.stage import Gradients
from plait.models.layers.shape_inference import TensorInfo
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.ranks.point_to_point import receive, send
from plait.schedules.action import Action, Kind
from plait.schedules.lowering.messages import SENDS_IN_FLIGHT, Channel

SENDER, RECEIVER = 0, 1
"""Indices in the group of a channel."""

Crossing: TypeAlias = Sequence[Sequence[Sequence[TensorInfo]]]
"""`crossing[s][m]` are the tensors that stage `s` sends forward of micro-batch `m`.

The gradients of those that are differentiable are sent back.
"""


def buffer_sizes(crossing: Crossing) -> list[list[int]]:
    """Return the receive buffers' bytes, by sending stage and by tensor: enough for every micro-batch."""
    return [
        [max(info.nbytes for info in column if info is not None) for column in zip_longest(*microbatches)]
        for microbatches in crossing
    ]


def receive_buffers(
    action: Action, crossing: Crossing, sizes: Sequence[Sequence[int]]
) -> list[tuple[TensorInfo, int]]:
    """Return the `TensorInfo` of each tensor that `action` receives, with the size of its buffer in bytes.

    A forward receives all that the stage before sends, a backward the gradients of what its own stage has
    sent and is differentiable.
    """
    forward = action.kind is Kind.F
    stage = action.stage - 1 if forward else action.stage
    sized = zip(crossing[stage][action.microbatch], sizes[stage], strict=False)
    return [(info, size) for info, size in sized if forward or info.requires_grad]


@dataclass
class BufferPool:
    """Pool of receive buffers, which are reused by size in bytes."""

    device: torch.device
    free: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """Free and taken ones, by their address."""

    def fit(self, needs: Iterable[int]) -> dict[int, int]:
        """Return a buffer size for each number of bytes in `needs`; free unused buffers of other sizes.

        An existing size is reused if it is large enough and at most twice as large, so that steps whose
        longest sequences differ a little share buffers.
        """
        sizes = sorted({buffer.nbytes for buffer in self.buffers.values()})
        least = {need: max(need, 1) for need in needs}  # empty buffers have no address of their own
        fits = {
            need: next((size for size in sizes if least[need] <= size <= 2 * need), least[need])
            for need in least
        }
        for size in set(self.free) - set(fits.values()):
            for buffer in self.free.pop(size):
                del self.buffers[buffer.data_ptr()]
        return fits

    def take(self, info: TensorInfo, size: int) -> Tensor:
        """Return a tensor like `info` in a buffer of `size` bytes, uninitialised."""
        stock = self.free[size]
        if stock:
            buffer = stock.pop()
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.buffers[buffer.data_ptr()] = buffer
        return buffer[: info.nbytes].view(info.dtype).view(info.shape)

    def give_back(self, tensor: Tensor) -> None:
        """Return the buffer of a taken tensor to the pool."""
        buffer = self.buffers[tensor.untyped_storage().data_ptr()]
        self.free[buffer.nbytes].append(buffer)

    def owns(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in one of the pool's buffers."""
        return tensor.untyped_storage().data_ptr() in self.buffers

    def clear(self) -> None:
        """Drop all buffers."""
        self.free.clear()
        self.buffers.clear()


class Exchange:
    """Sends and receives the activations and gradients of one rank of `pp`."""

    def __init__(self, rank: int, channels: Mapping[Channel, Group], device: torch.device) -> None:
        """`rank`: this rank's index along `pp`; `channels`: each channel's group of sender and receiver."""
        self._rank, self._channels = rank, channels
        self.pool = BufferPool(device)
        self.crossing: Crossing = ()
        self._sizes: Sequence[Sequence[int]] = ()
        self._posted: dict[Action, tuple[list[Tensor], list[Handle[Tensor]]]] = {}
        self._lent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._sends: dict[Channel, list[list[Handle[None]]]] = defaultdict(list)

    def begin(self, crossing: Crossing) -> None:
        """Set shapes and dtypes of the tensors that later steps exchange, and adapt the receive buffers."""
        self.crossing = crossing
        longest = buffer_sizes(crossing)
        fits = self.pool.fit(need for needs in longest for need in needs)
        self._sizes = [[fits[need] for need in needs] for needs in longest]

    def post(self, action: Action, peer: int) -> None:
        """Start receiving the input of `action` from rank `peer` of the `pp` axis."""
        received = receive_buffers(action, self.crossing, self._sizes)
        buffers = [self.pool.take(info, size) for info, size in received]
        group = self._channels[peer, self._rank, action.kind]
        handles = [receive(buffer, group, SENDER, label=str(action)) for buffer in buffers]
        self._posted[action] = buffers, handles

    def take(self, action: Action) -> list[Tensor]:
        """Wait for the input of `action`, and return it. Raises CommunicationError on a timeout."""
        buffers, handles = self._posted.pop(action)
        for handle in handles:
            handle.wait()
        self._lent[action.stage, action.microbatch].extend(buffers)
        return buffers

    def send(self, action: Action, tensors: Sequence[Tensor], peer: int) -> None:
        """Start sending the result of `action`, once fewer than `SENDS_IN_FLIGHT` sends are pending."""
        channel = self._rank, peer, action.kind
        in_flight, group = self._sends[channel], self._channels[channel]
        while len(in_flight) >= SENDS_IN_FLIGHT:
            for handle in in_flight.pop(0):
                handle.wait()
        outgoing = [self.safe_to_keep(tensor) for tensor in tensors]
        in_flight.append([send(tensor, group, RECEIVER, label=str(action)) for tensor in outgoing])

    def safe_to_keep(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a copy if it is in a receive buffer, which will be reused."""
        return tensor.clone() if self.pool.owns(tensor) else tensor

    def send_gradients(self, action: Action, gradients: Gradients, peer: int) -> None:
        """Start sending the gradients of the stage's input, with zeros for missing gradients."""
        tensors = []
        infos = self.crossing[action.stage - 1][action.microbatch]
        for info, gradient in zip(infos, gradients, strict=True):
            if info.requires_grad:
                if gradient is None:
                    gradient = torch.zeros(info.shape, dtype=info.dtype, device=self.pool.device)
                tensors.append(gradient)
        self.send(action, tensors, peer)

    def release(self, stage: int, microbatch: int) -> None:
        """Return the receive buffers of a micro-batch to the pool: the stage no longer uses them."""
        for buffer in self._lent.pop((stage, microbatch), ()):
            self.pool.give_back(buffer)

    def finish(self) -> None:
        """Block until all sends are finished."""
        for in_flight in self._sends.values():
            for handles in in_flight:
                for handle in handles:
                    handle.wait()
            in_flight.clear()

    def clear(self) -> None:
        """Discard all buffers and handles after an exception within a step."""
        self._posted.clear()
        self._lent.clear()
        self._sends.clear()
        self.pool.clear()
