"""Rotary position embedding (Su et al. 2021): rotates pairs of features by an angle that grows with position.

The product of a rotated query and key depends on their distance only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.layers.result_cache import ResultCache


def rotary_angles(
    length: int, size: int, base: float, like: Tensor, cache: ResultCache | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[length, size / 2]` of position · base^(-2i / size).

    See Su et al. 2021, section 3.2.2. In float32, or in the dtype of `like` where that is wider, and on its
    device. `cache` keeps them for the next call with equal arguments.
    """
    if cache is not None:
        key = length, size, base, like.dtype
        return cache.get(key, like, lambda: rotary_angles(length, size, base, like))
    dtype = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(length, dtype=dtype, device=like.device)
    exponents = torch.arange(0, size, 2, dtype=dtype, device=like.device) / size
    angles = torch.outer(positions, base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return `x` `[..., length, size]` with each pair of features i and i + size / 2 rotated by position.

    The published weights in the format of Hugging Face pair these halves; Su et al. pair neighbours, which is
    the same up to the order of features.
    """
    one, other = x.chunk(2, dim=-1)
    rotated = torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)
    return rotated.to(x.dtype)
