"""Collectives and messages among threads: the last rank to join a collective computes all outputs.

Each rank copies its output to its own tensor when it waits: a dispatch mode, which sees the operations of one
thread, then sees everything that is written for that rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from plait.ranks.transport.buffers import dense
from plait.ranks.transport.call_description import describe
from plait.ranks.transport.interface import RangeSizes
from plait.ranks.transport.rank_order_reduction import Op, fold

MessageKey = tuple[int, int, int]
"""Source, destination and tag."""
Inputs = Mapping[int, Tensor | None]
"""The input of each rank, in order of the index."""
ComputeOutputs = Callable[[Inputs], Mapping[int, Tensor]]
"""Returns the output of each rank from the inputs of all: flat, in memory that no rank writes to.

Raises RuntimeError where the inputs do not fit together, for the ranks to raise.
"""


@dataclass
class CollectiveCall:
    """A collective among threads that not all ranks have joined yet: its inputs so far, or outputs."""

    kind: str
    """The operation with everything that must be equal on the ranks, such as the shape."""
    size: int
    inputs: dict[int, Tensor | None] = field(default_factory=dict)
    outputs: Mapping[int, Tensor] | None = None
    error: str | None = None

    def join(self, index: int, kind: str, tensor: Tensor | None, compute: ComputeOutputs) -> None:
        """Add a rank's input, and after the last compute all outputs.

        Sets `error` if the kinds differ or `compute` raises RuntimeError.
        """
        if kind != self.kind:
            self.error = f"the ranks make different calls: index {index} {kind}, others {self.kind}"
        self.inputs[index] = tensor
        if len(self.inputs) == self.size and self.error is None:
            try:
                with torch.no_grad():
                    self.outputs = compute(dict(sorted(self.inputs.items())))
            except RuntimeError as error:
                self.error = str(error)
            self.inputs.clear()

    @property
    def over(self) -> bool:
        """Whether the collective is complete or has failed."""
        return self.outputs is not None or self.error is not None

    def output(self, index: int) -> Tensor | None:
        """Return the output of the rank at `index`, flat; None if that rank has none."""
        assert self.outputs is not None
        return self.outputs.get(index)

    def release(self, index: int) -> bool:
        """Replace a rank's input by a copy, so that the original may be overwritten at once; return True."""
        tensor = self.inputs.get(index)
        if tensor is not None:
            self.inputs[index] = tensor.clone()
        return True


@dataclass
class Transfer:
    """One point-to-point message between threads, copied when send and receive are both posted."""

    sent: Tensor | None = None
    buffer: Tensor | None = None
    received: Tensor | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether the message was copied, or has failed."""
        return self.received is not None or self.error is not None

    def output(self, index: int) -> Tensor | None:
        """Return the received message, flat."""
        return self.received

    def release(self, index: int) -> bool:
        """Return whether the transfer is complete; until then its tensors are in use."""
        return self.over

    def copy_if_matched(self) -> None:
        """Copy the sent tensor once both sides are posted; the sender may overwrite it from then on."""
        if self.sent is None or self.buffer is None:
            return
        if self.sent.numel() != self.buffer.numel() or self.sent.dtype != self.buffer.dtype:
            self.error = f"{describe(self.sent)} was sent into a buffer of {describe(self.buffer)}"
        else:
            self.received = self.sent.reshape(-1).clone()
        self.sent = self.buffer = None


class GroupOperations:
    """The pending collectives and messages of one group."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._calls: dict[int, CollectiveCall] = {}
        self._sends: dict[MessageKey, deque[Transfer]] = defaultdict(deque)
        self._receives: dict[MessageKey, deque[Transfer]] = defaultdict(deque)
        """Messages without a counterpart, the oldest first."""
        self._range_sizes: dict[int, dict[int, RangeSizes]] = {}

    def call(self, number: int, kind: str) -> CollectiveCall:
        """Return the group's collective number `number`, counted from 0; the first rank to ask creates it."""
        call = self._calls.setdefault(number, CollectiveCall(kind, len(self.ranks)))
        if len(call.inputs) == len(self.ranks) - 1:
            del self._calls[number]  # this rank is the last to take part
        return call

    def add_range_sizes(self, number: int, index: int, sizes: RangeSizes) -> Mapping[int, RangeSizes]:
        """Add the sizes of a rank's ranges in all-to-all `number`; return the mapping of all ranks' sizes.

        Every rank gets the same mapping, by index; it is complete once every rank has added its sizes.
        """
        of_all = self._range_sizes.setdefault(number, {})
        of_all[index] = sizes
        if len(of_all) == len(self.ranks):
            del self._range_sizes[number]
        return of_all

    def transfer(
        self, key: MessageKey, *, sent: Tensor | None = None, buffer: Tensor | None = None
    ) -> Transfer:
        """Post a send of `sent` or a receive into `buffer`, matched with the oldest counterpart if any."""
        mine, others = (self._sends, self._receives) if buffer is None else (self._receives, self._sends)
        if others[key]:
            message = others[key].popleft()
        else:
            message = Transfer()
            mine[key].append(message)
        message.sent = message.sent if sent is None else sent
        message.buffer = message.buffer if buffer is None else buffer
        message.copy_if_matched()
        return message


def all_reduce(op: Op, inputs: Inputs) -> Mapping[int, Tensor]:
    """Return the reduction of all inputs, for every rank."""
    return dict.fromkeys(inputs, _folded([_flat(tensor) for tensor in inputs.values()], op))


def reduce_scatter(op: Op, inputs: Inputs) -> Mapping[int, Tensor]:
    """Return, for each rank, its range of the reduction of all inputs."""
    ranges = [_flat(tensor).tensor_split(len(inputs)) for tensor in inputs.values()]
    return {index: _folded([one[index] for one in ranges], op) for index in inputs}


def all_gather(inputs: Inputs) -> Mapping[int, Tensor]:
    """Return all inputs concatenated in order of the index, for every rank."""
    return dict.fromkeys(inputs, torch.cat([_flat(tensor) for tensor in inputs.values()]))


def all_to_all(sizes: Mapping[int, RangeSizes], inputs: Inputs) -> Mapping[int, Tensor]:
    """Return, for each rank, the ranges that all ranks send to it, concatenated.

    Raises RuntimeError where a rank does not expect the size that another sends to it.
    """
    for source, destination in product(inputs, inputs):
        sent, expected = sizes[source].sent[destination], sizes[destination].received[source]
        if sent != expected:
            raise RuntimeError(
                f"index {source} sends {sent} elements to index {destination}, which expects {expected}"
            )
    ranges = [torch.split(_flat(tensor), list(sizes[index].sent)) for index, tensor in inputs.items()]
    return {index: torch.cat([one[index] for one in ranges]) for index in inputs}


def broadcast(source: int, inputs: Inputs) -> Mapping[int, Tensor]:
    """Return the input of the rank with index `source`, for every other rank."""
    sent = _flat(inputs[source]).clone()
    return {index: sent for index in inputs if index != source}


def scatter(source: int, inputs: Inputs) -> Mapping[int, Tensor]:
    """Return, for each rank, its range of the input of the rank with index `source`."""
    return dict(enumerate(_flat(inputs[source]).clone().tensor_split(len(inputs))))


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return dense(tensor).view(-1)


def _folded(ranges: Sequence[Tensor], op: Op) -> Tensor:
    total = torch.empty_like(ranges[0])
    fold(ranges, op, total)
    return total
