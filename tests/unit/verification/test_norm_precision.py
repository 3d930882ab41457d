"""In 16 bits a norm is held to the digits that a computation in float32 gives."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.verification.norm_precision import RMSNorms, rounded_otherwise
from plait.verification.tensor_sketches import ModuleSketches


class Wrapped(nn.Module):
    """A layer with a norm inside, after which `change` applies."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


def coarse_norm(x: Tensor, shape: object, weight: Tensor, eps: float) -> Tensor:
    """An RMS norm whose mean square has 16 bits."""
    mean = x.pow(2).mean(-1, keepdim=True).float()
    return (weight * (x.float() * torch.rsqrt(mean + eps))).to(x.dtype)


def values(dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 6, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_torch_is_its_definition_and_a_coarse_one_is_not(dtype: torch.dtype) -> None:
    layer = Wrapped(nn.RMSNorm(24, eps=1e-6)).to(dtype)
    norms = RMSNorms(layer)
    layer(values(dtype))
    assert not list(norms.differences())
    with patch.object(functional, "rms_norm", coarse_norm):
        layer(values(dtype))
    assert len(list(norms.differences())) == 1
    norms.begin()
    assert not list(norms.differences())
    norms.close()


def sketches_of(norm: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], set[str]]:
    layer = Wrapped(norm)
    sketches = ModuleSketches(layer)
    layer(x)
    sketches.close()
    return sketches.found, sketches.norms


def test_a_norm_is_compared_where_both_runs_give_it_the_same_bits() -> None:
    x, norm = values(torch.bfloat16), nn.RMSNorm(24, eps=1e-6).bfloat16()
    expected, norms = sketches_of(norm, x)
    assert norms == {"norm"}
    assert rounded_otherwise(sketches_of(norm, x)[0], expected, norms) is None
    with patch.object(functional, "rms_norm", coarse_norm):
        found = rounded_otherwise(sketches_of(norm, x)[0], expected, norms)
        assert rounded_otherwise(sketches_of(norm, x * 1.5)[0], expected, norms) is None, "other inputs"
    assert found is not None
    assert "of the norm norm" in found[0]
