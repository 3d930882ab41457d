"""In 16 bits a norm is held to the digits that a computation in float32 gives."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from verification_cases import case_of, verify_here

from parity.cases import llama
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh
from plait.tensor.parallel.embedding_and_norm import ParallelRMSNorm
from plait.verification.reference.differences_within_layers import (
    FEATURES,
    ModuleSketches,
    RMSNorms,
    rounded_otherwise,
)


class Wrapped(nn.Module):
    """A layer with a norm inside, after which `change` applies."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


FEW = int(FEATURES * 24)


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


def test_a_norm_of_other_epsilons_weights_and_rows_is_its_definition() -> None:
    x = values(torch.bfloat16)
    for norm, right in (
        (nn.RMSNorm(24), True),
        (nn.RMSNorm(24, eps=0.5), True),
        (nn.RMSNorm(24, elementwise_affine=False), True),
        (nn.RMSNorm((6, 24)), True),  # is no norm of the last dim, and not looked at
        (nn.RMSNorm(24, eps=0.5), False),
    ):
        layer = Wrapped(norm.bfloat16())
        norms = RMSNorms(layer)
        output = layer(x)
        if not right:
            norm.eps = 0.25
            ((sentence, actual, expected),) = norms.differences()
            assert sentence.startswith("inside, of the norm norm: it is given equal numbers")
            assert torch.equal(actual, output)
            torch.testing.assert_close(expected, layer(x), rtol=2.0**-7, atol=0)
        assert bool(list(norms.differences())) is not right
        norms.begin()
        layer(x.float() if norm.weight is None else x)
        norms.close()
        layer(x)
        assert len(norms._runs) == (len(norm.normalized_shape) == 1 and norm.weight is not None)


def shards_of_norms(x: Tensor) -> tuple[int, int]:
    """Of a norm that two ranks partition: differences, and those after its input was changed on rank 1."""
    mesh = Mesh(Plan(tp=2))
    mine = slice(12 * mesh.rank, 12 * mesh.rank + 12)
    norm = ParallelRMSNorm(nn.Parameter(torch.linspace(1, 2, 24)[mine].bfloat16()), 1e-6, mesh.group("tp"))
    norms = RMSNorms(Wrapped(norm))
    norms._note("norm", norm, (x[..., mine],), norm(x[..., mine]).detach())
    right = len(list(norms.differences()))
    norms.begin()
    own = x[..., mine] * (1 + 2 * mesh.rank)
    norms._note("norm", norm, (own,), norm(x[..., mine]).detach())
    wrong = len(list(norms.differences()))
    mesh.close()
    return right, wrong


def test_a_norm_over_two_ranks_is_that_of_all_features(thread_ranks: RankPool) -> None:
    assert thread_ranks.run(shards_of_norms, values(torch.bfloat16), ranks=2) == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("off", "given_off", "named", "seen"),
    [
        (0, 0, True, False),
        (FEW, 0, True, False),
        (FEW + 1, 0, True, True),
        (FEW + 1, 1, True, False),
        (FEW + 1, 0, False, False),
    ],
)
def test_more_than_a_quarter_of_the_features_makes_a_difference(
    off: int, given_off: int, named: bool, seen: bool
) -> None:
    """Also of a part of the features, in another order."""
    given, gives = (torch.randn(24, generator=torch.Generator().manual_seed(n)).double() for n in (3, 4))
    expected = {"n|given|0|15": given, "n|gives|0|15": gives}
    part = torch.arange(24).flip(0)
    for features in (torch.arange(24), part):
        found = {"other|given|0|15": given, "n|given|0|15": given[features], "n|gives|0|15": gives[features]}
        if features is part:
            found = {name: one[: FEW * 2].clone() for name, one in found.items()}
        found["n|given|0|15"] = found["n|given|0|15"] + 1e-9 * (given_off > 0)
        share = off if features is not part else off // 2 + (off == FEW + 1)
        output = found["n|gives|0|15"].clone()
        output[:share] += 1e-9
        found["n|gives|0|15"] = output
        told = rounded_otherwise(found, expected, {"n"} if named else {"other"})
        assert (told is not None) is seen
        if told is not None:
            assert told[0].startswith("inside, of the norm n: it is given equal numbers")
            assert torch.equal(told[1], output)
            right = gives[features][: len(output)]
            assert torch.equal(told[2], right)


@pytest.mark.full
def test_norms_of_a_layer_that_is_traced_for_its_graphs_are_not_compared() -> None:
    """Their tensors have no values."""
    case = case_of(llama(layers=1, tied=False), mode="native", steps=1)
    assert verify_here(case, Plan(precision="bf16", compile="graphs"))


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
