"""Reads published weights in 4 and 8 bits, converted to floating-point numbers.

    MXFP4, of GPT-OSS       x_blocks        uint8 [experts, columns, groups, 16], two numbers a byte
                            x_scales        uint8 [experts, columns, groups], exponents of 2, plus 127
                            x               [experts, 32 · groups, columns]
    FP8, of DeepSeek-V3     x               float8_e4m3fn [rows, columns]
                            x_scale_inv     float32, a factor for each block, such as 128 by 128

MXFP4: OCP Microscaling Formats 1.0, sections 5.2 and 5.4. The last blocks of FP8 may be smaller ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError

QUANTIZATION = "quantization_config"
"""The key of config.json that says how weights are quantized."""
_BLOCKS, _SCALES, _FACTORS = "_blocks", "_scales", "_scale_inv"
_GROUP = 32
_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8 = "F8_E4M3"


def require_known_quantization(folder: Path, quantization: Mapping[str, Any]) -> None:
    """Raise ModelError for a `quantization_config` of config.json whose weights plait cannot read."""
    method = quantization.get("quant_method")
    if method != "mxfp4" and not (method == "fp8" and _block(quantization) is not None):
        raise ModelError(
            f"the weights in {folder} are quantized (quantization_config of config.json, quant_method = "
            f"{method!r}), and plait reads mxfp4 and fp8 with a weight_block_size of two numbers: give a "
            "folder of the model as it was before."
        )


def _block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a factor, or None."""
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def dequantized(slices: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return lazy slices of files by key; those of quantized tensors yield floating-point numbers."""
    found = dict(slices)
    block = _block(quantization)
    for key in slices:
        name = key.removesuffix(_BLOCKS)
        if name != key and f"{name}{_SCALES}" in slices:
            found[name] = Mxfp4Slices(found.pop(key), found.pop(f"{name}{_SCALES}"))
        elif f"{key}{_FACTORS}" in slices and slices[key].get_dtype() == _FP8 and block is not None:
            found[key] = Fp8Slices(slices[key], found.pop(f"{key}{_FACTORS}"), block)
    return found


@dataclass(frozen=True)
class Mxfp4Slices:
    """The tensor `[experts, inputs, outputs]` of a model, read on demand from numbers of 4 bits.

    Has what plait uses of the slices of safetensors: `get_shape`, `get_dtype`, and `[...]`.
    """

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        experts, columns, groups, _ = self.blocks.get_shape()
        return [experts, _GROUP * groups, columns]

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors names it: bfloat16 holds the numbers exactly."""
        return "BF16"

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """Return the whole tensor, computed one expert at a time."""
        numbers = torch.tensor([*_POSITIVE, *(-one for one in _POSITIVE)], dtype=torch.bfloat16)
        blocks, scales = self.blocks[...], self.scales[...].to(torch.int32) - _BIAS
        whole = torch.empty(self.get_shape(), dtype=torch.bfloat16)
        for target, packed, exponents in zip(whole, blocks, scales, strict=True):
            halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # the lower half comes first
            read = torch.ldexp(numbers[halves.to(torch.int64)], exponents.unsqueeze(-1))
            target.copy_(read.flatten(-2).t())
        return whole


@dataclass(frozen=True)
class Fp8Slices:
    """The tensor `[rows, columns]` of a model, read on demand from numbers of 8 bits and block factors.

    Has the methods of `Mxfp4Slices`.
    """

    numbers: Any
    factors: Any
    block: tuple[int, int]
    """Rows and columns that share a factor."""

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        shape: list[int] = self.numbers.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors names it."""
        return "F32"

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """Return the whole tensor."""
        whole: Tensor = self.numbers[...].to(torch.float32)
        factors = self.factors[...].to(torch.float32)
        for dim, size in enumerate(self.block):
            factors = factors.repeat_interleave(size, dim).narrow(dim, 0, whole.shape[dim])
        return whole.mul_(factors)
