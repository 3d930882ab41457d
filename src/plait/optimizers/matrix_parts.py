"""The matrices of a parameter: boxes of it that one rank orthogonalizes, and how matrices lie in a box.

query, key and value in one weight    three boxes of rows
experts `[E, 2F, H]`                  two boxes of each expert, its gate and its up
heads with rows of q, k and v each    one box: of every head, the first rows are q's, the next k's …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from plait.optimizers.newton_schulz import iteration_cost
from plait.plan.layout.layout import Box


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
        rows = torch.cat(periods, dim=1).flatten(0, 1)
        return (rows.mT if self.transposed else rows).reshape(self.box.sizes)


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
