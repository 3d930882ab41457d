"""The boundary of a region of tensor parallelism: the collectives at its inputs and at its output.

    outside of the region       enter                       leave
    values are whole            copy                        reduce
    values are in pieces        gather_in (all-gather)      scatter_out (reduce-scatter)

See `plait.tensor.autograd.paired_collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plait.errors import ModelError
from plait.plan.layout.layout import divide
from plait.ranks.group import Group
from plait.tensor.autograd.paired_collectives import Overlap, copy, gather_in, reduce, scatter_out
from plait.tensor.autograd.regather import GatherRegistry
from plait.tensor.dropout_mask import DimPiece


@dataclass
class RegionBoundary:
    """The collectives between a tensor-parallel region and the rest of its layer.

    Communication where values outside are whole: one all-reduce in `leave` and one in `enter`'s backward.
    Where they are pieces: one all-gather in `enter`, one reduce-scatter in `leave`; in the backward one of
    the other.
    """

    group: Group
    dim: int | None = None
    """The sequence dim, where values outside are pieces of the sequence; None: they are whole."""
    overlap: Overlap | None = None
    """Runs while a gradient is summed."""
    registry: GatherRegistry | None = None
    """Records gathered inputs and gradients, so that they are gathered again for weight gradients; None: they
    are saved."""
    length: int = 0
    """The length of the whole sequence, set before each run of a layer."""

    def enter(self, tensor: Tensor) -> Tensor:
        """Return the input of the region's first linears: `tensor`, gathered if it is a sequence piece."""
        if self.dim is None:
            return copy(tensor, self.group, self.overlap)
        return gather_in(tensor, self.group, self.dim, self.length, self.overlap, self.registry)

    def leave(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, or this rank's piece of the sum. May write to `tensor`."""
        if self.dim is None:
            return reduce(tensor, self.group)
        return scatter_out(tensor, self.group, self.dim, self.registry)

    def piece(self, size: int) -> DimPiece:
        """Return this rank's `DimPiece` of the sequence. ModelError unless `size` is the piece's length."""
        own = divide(self.length, self.group.size)[self.group.index]
        if len(own) != size:
            raise ModelError(
                f"a dropout was given a tensor whose dim {self.dim} has {size} elements, where this rank has "
                f"{len(own)} of the {self.length} positions of the sequence: put it before the "
                "operation that changes the dims, or remove the rule sequence of its layer."
            )
        return DimPiece(own.start, self.length)
