"""A reset on the meta device gives each element of a tensor, or the tensor is refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.initial_values import ModuleReset, initial_value

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
OTHERS = [
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


class Made(nn.Module):
    """A module with one buffer or parameter, and a reset that is given."""

    def __init__(
        self, dtype: torch.dtype, reset: Callable[[Any], None], shape: tuple[int, ...] = (3, 4)
    ) -> None:
        super().__init__()
        self.reset = reset
        self.register_buffer("table", torch.empty(shape, dtype=dtype, device="meta"), persistent=False)

    def reset_parameters(self) -> None:
        self.reset(self)


def value_of(dtype: torch.dtype, reset: Callable[[Any], Any], shape: tuple[int, ...] = (3, 4)) -> Tensor:
    return initial_value(Made(dtype, reset, shape), "blocks.0", "table", 0)


def copied(module: Any) -> None:
    module.table.copy_(torch.ones(module.table.shape))


def first_row(module: Any) -> None:
    module.table[0].copy_(torch.ones(module.table.shape[1]))


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_a_tensor_that_a_reset_leaves_or_writes_in_part_is_refused_in_every_dtype(dtype: torch.dtype) -> None:
    assert value_of(dtype, copied).to(torch.complex128).eq(1).all()
    with pytest.raises(
        ModelError, match=r"^blocks\.0\.table is on the meta device, and .* any element of it: "
    ):
        value_of(dtype, lambda module: None)
    with pytest.raises(ModelError, match="does not set 8 of the 12 elements of it"):
        value_of(dtype, first_row)
    assert value_of(dtype, lambda module: None, (0, 4)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "compute",
    [
        lambda table: table.mul_(2),
        lambda table: table.add_(1),
        lambda table: table.clamp_(0, 1),
        lambda table: table.view(-1)[1:].fill_(0),
        lambda table: table.copy_(table.flip(0)),
    ],
)
def test_a_reset_that_computes_from_uninitialized_memory_is_refused(
    dtype: torch.dtype, compute: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(ModelError, match=r"reset_parameters\(\) of blocks\.0 \(Made\) does not set"):
        value_of(dtype, lambda module: compute(module.table))


def test_values_that_look_like_unwritten_memory_are_taken() -> None:
    assert value_of(torch.float32, lambda module: module.table.fill_(torch.nan)).isnan().all()
    assert value_of(torch.int64, lambda module: module.table.fill_(-1)).eq(-1).all()
    both = value_of(torch.float64, lambda module: module.table.fill_(torch.inf)[0].fill_(-torch.inf))
    assert both.isinf().all()


def test_a_replaced_tensor_is_taken_if_it_has_the_same_shape_and_dtype() -> None:
    def replace(*shape: int, **options: Any) -> Callable[[Any], None]:
        return lambda module: setattr(module, "table", torch.ones(shape, **options))

    assert value_of(torch.float32, replace(3, 4)).eq(1).all()
    for wrong in (replace(4), replace(3, 4, dtype=torch.float64), replace(3, 4, device="meta")):
        with pytest.raises(
            ModelError, match=r"table is torch\.float32 \[3, 4\], but reset_parameters\(\) leaves"
        ):
            value_of(torch.float32, wrong)


def test_a_reset_that_fails_is_named() -> None:
    with pytest.raises(
        ModelError, match=r"of blocks\.0 \(Made\) fails on memory on the CPU, ZeroDivisionError: "
    ):
        value_of(torch.float32, lambda module: 1 / 0)


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: float(np.random.rand())])
def test_numbers_that_a_reset_draws_from_python_or_numpy_depend_on_the_seed_only(
    draw: Callable[[], float],
) -> None:
    one = value_of(torch.float64, lambda module: module.table.fill_(draw()))
    draw()
    before = random.getstate()
    assert torch.equal(one, value_of(torch.float64, lambda module: module.table.fill_(draw())))
    assert random.getstate() == before


class Tied(nn.Module):
    """Two names of one parameter, of which the reset writes to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.empty(3, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.second)


def test_a_parameter_with_two_names_stays_one() -> None:
    assert initial_value(Tied(), "0", "first", 0).eq(1).all()


class Around(nn.Module):
    """Sets a parameter of a module inside, from another one there, and one of its own from a real buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, device="meta")
        self.bare = nn.Module()
        self.bare.scale = nn.Parameter(torch.empty(3, device="meta"))
        self.own = nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("real", torch.arange(3.0))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inner.bias.fill_(7)
            self.bare.scale.copy_(self.inner.weight[0])
            self.own.copy_(self.real)


def test_modules_inside_are_reset_before_the_modules_around_them_as_when_they_are_built() -> None:
    layer = Around()
    alone = initial_value(nn.Sequential(layer.inner), "0", "0.weight", 5)  # another path
    weight, bias, scale, own = (
        initial_value(layer, "0", name, 5) for name in ("inner.weight", "inner.bias", "bare.scale", "own")
    )
    assert bias.eq(7).all()
    assert torch.equal(scale, weight[0])
    assert torch.equal(own, torch.arange(3.0))
    assert not torch.equal(weight, alone)
    assert layer.inner.bias.is_meta


def test_one_reset_gives_all_tensors_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    latest, layer, calls = ModuleReset(), nn.Linear(3, 2, device="meta"), []
    reset = nn.Linear.reset_parameters
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda module: calls.append(1) or reset(module))
    together = [initial_value(layer, "0", name, 1, latest) for name in ("weight", "bias")]
    assert len(calls) == 1
    alone = [initial_value(layer, "0", name, 1) for name in ("weight", "bias")]
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_every_module_of_torch_with_a_reset_has_values_on_the_meta_device() -> None:
    """No false alarm: what torch's own modules leave unwritten would be refused."""
    with torch.device("meta"):
        modules = [
            *(
                nn.Linear(2, 3),
                nn.Bilinear(2, 2, 3),
                nn.Embedding(4, 2, padding_idx=1),
                nn.EmbeddingBag(3, 2),
            ),
            *(nn.Conv1d(2, 4, 3, groups=2), nn.ConvTranspose2d(2, 2, 3), nn.LSTM(2, 3, 2), nn.GRUCell(2, 3)),
            *(nn.LayerNorm(3), nn.RMSNorm(3), nn.GroupNorm(2, 4), nn.BatchNorm1d(3), nn.PReLU(2)),
            nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        ]
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            value = initial_value(module, "0", name, 0)
            assert value.shape == tensor.shape, re.escape(name)
            assert value.isfinite().all()
