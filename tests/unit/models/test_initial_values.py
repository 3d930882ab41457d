from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.initial_values import Initial, Normal, initial_value, normal_values

WHOLE = normal_values("layer.weight", 0, 50, 1.0)


def test_fewer_initial_values_are_the_first_of_more() -> None:
    assert torch.equal(normal_values("layer.weight", 0, 13, 1.0), WHOLE[:13])


def test_initial_values_depend_on_name_seed_and_spread() -> None:
    assert not torch.isin(normal_values("layer.bias", 0, 50, 1.0), WHOLE).any()
    assert not torch.isin(normal_values("layer.weight", 1, 50, 1.0), WHOLE).any()
    assert not torch.isin(normal_values("0/layer.weight", 1, 50, 1.0), WHOLE).any()
    torch.testing.assert_close(normal_values("layer.weight", 0, 50, 0.02), 0.02 * WHOLE, rtol=1e-14, atol=0)
    assert not normal_values("layer.weight", 0, 50, 0.0).any()


def test_the_first_initial_values_stay_those_of_earlier_versions() -> None:
    """A run can be repeated with a later version; change these numbers only with a major version."""
    got = normal_values("layer.weight", 0, 3, 1.0).tolist()
    assert got == pytest.approx(FIRST_VALUES, rel=1e-12)


FIRST_VALUES = [-0.042936291061820106, -1.9612070907714523, -0.036429635549784956]


def test_initial_values_follow_the_normal_distribution() -> None:
    values = normal_values("w", 3, 200_000, 2.0)
    assert values.isfinite().all()
    assert abs(values.mean().item()) < 5 * 2.0 / math.sqrt(len(values))
    assert values.std().item() == pytest.approx(2.0, rel=0.01)
    inside = (values.abs() < 2.0).double().mean().item()
    assert inside == pytest.approx(0.6827, abs=0.005)
    assert 4.0 < values.abs().max().item() / 2.0 < 6.5
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].item()
    assert abs(neighbours) < 0.012


class Ruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.bare = nn.Parameter(torch.empty(2))

    def initial_values(self) -> dict[str, Initial]:
        return {"inner.weight": Normal(0.5)}


@pytest.fixture
def layer() -> Ruled:
    with torch.device("meta"):
        return Ruled()


def test_a_layers_own_initial_rule_comes_before_reset_parameters(layer: Ruled) -> None:
    value = initial_value(layer, "blocks.0", "inner.weight", 7)
    assert torch.equal(value, normal_values("blocks.0.inner.weight", 7, 12, 0.5).float().view(3, 4))
    alone = initial_value(layer, "", "inner.weight", 7)
    assert torch.equal(alone, normal_values("inner.weight", 7, 12, 0.5).float().view(3, 4))


def test_a_tensor_with_values_keeps_them() -> None:
    layer = Ruled()
    value = initial_value(layer, "0", "inner.weight", 7)
    assert torch.equal(value, layer.inner.weight)
    assert not value.requires_grad


def test_reset_parameters_is_repeatable_and_by_path_and_seed(layer: Ruled) -> None:
    def bias(path: str, seed: int) -> Tensor:
        return initial_value(layer, path, "inner.bias", seed)

    assert torch.equal(bias("0", 1), bias("0", 1))
    assert not torch.equal(bias("0", 1), bias("0", 2))
    assert not torch.equal(bias("0", 1), bias("1", 1))
    assert bias("0", 1).abs().max() <= 1 / math.sqrt(4)
    assert layer.inner.bias.is_meta


def test_buffers_and_norms_start_as_their_modules_say(layer: Ruled) -> None:
    assert initial_value(layer, "0", "norm.weight", 0).tolist() == [1.0] * 3
    assert initial_value(layer, "0", "norm.running_var", 0).tolist() == [1.0] * 3
    assert initial_value(layer, "0", "norm.num_batches_tracked", 0).item() == 0


def test_initial_values_do_not_advance_torchs_generator(layer: Ruled) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    initial_value(layer, "0", "inner.bias", 0)
    initial_value(layer, "0", "inner.weight", 0)
    assert torch.equal(torch.rand(3), wanted)


def test_a_tensor_without_an_initial_rule_is_refused(layer: Ruled) -> None:
    with pytest.raises(
        ModelError,
        match=r"^head\.bare is on the meta device and has no initial value: give layer 'head'",
    ):
        initial_value(layer, "head", "bare", 0)
