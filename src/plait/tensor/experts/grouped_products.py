"""Products of rows that are sorted into groups, one group for each expert, with a matrix for each group.

By `torch.nn.functional.grouped_mm` where it applies, which reads on the device where groups end, else in a
loop over the groups, whose sizes the host reads. On a CPU `grouped_mm` is such a loop itself, without Python:
as fast for large matrices, and 2.5 times for many small ones. It makes new tensors, however, so large weight
gradients are added to their buffers in a loop, in one pass over memory. On meta groups of equal size are one
batch of products, which shows what is computed, and allocated on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.ranks.accelerator import is_accelerator, multiplies_groups

ALIGNMENT = 16
"""Bytes to which `grouped_mm` wants the first element, and each row, of its operands aligned."""
SMALLEST_IN_LOOP = 2**14
"""Elements of one matrix from which a CPU adds weight gradients in a loop: a temporary takes longer than
Python (measured with 2,048 to 524,288 elements)."""


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of rows, one for each expert, by where they end."""

    rows: int
    """Of all groups."""
    ends: Tensor
    """int32 `[groups]`, on the rows' device: where each group ends."""
    known_sizes: tuple[int, ...] | None = None
    """Rows of each group; None: the host has not read them."""

    @staticmethod
    def of(sizes: tuple[int, ...], ends: Tensor) -> Groups:
        """Return groups of which the host knows the numbers of rows, `sizes`."""
        return Groups(sum(sizes), ends, sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group, on the host, which waits for them where they are not known."""
        if self.known_sizes is not None:
            return self.known_sizes
        return tuple(end - start for start, end in pairwise([0, *self.ends.tolist()]))

    @property
    def starts(self) -> Tensor:
        """int32 `[groups]`: where each group begins."""
        return functional.pad(self.ends, (1, 0))[:-1]


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Return `[rows, in]` times the matrix of each row's group, `[groups, in, out]`: `[rows, out]`."""
    if _is_grouped(rows, matrices) and not rows.is_meta:
        return functional.grouped_mm(rows, matrices, offs=groups.ends)
    result = rows.new_empty(rows.shape[0], matrices.shape[2])
    if rows.is_meta:
        for which, given, out in batches(groups, rows, result):
            torch.bmm(given, matrices[which], out=out)
        return result
    for part, matrix, out in zip(parts(rows, groups), matrices, parts(result, groups), strict=True):
        torch.mm(part, matrix, out=out)
    return result


def add_grouped_product(total: Tensor, left: Tensor, right: Tensor, groups: Groups, first: bool) -> None:
    """Add `leftᵀ right` of each group, `[rows, m]` and `[rows, n]`, to `total [groups, m, n]` in place.

    `total` may have a wider dtype. `first`: write it, whatever `total` holds; zeros for a group without rows.
    """
    in_loop = (
        total.dtype == left.dtype and total[:1].numel() >= SMALLEST_IN_LOOP and not is_accelerator(total)
    )
    if not in_loop and _is_grouped(left.t(), right):
        product = _products_over_rows(left, right, groups)
        total.copy_(product) if first else total.add_(product)
        return
    if left.is_meta and total.dtype == left.dtype:
        for which, a, b in batches(groups, left, right):
            total[which].baddbmm_(a.mT, b, beta=0 if first else 1)
        return
    for a, b, one in zip(parts(left, groups), parts(right, groups), total, strict=True):
        if total.dtype == left.dtype:
            one.addmm_(a.t(), b, beta=0 if first else 1)
        elif first:
            one.copy_(a.t() @ b)
        else:
            one.add_(a.t() @ b)


def _products_over_rows(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """Return `leftᵀ right` of each group: `[groups, m, n]`."""
    if not left.is_meta:
        return functional.grouped_mm(left.t(), right, offs=groups.ends)
    result = left.new_empty(len(groups.ends), left.shape[1], right.shape[1])
    for which, a, b in batches(groups, left, right):
        torch.bmm(a.mT, b, out=result[which])
    return result


def grouped_sums(rows: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each group's rows: `[groups, width]`."""
    every = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return functional.embedding_bag(every, rows, groups.starts, mode="sum")


def for_each_row(values: Tensor, groups: Groups) -> Tensor:
    """Return the value `[groups, width]` of each row's group: `[rows, width]`."""
    every = torch.arange(groups.rows, dtype=torch.int32, device=values.device)
    return values.index_select(0, torch.searchsorted(groups.ends, every, right=True, out_int32=True))


def batches(groups: Groups, *operands: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each run of equally large groups: a slice of groups, and views `[n, size, width]` of operands.

    On meta these are two batches at most: see `assign`.
    """
    group = row = 0
    for size, alike in groupby(groups.sizes):
        count = len([*alike])
        rows = slice(row, row + count * size)
        views = (one[rows].view(count, size, one.shape[1]) for one in operands)
        yield slice(group, group + count), *views
        group, row = group + count, rows.stop


def parts(rows: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """Return views of the rows of each group; the host waits for unknown sizes."""
    return torch.split(rows, [*groups.sizes]) if groups.sizes else ()


def _is_grouped(*operands: Tensor) -> bool:
    """Return whether `grouped_mm` takes the operands; on meta, whether it would take such ones."""
    first = operands[0]
    return multiplies_groups(first, first.dtype) and all(map(_is_aligned, operands))


def _is_aligned(operand: Tensor) -> bool:
    if not operand.is_meta and operand.data_ptr() % ALIGNMENT:
        return False
    *_, between_rows, within_rows = sorted(operand.stride()[-2:], reverse=True)
    return within_rows == 1 and between_rows * operand.itemsize % ALIGNMENT == 0
