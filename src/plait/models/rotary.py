"""Rotary position embedding (Su et al. 2021): rotates pairs of features by an angle that grows with position.

The product of a rotated query and key depends on their distance only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from plait.models.result_cache import ResultCache
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.position_marks import gives_positions
from plait.tensor.running_sequence import running_sequence

Angles = tuple[Tensor, Tensor]
"""Cosines and sines."""


def rotary_angles(
    length: int, size: int, base: float, like: Tensor, cache: ResultCache | None = None
) -> Angles:
    """Return cosines and sines `[length, size / 2]` of position · base^(-2i / size).

    See Su et al. 2021, section 3.2.2. In float32, or in the dtype of `like` where that is wider, and on its
    device. Positions, and what `cache` keeps: as in `angles_of_positions`.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)

    def compute(positions: Tensor) -> Angles:
        exponents = torch.arange(0, size, 2, dtype=dtype, device=like.device) / size
        angles = positions * base**-exponents
        return angles.cos(), angles.sin()

    return angles_of_positions((size, base), compute, length, dtype, like, cache)


@gives_positions
def angles_of_positions(
    key: Hashable,
    compute: Callable[[Tensor], Angles],
    length: int,
    dtype: torch.dtype,
    like: Tensor,
    cache: ResultCache | None,
) -> Angles:
    """Return the rotary angles that `compute` gives for positions `[length, 1]`, from `cache` if known.

    The positions are 0, 1, 2, …; under context parallelism those of this rank; and with packed documents
    those in each row's documents, `[rows, 1, length, 1]`. The result must depend on them, on `key` and the
    dtype of `like` only: all layers with the same `cache` share it, and those that run on the same packed
    documents.
    """
    device, sequence, key = like.device, running_sequence(), (key, dtype, like.dtype)

    def compute_for(positions: Tensor) -> Angles:
        column = positions.to(dtype).unsqueeze(-1)
        return compute(column.unsqueeze(1) if positions.dim() == 2 else column)

    def compute_for_rows() -> Angles:
        if sequence is not None:
            return compute_for(sequence.positions(device))
        return compute_for(torch.arange(length, dtype=dtype, device=device))

    if sequence is not None and TRACE.get() is not None:
        return compute_for_rows()  # a part of the layer's graph
    if sequence is not None and sequence.documents is not None:
        return sequence.result(("rotary angles", key, device), compute_for_rows)
    if cache is None:
        return compute_for_rows()
    held = length if sequence is None else (sequence.layout, sequence.group.index)
    return cache.get((held, key), like, compute_for_rows)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `x` `[..., length, size]` with each pair of features i and i + size / 2 rotated by position.

    The published weights in the format of Hugging Face pair these halves; Su et al. pair neighbours, which is
    the same up to the order of features.
    """
    one, other = x.chunk(2, dim=-1)
    rotated = torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)
    return rotated.to(x.dtype)
