"""Rotary position embedding (Su et al. 2021): pairs of features turned by an angle that grows with position.

Turned so, the product of a query and a key depends on their distance, not on where they stand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(length: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, size / 2]` of position · base^(-2i / size) (Su et al. 2021, section 3.2.2).

    In float32, or in the dtype of `like` where that is wider, and on its device.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(length, dtype=dtype, device=like.device)
    exponents = torch.arange(0, size, 2, dtype=dtype, device=like.device) / size
    angles = torch.outer(positions, base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`x` `[..., length, size]` with feature i and feature i + size / 2 turned as a pair, by position.

    These halves are the pairs of the published weights in the format of Hugging Face; Su et al. pair
    neighbours. The same but for the order of features.
    """
    one, other = x.chunk(2, dim=-1)
    turned = torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)
    return turned.to(x.dtype)
