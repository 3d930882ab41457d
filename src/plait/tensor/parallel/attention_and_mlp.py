"""Tensor-parallel MLP and attention for training loops without an engine (Shoeybi et al. 2019, section 3).

    enter ─ column linears ─ features or heads of this rank ─ row linear ─ leave

Both cost one all-reduce forward and one backward, of a tensor like the input, for any number of column
linears. The row linear's bias is added once, after the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import PlanError
from plait.ranks.group import Group
from plait.tensor.attention.attention import heads_of
from plait.tensor.attention.fused_kernels import grouped_attention
from plait.tensor.autograd.deferred_weight_gradients import linear
from plait.tensor.autograd.kept_results import with_kept_operations
from plait.tensor.autograd.paired_collectives import copy
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear
from plait.tensor.parallel.partition import Partition

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rotates queries and keys, each `[rows, heads, length, head_size]`, such as rotary positions do."""


class TensorParallelMLP(nn.Module):
    """MLP `down(activation(up(x)))` or `down(activation(gate(x)) · up(x))` with partitioned inner features.

    Maps `[..., hidden]`, the same on every rank of `group`, to the same shape. Its linears are `up`, `gate`
    (None unless gated) and `down`; each has `layouts`, and `load_from` copies its shards of a full
    `nn.Linear`.
    Communication: one all-reduce of the output forward, one of the input's gradient backward, over `group`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        group: Group,
        *,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        gated: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialize full linears in the order `up`, `gate`, `down`; keep this rank's shards.

        Give all ranks of the group the same seed. Raises PlanError where the ranks do not divide `inner`.
        """
        super().__init__()
        self.group, self.activation = group, activation
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden, inner, group, path="up", **options)
        self.gate = ColumnParallelLinear(hidden, inner, group, path="gate", **options) if gated else None
        self.down = RowParallelLinear(inner, hidden, group, path="down", **options)
        for column in filter(None, (self.up, self.gate)):
            column.enters = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, without a residual connection."""
        entered = self.up.boundary.enter(x)
        up = self.up(entered)
        inner = self.activation(up) if self.gate is None else self.activation(self.gate(entered)) * up
        output: Tensor = self.down(inner)
        return output


class TensorParallelAttention(nn.Module):
    """Attention whose heads are partitioned over `group`.

    Maps `[rows, length, hidden]`, the same on every rank, to the same shape. Its linears are `query`, `key`,
    `value` and `output`. With fewer `kv_heads` than `heads`, `heads / kv_heads` consecutive query heads share
    a key and value head; with fewer than ranks, neighbouring ranks, the group `copies`, hold the same head.
    Communication: as `TensorParallelMLP`; with `copies` also the gradients of the weights and biases of key
    and value, one all-reduce each, over `copies`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        group: Group,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        causal: bool = True,
        rotate: Rotate | None = None,
        copies: Group | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialize full linears in the order query, key, value, output; keep this rank's shards.

        `head_size` is `hidden / heads` unless given. `copies` is `mesh.neighbours("tp", ranks // kv_heads)`
        where there are fewer `kv_heads` than ranks. Give all ranks of the group the same seed. PlanError
        where heads do not divide, and for `copies` that do not fit.
        """
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads or (head_size is None and hidden % heads):
            raise PlanError(
                f"attention with hidden = {hidden} has {heads} heads and {kv_heads} of keys and values: "
                "give a multiple of kv_heads that divides hidden, or head_size."
            )
        self.group, self.causal, self.rotate = group, causal, rotate
        self.head_size = hidden // heads if head_size is None else head_size
        self.copies = _checked_copies(copies, kv_heads, group)
        of_heads, of_keys = Partition(heads), Partition(kv_heads, repeated=True)
        queries, keys = heads * self.head_size, kv_heads * self.head_size
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.query = ColumnParallelLinear(hidden, queries, group, partition=of_heads, path="query", **options)
        self.key = ColumnParallelLinear(hidden, keys, group, partition=of_keys, path="key", **options)
        self.value = ColumnParallelLinear(hidden, keys, group, partition=of_keys, path="value", **options)
        self.output = RowParallelLinear(queries, hidden, group, partition=of_heads, path="output", **options)
        for column in (self.query, self.key, self.value):
            column.enters = False

    def forward(self, x: Tensor) -> Tensor:
        """Return attention's output, without a residual connection."""
        entered = self.query.boundary.enter(x)
        query = heads_of(self.query(entered), self.head_size)
        shared = (self._shared(one, entered) for one in (self.key, self.value))
        key, value = (heads_of(one, self.head_size) for one in shared)
        if self.rotate is not None:
            query, key = self.rotate(query, key)
        groups = query.shape[1] != key.shape[1]
        attend = grouped_attention if groups else functional.scaled_dot_product_attention
        mixed = with_kept_operations(lambda: attend(query, key, value, is_causal=self.causal))
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _shared(self, column: ColumnParallelLinear, entered: Tensor) -> Tensor:
        """Return a linear's output; sum its parameters' gradients over `copies`, which share a shard."""
        if self.copies is None:
            result: Tensor = column(entered)
            return result
        weight = copy(column.weight, self.copies)
        bias = None if column.bias is None else copy(column.bias, self.copies)
        return linear(entered, weight, bias, None)


def _checked_copies(copies: Group | None, kv_heads: int, group: Group) -> Group | None:
    """Return the group `copies`; None if no other rank has the same kv heads. PlanError for wrong ranks."""
    each = group.size // kv_heads if kv_heads < group.size and group.size % kv_heads == 0 else 1
    first = group.index // each * each
    alike = group.ranks[first : first + each]
    if each == 1:
        if copies is None or copies.size == 1:
            return None
        raise PlanError(
            f"each of {group.size} ranks of {group.name} holds key and value heads of its own: leave copies "
            "out."
        )
    if copies is None or copies.ranks != alike:
        given = (
            "none are given" if copies is None else f"copies are ranks {', '.join(map(str, copies.ranks))}"
        )
        raise PlanError(
            f"{kv_heads} heads of keys and values on {group.size} ranks of {group.name}: ranks "
            f"{', '.join(map(str, alike))} hold the same, but {given}: give "
            f"copies=mesh.neighbours({group.name!r}, {each})."
        )
    return copies
