"""Rotary position embedding (Su et al. 2021): rotates pairs of features by an angle that grows with position.

The product of a rotated query and key depends on their distance only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.autograd.position_marks import gives_positions
from plait.autograd.running_sequence import running_sequence
from plait.layers.result_cache import ResultCache


@gives_positions
def rotary_angles(
    length: int, size: int, base: float, like: Tensor, cache: ResultCache | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[length, size / 2]` of position · base^(-2i / size).

    See Su et al. 2021, section 3.2.2. In float32, or in the dtype of `like` where that is wider, and on its
    device. `cache` keeps them for the next call with equal arguments. The positions are 0, 1, 2, …; under
    context parallelism those of this rank; and with packed documents those in each row's documents, so that
    the result is `[rows, 1, length, size / 2]`.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    device, sequence = like.device, running_sequence()

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, size, 2, dtype=dtype, device=device) / size
        angles = positions.to(dtype).unsqueeze(-1) * base**-exponents
        angles = angles.unsqueeze(1) if positions.dim() == 2 else angles
        return angles.cos(), angles.sin()

    if sequence is not None:
        key = "rotary angles", size, base, like.dtype, device
        return sequence.result(key, lambda: compute(sequence.positions(device)))
    if cache is not None:
        known = length, size, base, like.dtype
        return cache.get(known, like, lambda: compute(torch.arange(length, device=device)))
    return compute(torch.arange(length, device=device))


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `x` `[..., length, size]` with each pair of features i and i + size / 2 rotated by position.

    The published weights in the format of Hugging Face pair these halves; Su et al. pair neighbours, which is
    the same up to the order of features.
    """
    one, other = x.chunk(2, dim=-1)
    rotated = torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)
    return rotated.to(x.dtype)
