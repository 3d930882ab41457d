"""The boundary of a region of tensor parallelism: the collectives at its inputs and at its output.

    outside of the region       enter                       leave
    values are whole            copy                        reduce
    values are in pieces        gather_in (all-gather)      scatter_out (reduce-scatter)

See `plait.autograd.paired_collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from plait.autograd.dropout_mask import DimPiece
from plait.autograd.paired_collectives import Overlap, copy, gather_in, reduce, scatter_out
from plait.autograd.regather import Gather, GatherRegistry
from plait.comm.group import Group
from plait.errors import ModelError
from plait.layout import divide


class RegionBoundary(Protocol):
    """The collectives between a region and the rest of its layer."""

    def enter(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the region's first linears read: `tensor`, gathered if it is a piece."""

    def leave(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, whole or in pieces. May write to `tensor`."""


@dataclass(frozen=True)
class WholeBoundary:
    """Region boundary with whole tensors outside. `leave` and the backward of `enter` all-reduce."""

    group: Group
    overlap: Overlap | None = None
    """Runs while a gradient is summed."""

    def enter(self, tensor: Tensor) -> Tensor:
        """Return `tensor`; its gradient is all-reduced."""
        return copy(tensor, self.group, self.overlap)

    def leave(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, written to the memory of `tensor`."""
        return reduce(tensor, self.group)


@dataclass
class SequenceBoundary:
    """Region boundary with sequence parallelism: outside, each rank holds a piece of the sequence.

    Communication: one all-gather in `enter`, one reduce-scatter in `leave`; in the backward one of the other.
    """

    group: Group
    dim: int
    """The sequence dim."""
    overlap: Overlap | None = None
    """Runs while a gradient is summed."""
    registry: GatherRegistry | None = None
    """Records gathered inputs and gradients, so that they are gathered again for weight gradients; None: they
    are saved."""
    length: int = 0
    """The length of the whole sequence, set before each run of a layer."""

    def enter(self, tensor: Tensor) -> Tensor:
        """Return the whole sequence, all-gathered from the ranks' pieces."""
        whole = gather_in(tensor, self.group, self.dim, self.length, self.overlap)
        if self.registry is not None and whole is not tensor:
            self.registry.add(whole, tensor, Gather(self.group, self.dim, self.length))
        return whole

    def leave(self, tensor: Tensor) -> Tensor:
        """Return this rank's piece of the sum of the ranks' tensors, by a reduce-scatter."""
        return scatter_out(tensor, self.group, self.dim, self.registry)

    def piece(self, size: int) -> DimPiece:
        """Return this rank's piece of the sequence. Raises ModelError unless `size` is the piece's length."""
        own = divide(self.length, self.group.size)[self.group.index]
        if len(own) != size:
            raise ModelError(
                f"a dropout was given a tensor whose dim {self.dim} has {size} elements, where this rank has "
                f"{len(own)} of the {self.length} positions of the sequence: put it before the "
                "operation that changes the dims, or remove the rule sequence of its layer."
            )
        return DimPiece(own.start, self.length)
