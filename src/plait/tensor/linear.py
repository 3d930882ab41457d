"""Linears whose weight is cut over the ranks of a group (Shoeybi et al. 2019, "Megatron-LM", section 3).

    column:  Y_t = X W_tᵀ + b_t           output features cut; no communication forward
    row:     Y   = Σ_t X_t W_tᵀ + b       input features cut; one all-reduce forward, then the bias, once

A column linear followed by a row linear costs one all-reduce forward (the row's) and one backward (of the
gradient of the column's input). Where what is outside of their region is in pieces of a sequence, each is an
all-gather and a reduce-scatter: see `plait.tensor.region_boundary`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from plait.autograd.deferred import linear
from plait.autograd.paired_collectives import gather, split
from plait.autograd.weight_queue import WeightGradientQueue
from plait.comm.group import Group
from plait.errors import PlanError
from plait.layout import Layout
from plait.tensor.partition import AXIS, EVEN, Partition, column_layouts, piece_of, row_layouts
from plait.tensor.region_boundary import RegionBoundary, WholeBoundary


class _PieceOfLinear(nn.Module):
    """What both have: a piece of a full linear's weight and bias, as `layouts` say."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    group: Group
    boundary: RegionBoundary
    """Of the region that it stands in."""
    layouts: dict[str, Layout]

    @classmethod
    def of(cls, full: nn.Linear, group: Group, **options: Any) -> Self:
        """This rank's piece of a full linear, which every rank has alike; its values are copied."""
        sizes = full.in_features, full.out_features
        made = cls(*sizes, group, bias=full.bias is not None, device="meta", **options)
        made.take_pieces(full)
        return made

    def take_pieces(self, full: nn.Linear) -> None:
        """Make this rank's pieces of a full linear the weight and the bias."""
        self.weight = piece_of(full.weight, self.layouts["weight"], self.group)
        self.bias = None if full.bias is None else piece_of(full.bias, self.layouts["bias"], self.group)


class ColumnParallelLinear(_PieceOfLinear):
    """A linear whose output features are cut over `group`.

    `[..., in_features]`, whole on every rank, to `[..., out_features / size]`, this rank's piece; with
    `gather_output` to `[..., out_features]`. `layouts` says which piece of the full linear's weight and bias
    this rank's `weight` and `bias` are. Communication: one all-reduce of the input's gradient; with
    `gather_output` one all-gather forward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        gather_output: bool = False,
        partition: Partition = EVEN,
        path: str = "a column-parallel linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `nn.Linear(in_features, out_features)` would be made under the same seed, cut.

        Seed all ranks of the group alike. PlanError, naming `path`, shape and degree, where the output
        features cannot be cut so.
        """
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.gather_output = gather_output
        self.layouts = column_layouts(out_features, in_features, partition, {AXIS: group.size}, path)
        if gather_output and self.layouts["weight"].placements[0].copies > 1:  # type: ignore[union-attr]
            raise PlanError(
                f"{path} with a weight of shape {[out_features, in_features]} gives the same features on "
                f"several of tp = {group.size} ranks, which cannot be gathered: set gather_output to False, "
                f"or tp to {partition.parts}."
            )
        self.boundary = WholeBoundary(group)
        self.enters = True
        """Whether the input enters here; else an entrance before did it, for several linears at once."""
        self.transposed = False
        """Whether the weight is `[in, out]`."""
        self.queue: WeightGradientQueue | None = None
        self.take_pieces(nn.Linear(in_features, out_features, bias, device, dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by this rank's rows of the weight."""
        entered = self.boundary.enter(input) if self.enters else input
        output = linear(entered, self.weight, self.bias, self.queue, transposed=self.transposed)
        return gather(output, self.group, -1, self.out_features) if self.gather_output else output

    def extra_repr(self) -> str:
        """Sizes of the full linear, and of how many pieces this is one."""
        return f"{self.in_features}, {self.out_features} / {self.group.size}, bias={self.bias is not None}"


class RowParallelLinear(_PieceOfLinear):
    """A linear whose input features are cut over `group`; the bias is added once, after the sum.

    `[..., in_features / size]`, this rank's piece, to `[..., out_features]`, the same on every rank. Without
    `input_is_parallel` it is given `[..., in_features]`, whole on every rank. Communication: one all-reduce
    of the output; without `input_is_parallel` one all-gather of the input's gradient.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        partition: Partition = EVEN,
        path: str = "a row-parallel linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """As `ColumnParallelLinear`, with the input features cut."""
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.input_is_parallel = input_is_parallel
        self.layouts = row_layouts(out_features, in_features, partition, {AXIS: group.size}, path)
        self.boundary = WholeBoundary(group)
        self.transposed = False
        """Whether the weight is `[in, out]`."""
        self.queue: WeightGradientQueue | None = None
        self.take_pieces(nn.Linear(in_features, out_features, bias, device, dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by this rank's columns of the weight, sum over the group, add the bias."""
        piece = input if self.input_is_parallel else split(input, self.group, -1)
        product = linear(piece, self.weight, None, self.queue, transposed=self.transposed)
        output = self.boundary.leave(product)
        return output if self.bias is None else output.add_(self.bias)

    def extra_repr(self) -> str:
        """Sizes of the full linear, and of how many pieces this is one."""
        return f"{self.in_features} / {self.group.size}, {self.out_features}, bias={self.bias is not None}"
