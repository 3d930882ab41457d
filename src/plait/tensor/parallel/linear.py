"""Column- and row-parallel linears (Shoeybi et al. 2019, 'Megatron-LM', section 3), in regions.

    column:  Y_t = X W_tᵀ + b_t        partitioned output features; no communication forward
    row:     Y   = Σ_t X_t W_tᵀ + b    partitioned input features; one all-reduce forward, then the bias, once

A column linear followed by a row linear costs one all-reduce forward (the row's) and one backward (of the
gradient of the column's input). With sequence parallelism, each all-reduce becomes an all-gather and a
reduce-scatter:

    outside of the region       enter                       leave
    values are whole            copy                        reduce
    values are in parts         gather_in (all-gather)      scatter_out (reduce-scatter)

See `plait.tensor.autograd.paired_collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.plan.layout.layout import Layout, divide
from plait.ranks.group import Group
from plait.tensor.autograd.deferred_weight_gradients import linear
from plait.tensor.autograd.float8_inputs import CastInputs
from plait.tensor.autograd.float8_linear import float8_linear
from plait.tensor.autograd.float8_operands import LinearCasts
from plait.tensor.autograd.paired_collectives import (
    Overlap,
    SumOfSummands,
    copy,
    gather,
    gather_in,
    reduce,
    scatter_out,
    split,
)
from plait.tensor.autograd.regathered_activations import GatherRegistry
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout_mask import DimPart
from plait.tensor.parallel.partition import AXIS, EVEN, Partition, column_layouts, local_shard, row_layouts


@dataclass
class RegionBoundary:
    """The collectives by which values enter and leave a tensor-parallel region of a layer.

    Communication where values outside are whole: one all-reduce in `leave` and one in `enter`'s backward.
    Where they are parts: one all-gather in `enter`, one reduce-scatter in `leave`; in the backward one of
    the other.
    """

    group: Group
    dim: int | None = None
    """The sequence dim, where values outside are parts of the sequence; None: they are whole."""
    overlap: Overlap | None = None
    """Runs while a gradient is summed."""
    registry: GatherRegistry | None = None
    """Records gathered inputs and gradients, so that they are gathered again for weight gradients; None: they
    are saved."""
    inputs: CastInputs | None = None
    """Of the layer's float8 linears, which give gradients of entered tensors in a wide dtype; None: it has
    none."""
    length: int = 0
    """The length of the whole sequence, set before each run of a layer."""

    def enter(self, tensor: Tensor) -> Tensor:
        """Return the input of the region's first linears: `tensor`, or where it is a part, the whole."""
        if self.dim is None:
            return copy(tensor, self.group, self.overlap, self.inputs)
        return gather_in(tensor, self.group, self.dim, self.length, self.overlap, self.registry, self.inputs)

    def leave(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, or this rank's part of the sum. May write to `tensor`."""
        if self.dim is None:
            return reduce(tensor, self.group)
        return scatter_out(tensor, self.group, self.dim, self.registry)

    def sum_of(self, summand: Tensor) -> SumOfSummands:
        """Return how `leave` sums tensors of the length of `summand`, for use outside of autograd."""
        size = 0 if self.dim is None else summand.shape[self.dim]
        return SumOfSummands(self.group, self.dim, size, self.registry)

    def part(self, size: int) -> DimPart:
        """Return this rank's range of the sequence. ModelError unless `size` is the length of the range."""
        own = divide(self.length, self.group.size)[self.group.index]
        if len(own) != size:
            raise ModelError(
                f"a dropout was given a tensor whose dim {self.dim} has {size} elements, where this rank has "
                f"{len(own)} of the {self.length} positions of the sequence: put it before the "
                "operation that changes the dims, or remove the rule sequence of its layer."
            )
        return DimPart(own.start, self.length)


class _ParallelLinear(nn.Module):
    """Base of column- and row-parallel linears: this rank's shards of a full linear's weight and bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False
    """Whether the weight is `[in, out]`."""
    group: Group
    queue: WeightGradientQueue | None = None
    casts: LinearCasts | None = None
    """How its operands are cast to float8; None: they are not."""
    weight_scale: Tensor | None
    """With `casts`: the scale of a weight that is in float8 already; None: it is cast."""
    boundary: RegionBoundary
    """The boundary of the linear's region."""
    layouts: dict[str, Layout]

    @classmethod
    def of(cls, full: nn.Linear, group: Group, **options: Any) -> Self:
        """Return this rank's shard of a full linear, which is equal on every rank. Copies the values."""
        sizes = full.in_features, full.out_features
        made = cls(*sizes, group, bias=full.bias is not None, device="meta", **options)
        made.load_from(full)
        return made

    def load_from(self, full: nn.Linear) -> None:
        """Copy this rank's shards of a full linear into weight and bias."""
        self.weight = local_shard(full.weight, self.layouts["weight"], self.group)
        self.bias = None if full.bias is None else local_shard(full.bias, self.layouts["bias"], self.group)


class ColumnParallelLinear(_ParallelLinear):
    """A linear whose output features are partitioned over `group`.

    Maps `[..., in_features]`, whole on every rank, to `[..., out_features / size]`, this rank's part; with
    `gather_output` to `[..., out_features]`. `weight` and `bias` are this rank's shards of the full linear's
    under `layouts`. Communication: one all-reduce of the input's gradient; with `gather_output` one
    all-gather forward.
    """

    enters = True
    """Whether `forward` enters the region; else an entrance before does, once for several linears."""

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
        """Initialize as `nn.Linear(in_features, out_features)` under the same seed; keep this rank's shard.

        Give all ranks of the group the same seed. PlanError, naming `path`, shape and degree, where
        `partition` does not fit the output features.
        """
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.gather_output = gather_output
        self.layouts = column_layouts(out_features, in_features, partition, {AXIS: group.size}, path)
        if gather_output and self.layouts["weight"].placements[0].copies > 1:  # type: ignore[union-attr]
            raise PlanError(
                f"{path} with a weight of shape {[out_features, in_features]} has the same features on "
                f"several of tp = {group.size} ranks, which cannot be gathered: set gather_output to False, "
                f"or tp to {partition.parts}."
            )
        self.boundary = RegionBoundary(group)
        self.load_from(nn.Linear(in_features, out_features, bias, device, dtype))

    @property
    def is_product_of_input(self) -> bool:
        """Whether `forward` is a plain linear of its input, without collectives or a transpose."""
        return not (self.enters or self.gather_output or self.transposed or self.casts)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with this rank's rows of the weight, plus their bias."""
        entered = self.boundary.enter(input) if self.enters else input
        if self.casts is None:
            output = linear(entered, self.weight, self.bias, self.queue, transposed=self.transposed)
        else:
            output = float8_linear(self, entered, self.queue, is_transposed=self.transposed)
        return gather(output, self.group, -1, self.out_features) if self.gather_output else output

    def extra_repr(self) -> str:
        """Return the sizes of the full linear, and the number of ranks."""
        return f"{self.in_features}, {self.out_features} / {self.group.size}, bias={self.bias is not None}"


class RowParallelLinear(_ParallelLinear):
    """A linear whose input features are partitioned over `group`; the bias is added once, after the sum.

    Maps `[..., in_features / size]`, this rank's part, to `[..., out_features]`, the same on every rank.
    Without `input_is_parallel` the input is `[..., in_features]`, whole on every rank. Communication: one
    all-reduce of the output; without `input_is_parallel` one all-gather of the input's gradient.
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
        """Initialize as `ColumnParallelLinear`, with partitioned input features."""
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.input_is_parallel = input_is_parallel
        self.layouts = row_layouts(out_features, in_features, partition, {AXIS: group.size}, path)
        self.boundary = RegionBoundary(group)
        self.load_from(nn.Linear(in_features, out_features, bias, device, dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with this rank's columns of the weight, summed over the group, plus the bias."""
        part = input if self.input_is_parallel else split(input, self.group, -1)
        if self.casts is None:
            product = linear(part, self.weight, None, self.queue, transposed=self.transposed)
            output = self.boundary.leave(product)
        else:
            options: Any = {"is_transposed": self.transposed, "output_sum": self.boundary.sum_of(part)}
            output = float8_linear(self, part, self.queue, **options)
        return output if self.bias is None else output.add_(self.bias)

    def extra_repr(self) -> str:
        """Return the sizes of the full linear, and the number of ranks."""
        return f"{self.in_features} / {self.group.size}, {self.out_features}, bias={self.bias is not None}"
