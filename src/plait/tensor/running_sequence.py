"""The part of a micro-batch's sequences that this rank holds, and the context in which layers read it.

Under context parallelism a rank holds some positions of each sequence; packed sequences consist of several
documents. Layers run within `running`, where `positions`, `plait.attention` and dropouts find both.
Outside of it, and on one rank without documents, a tensor's dim 1 holds positions 0, 1, 2, ….
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import ModelError
from plait.plan.layout.sequence_layout import SequenceLayout, sequence_layout
from plait.plan.plan import ContextLayout, ContextParallel, Plan
from plait.ranks.accelerator import sent
from plait.ranks.group import Group, alone
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.position_marks import gives_positions
from plait.tensor.replaceable_functions import Replaceable

Result = TypeVar("Result")


@dataclass(frozen=True)
class ContextParallelism:
    """How sequences are divided over the ranks of `cp`, and how attention reads other ranks' positions."""

    group: Group
    kind: ContextLayout = "zigzag"
    method: ContextParallel = "auto"
    keeps_keys: bool = False
    """Whether keys and values of other ranks are kept for the backward; else they are sent again."""
    overlap: Callable[[], None] | None = None
    """Computes queued weight gradients, in a backward, while keys or gradients are sent."""

    @staticmethod
    def of(plan: Plan, group: Group, overlap: Callable[[], None] | None = None) -> ContextParallelism:
        """Return the settings of context parallelism in `plan`, over the ranks of `group`."""
        keeps = plan.sequence_parallel == "keep"
        return ContextParallelism(group, plan.context_layout, plan.context_parallel, keeps, overlap)

    @staticmethod
    def of_one_rank() -> ContextParallelism:
        """Return the settings of a rank that holds whole sequences: `cp` is a group of one rank."""
        return ContextParallelism(alone("cp"))

    def sequence(self, length: int, documents: DocumentBounds | None = None) -> LocalSequence:
        """Return this rank's part of sequences of `length` positions."""
        return LocalSequence(self, sequence_layout(length, self.group.size, self.kind), documents)


@dataclass(frozen=True)
class DocumentBounds:
    """First positions of the documents packed in each row of a micro-batch, and which are padding."""

    length: int
    """Of each row."""
    starts: tuple[tuple[int, ...], ...]
    """By row: the first position of each document, ascending from 0."""
    padding: tuple[tuple[int, ...], ...] = ()
    """By row: which of its documents, counted from 0, are padding; empty: none is."""

    @property
    def are_packed(self) -> bool:
        """Whether a row holds more than one document."""
        return any(len(row) > 1 for row in self.starts)

    @property
    def longest(self) -> int:
        """The number of positions of the longest document."""
        return max((b - a for row in self.starts for a, b in pairwise((*row, self.length))), default=0)

    def by_position(self) -> NDArray[np.int64]:
        """Return for each position its document's begin and end (exclusive): `[2, rows, length]`."""
        found = np.empty((2, len(self.starts), self.length), dtype=np.int64)
        for number, row in enumerate(self.starts):
            ends = np.array((*row, self.length), dtype=np.int64)
            for bounds, one in zip(found, (ends[:-1], ends[1:]), strict=True):
                bounds[number] = np.repeat(one, np.diff(ends))
        return found


@dataclass(frozen=True, eq=False)
class LocalSequence:
    """Which positions of a micro-batch's sequences this rank of `cp` holds, for layers that run on them."""

    parallelism: ContextParallelism
    layout: SequenceLayout
    documents: DocumentBounds | None = None
    """Of the whole sequences; None where no ids were given."""
    _results: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def group(self) -> Group:
        """The ranks of `cp`."""
        return self.parallelism.group

    @property
    def size(self) -> int:
        """The number of positions of this rank."""
        return self.layout.size(self.group.index)

    @property
    def packed(self) -> DocumentBounds | None:
        """Where documents begin, or None where each row is one document."""
        return self.documents if self.documents is not None and self.documents.are_packed else None

    @property
    def shape(self) -> tuple[SequenceLayout, bool]:
        """A hashable key: equal for sequences whose layers run on tensors of the same shapes."""
        return self.layout, self.documents is not None

    @cached_property
    def longest(self) -> int:
        """The number of positions of the longest document, or of the whole sequence without documents."""
        return self.layout.length if self.documents is None else self.documents.longest

    @cached_property
    def indices(self) -> Tensor:
        """The positions of this rank in the whole sequences: int64 `[size]`, on the CPU."""
        return self.layout.positions(self.group.index)

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank in their documents: int64 `[size]`, or `[rows, size]`.

        All layers share the tensor: nobody may write to it. In a layer that is traced, a tensor in its place.
        """
        trace = TRACE.get()
        if trace is not None:
            rows = () if self.documents is None else (len(self.documents.starts),)
            return trace.positions((*rows, self.size), device)
        return self.result(("positions", device), lambda: sent(self._positions(), device))

    def _positions(self) -> Tensor:
        if self.documents is None:
            return self.indices
        starts = torch.from_numpy(self.documents.by_position()[0])
        return self.indices - starts.index_select(1, self.indices)

    @property
    def results(self) -> Mapping[Hashable, Any]:
        """Results that layers share for this micro-batch's sequences, such as rotary angles, by key."""
        return self._results

    def result(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, or its earlier result for the same key; all layers share the results."""
        if key not in self._results:
            # An inference tensor could not be saved for a later backward; layers may run on meta.
            with torch.inference_mode(mode=False), torch.no_grad(), torch.device("cpu"):
                self._results[key] = compute()
        found: Result = self._results[key]
        return found


_RUNNING: ContextVar[LocalSequence | None] = ContextVar("plait_running_sequence", default=None)


@contextmanager
def running(sequence: LocalSequence | None) -> Iterator[None]:
    """Context in which `running_sequence()` returns `sequence`."""
    token = _RUNNING.set(sequence)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_sequence() -> LocalSequence | None:
    """Return which part of the sequences this rank runs; None outside an engine, or if all is whole."""
    return _RUNNING.get()


@Replaceable
def longest_document(tensor: Tensor) -> int:
    """Return the number of positions of the longest document in the whole sequences that `tensor` is part of.

    Dim 1 of `tensor` is the sequence; without packed documents each sequence is one. In a layer that is
    traced, that of the whole sequences, since its graphs serve all documents.
    """
    sequence = running_sequence()
    if sequence is None:
        return tensor.shape[1]
    return sequence.longest if TRACE.get() is None else sequence.layout.length


@Replaceable
@gives_positions
def positions(tensor: Tensor) -> Tensor:
    """Return the position of each token along dim 1 of `tensor`: int64 `[length]`, or `[rows, length]`.

    0, 1, 2, … in plain PyTorch. Under context parallelism those that this rank holds; with packed documents
    they begin anew in each document, for each row. A new tensor, which the caller may write to.
    """
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ModelError(f"plait.positions was given {found}: give a tensor [rows, length, ...].")
    sequence = running_sequence()
    if sequence is None:
        return torch.arange(tensor.shape[1], device=tensor.device)
    return sequence.positions(tensor.device).clone()
