"""The matrices of a parameter: boxes of it that one rank orthogonalizes, how matrices lie in a box, batches.

query, key and value in one weight    three boxes of rows
experts `[E, 2F, H]`                  two boxes of each expert, its gate and its up
heads with rows of q, k and v each    one box: of every head, the first rows are q's, the next k's …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from plait.optimizers.newton_schulz import iteration_cost
from plait.plan.layout.layout import Box
from plait.plan.parameter_units import Dtype
from plait.ranks.accelerator import is_accelerator

BLOCK_ELEMENTS = 1 << 16
"""Of matrices that a CPU works on at once: 0.6 MB in float32 and bfloat16, with a temporary."""
MOST_ELEMENTS = 1 << 26
"""Of matrices that are orthogonalized together: an iteration has about three times as many in its results."""


@dataclass(frozen=True)
class MatrixPart:
    """A box of a parameter that one rank orthogonalizes: one matrix, or several whose rows alternate."""

    box: Box
    """Of the whole parameter; its last two dims are the matrix's, those before are of size 1."""
    sections: tuple[int, ...]
    """How many rows (out features) of each matrix follow each other; the rows of the box repeat them."""
    transposed: bool = False
    """Whether the box is `[…, in, out]`, as in `Conv1D` of transformers."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The out and in features of each matrix."""
        outputs, inputs = self.box.sizes[-2:][::-1] if self.transposed else self.box.sizes[-2:]
        repeats = outputs // sum(self.sections)
        return tuple((repeats * rows, inputs) for rows in self.sections)

    @property
    def cost(self) -> int:
        """The multiplications of an iteration of Newton–Schulz for all of its matrices."""
        return sum(iteration_cost(*shape) for shape in self.shapes)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the matrices `[out, in]` in `values`, a tensor of the box's sizes; views where possible."""
        matrix = values.reshape(values.shape[-2:])
        rows = matrix.mT if self.transposed else matrix
        periods = rows.unflatten(0, (-1, sum(self.sections)))  # type: ignore[no-untyped-call]
        return [one.flatten(0, 1) for one in periods.split(self.sections, dim=1)]

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the tensor of the box's sizes that holds `matrices`: the inverse of `split`."""
        pairs = zip(matrices, self.sections, strict=True)
        periods = [one.unflatten(0, (-1, rows)) for one, rows in pairs]  # type: ignore[no-untyped-call]
        rows = (torch.cat(periods, dim=1) if len(periods) > 1 else periods[0]).flatten(0, 1)
        return (rows.mT if self.transposed else rows).reshape(self.box.sizes)


def sent_dtype(own: Dtype, iterations: Dtype) -> Dtype:
    """Return the dtype in which matrices are exchanged: that of iterations, or the parameter's if narrower.

    `own`: the dtype of the parameter that the optimizer updates.
    """
    return own if own.itemsize < iterations.itemsize else iterations


def divided_matrix(
    offsets: Sequence[int],
    sizes: tuple[int, int],
    blocks: Sequence[int],
    sections: Sequence[int] = (),
    *,
    transposed: bool = False,
) -> Iterator[MatrixPart]:
    """Yield a part for each block of out features of a matrix of `sizes`, `(out, in)` unless transposed.

    `offsets`: the place of the matrix in dims of the parameter before its last two. `blocks`: out features of
    each part. `sections`: see `MatrixPart`; by default a part is one matrix.
    """
    before = (1,) * len(offsets)
    for start, rows in zip(accumulate(blocks, initial=0), blocks, strict=False):
        first, inside = ((0, start), (sizes[0], rows)) if transposed else ((start, 0), (rows, sizes[1]))
        box = Box((*offsets, *first), (*before, *inside))
        yield MatrixPart(box, tuple(sections) or (rows,), transposed)


def batches_of(
    numbers: Iterable[int], parts: Sequence[MatrixPart], most: int = MOST_ELEMENTS
) -> list[list[int]]:
    """Group part numbers into batches of equally shaped parts, of at most `most` elements or one part."""
    alike: dict[Any, list[int]] = {}
    for number in numbers:
        part = parts[number]
        alike.setdefault((part.box.sizes, part.sections, part.transposed), []).append(number)
    batches = []
    for each in alike.values():
        count = max(1, most // parts[each[0]].box.numel)
        batches += [each[first : first + count] for first in range(0, len(each), count)]
    return batches


def row_blocks(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of rows of `[…, m, n]` matrices, which stay in a CPU's cache; on accelerators all rows.

    Several operations on each block then read memory once. On an accelerator: all rows at once.
    """
    if any(map(is_accelerator, matrices)):
        yield matrices
        return
    rows = max(1, BLOCK_ELEMENTS // max(1, matrices[0].shape[-1]))
    yield from zip(*(torch.split(one, rows, dim=-2) for one in matrices), strict=True)
