"""Rotary positions by definition: the frequencies of each scaling, and the rotation of pairs of features.

Su et al. 2021 (arXiv:2104.09864), section 3.2.2; linear scaling: Chen et al. 2023 (arXiv:2306.15595); YaRN:
Peng et al. 2023 (arXiv:2309.00071), section 3.2 and appendix A.2; `llama3`: Llama team 2024
(arXiv:2407.21783), as in the code published with the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of rotary angles, `[..., length, pairs]`, one for each pair of features."""

    cosines: Tensor
    sines: Tensor


def angles_at(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Angles:
    """Return cosines and sines, times `factor`, of position · frequency, in the dtype of `frequencies`.

    `positions` `[length]`, or `[rows, length]` for results `[rows, 1, length, pairs]`.
    """
    angle = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    angle = angle.unsqueeze(1) if positions.dim() == 2 else angle
    return Angles(angle.cos() * factor, angle.sin() * factor)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """Return `x` with each pair of features i and i + pairs rotated by its angle, as a complex number.

    Features from 2 · pairs on stay as they are.
    """
    pairs = angles.cosines.shape[-1]
    real, imaginary, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    cosines, sines = angles
    turned = real * cosines - imaginary * sines, real * sines + imaginary * cosines
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], -1)


def base_frequencies(base: float, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return base^(-2i / size) for each of `size / 2` pairs."""
    return base ** -(torch.arange(0, size, 2, dtype=dtype, device=device) / size)


def scaled_frequencies(parameters: Mapping[str, Any], size: int, context: int) -> tuple[Tensor, float] | None:
    """Return float64 frequencies and the factor of cosines and sines; None for a type without a definition.

    `parameters`: the `rope_parameters` of a configuration of Hugging Face; `context`: its longest sequence.
    """
    base = float(parameters["rope_theta"])
    plain = base_frequencies(base, size, torch.float64, torch.device("cpu"))
    match parameters.get("rope_type", "default"):
        case "default":
            return plain, 1.0
        case "linear":
            return plain / parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, parameters), 1.0
        case "yarn":
            return _yarn(plain, base, size, parameters, context)
    return None


def _llama3(plain: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Return frequencies of which slow ones are divided by the factor, with a smooth passage between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    slowed: Tensor = kept * plain + (1 - kept) * plain / parameters["factor"]
    return slowed


def _yarn(
    plain: Tensor, base: float, size: int, parameters: Mapping[str, Any], context: int
) -> tuple[Tensor, float]:
    """Return frequencies of which slow ones are divided by the factor, and 0.1 · ln(factor) + 1."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or context / original
    fast, slow = (parameters.get(name) or usual for name, usual in (("beta_fast", 32), ("beta_slow", 1)))
    first, last = (
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)
    )
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001
    slowed = ((torch.arange(len(plain), dtype=torch.float64) - first) / width).clamp(0, 1)
    return (slowed / factor + 1 - slowed) * plain, _attention_factor(parameters, factor)


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's factor of cosines and sines."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(one) / grown(all_dims) if one and all_dims else grown(1.0)
