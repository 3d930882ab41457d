"""The boundary of a region: how a value comes to be each rank's own, and how the ranks' own become one again.

                                    enter                       leave
    what is outside is whole        copy                        reduce
    what is outside is in pieces    gather_in (all-gather)      scatter_out (reduce-scatter)

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
    """What stands between a region and the rest of its layer."""

    def enter(self, tensor: Tensor) -> Tensor:
        """What every linear of the region reads, on every rank."""

    def leave(self, tensor: Tensor) -> Tensor:
        """What the rest of the layer sees of the sum of the ranks' tensors. `tensor` may be written to."""


@dataclass(frozen=True)
class WholeBoundary:
    """Outside every rank has the same. Communication: one all-reduce to leave, one backward to enter."""

    group: Group
    overlap: Overlap | None = None
    """Done while a gradient is summed."""

    def enter(self, tensor: Tensor) -> Tensor:
        """The same values."""
        return copy(tensor, self.group, self.overlap)

    def leave(self, tensor: Tensor) -> Tensor:
        """The sum, in the memory of `tensor`."""
        return reduce(tensor, self.group)


@dataclass
class SequenceBoundary:
    """Outside each rank has a piece of the sequence.

    Communication: one all-gather to enter, one reduce-scatter to leave; backward the other way round.
    """

    group: Group
    dim: int
    """Of the sequence."""
    overlap: Overlap | None = None
    """Done while a gradient is summed."""
    registry: GatherRegistry | None = None
    """Where it is noted that what is gathered, both forward and backward, is to be gathered again for weight
    gradients; None: it is kept."""
    length: int = 0
    """Of the whole sequence, in the run of a layer that is under way; set at its start."""

    def enter(self, tensor: Tensor) -> Tensor:
        """The whole sequence."""
        whole = gather_in(tensor, self.group, self.dim, self.length, self.overlap)
        if self.registry is not None and whole is not tensor:
            self.registry.add(whole, tensor, Gather(self.group, self.dim, self.length))
        return whole

    def leave(self, tensor: Tensor) -> Tensor:
        """This rank's piece of the sum."""
        return scatter_out(tensor, self.group, self.dim, self.registry)

    def piece(self, size: int) -> DimPiece:
        """Which piece of the sequence this rank has. ModelError where that has not `size` positions."""
        own = divide(self.length, self.group.size)[self.group.index]
        if len(own) != size:
            raise ModelError(
                f"a dropout was given a tensor whose dim {self.dim} has {size} elements, where this rank has "
                f"{len(own)} of the {self.length} positions of the sequence: let it drop before the "
                "dims are changed, or take the rule sequence off its layer."
            )
        return DimPiece(own.start, self.length)
