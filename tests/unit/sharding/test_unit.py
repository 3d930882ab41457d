from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from plait.sharding.unit import ALIGNMENT, Unit, build_unit

CPU = torch.device("cpu")


def unit_of(model: nn.Module, dtype: torch.dtype | None = None) -> Unit:
    parameters = dict(model.named_parameters())
    return build_unit("layer", parameters, lambda name: parameters[name].detach(), CPU, dtype, {})


def with_shapes(*shapes: tuple[int, ...]) -> nn.Module:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return nn.ParameterList(parameters)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6))
def test_every_parameter_is_a_view_at_an_aligned_place(shapes: list[tuple[int, ...]]) -> None:
    model = with_shapes(*shapes)
    unit = unit_of(model)
    (buffer,) = unit.buffers
    assert buffer.gradient is not None
    assert buffer.data.numel() % ALIGNMENT == 0
    assert buffer.gradient.shape == buffer.data.shape
    covered = torch.zeros_like(buffer.data)
    for slot, (name, wanted) in zip(buffer.slots, model.named_parameters(), strict=True):
        assert (slot.name, slot.shape, slot.start % ALIGNMENT) == (name, wanted.shape, 0)
        assert torch.equal(unit.parameters[name], wanted)
        covered[slot.start : slot.stop] += 1
        buffer.data[slot.start : slot.stop] = 7.0
        assert (unit.parameters[name] == 7).all()
    assert not (covered > 1).any(), "no two parameters overlap"
    assert (buffer.data[covered == 0] == 0).all(), "padding is zero"


def test_tiny_and_scalar_parameters() -> None:
    (buffer,) = unit_of(with_shapes((), (1,), (17,), ())).buffers
    assert [(slot.start, slot.stop) for slot in buffer.slots] == [(0, 1), (16, 17), (32, 49), (64, 65)]
    assert buffer.data.shape == (80,)
    assert buffer.parameters["0"].shape == ()


def test_dtypes_and_frozen_parameters_have_buffers_of_their_own() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.narrow = nn.Parameter(torch.ones(3))
    model.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    model.count = nn.Parameter(torch.tensor([5]), requires_grad=False)
    model.other = nn.Parameter(torch.ones(6))
    unit = unit_of(model)
    assert [tuple(buffer.parameters) for buffer in unit.buffers] == [
        ("wide",),
        ("narrow", "other"),
        ("frozen",),
        ("count",),
    ]
    assert [buffer.gradient is not None for buffer in unit.buffers] == [True, True, False, False]
    assert unit.trainable == unit.buffers[:2]
    assert unit.buffers[2].attach_gradients() is None
    assert {name: parameter.requires_grad for name, parameter in unit.parameters.items()} == {
        "wide": True,
        "narrow": True,
        "other": True,
        "frozen": False,
        "count": False,
    }


def test_a_dtype_is_for_floating_point_numbers() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.narrow = nn.Parameter(torch.ones(3))
    model.count = nn.Parameter(torch.tensor([5]), requires_grad=False)
    unit = unit_of(model, torch.bfloat16)
    assert [buffer.data.dtype for buffer in unit.buffers] == [torch.bfloat16, torch.int64]


def test_the_flat_tensor_may_be_refilled_between_forward_and_backward() -> None:
    unit = unit_of(nn.Linear(3, 2))
    (buffer,) = unit.buffers
    weight = unit.parameters["weight"]
    before = weight._version
    given_ = torch.ones(1, 3, requires_grad=True)
    output = nn.functional.linear(given_, weight)
    kept = buffer.data.clone()
    buffer.data.zero_()
    buffer.data.copy_(kept)
    assert weight._version == before, "a parameter has a version counter of its own"
    output.sum().backward()
    torch.testing.assert_close(given_.grad, weight.detach().sum(0, keepdim=True))


def step(unit: Unit) -> Tensor:
    """Attach, and add one to every gradient as a backward would; the value carried."""
    (buffer,) = unit.buffers
    carried = buffer.attach_gradients()
    for parameter in unit.parameters.values():
        parameter.grad.add_(1)
    return torch.zeros_like(buffer.data) if carried is None else carried


def assert_attached(unit: Unit) -> None:
    (buffer,) = unit.buffers
    assert buffer.gradient is not None
    for slot in buffer.slots:
        grad = unit.parameters[slot.name].grad
        assert grad.data_ptr() == buffer.gradient[slot.start :].data_ptr()
        assert grad.shape == slot.shape


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_again_after_zero_grad(set_to_none: bool) -> None:
    unit = unit_of(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(unit.parameters.values(), lr=0.1)
    for _ in range(3):
        assert not step(unit).any()
        assert_attached(unit)
        assert all((parameter.grad == 1).all() for parameter in unit.parameters.values())
        optimizer.zero_grad(set_to_none=set_to_none)


def test_the_first_gradients_carry_nothing() -> None:
    (buffer,) = unit_of(nn.Linear(3, 2)).buffers
    assert buffer.attach_gradients() is None


def test_gradients_of_an_earlier_step_are_carried_as_a_copy() -> None:
    unit = unit_of(nn.Linear(3, 2))
    (buffer,) = unit.buffers
    step(unit)
    carried = step(unit)
    assert carried is not buffer.gradient
    for slot in buffer.slots:
        assert (slot.view_of(carried) == 1).all()
        assert (unit.parameters[slot.name].grad == 1).all(), "this step's own"


def test_a_gradient_that_the_user_set_is_carried() -> None:
    unit = unit_of(nn.Linear(3, 2))
    (buffer,) = unit.buffers
    unit.parameters["weight"].grad = torch.full((2, 3), 5.0)
    carried = buffer.attach_gradients()
    assert carried is not None
    assert carried.sum() == 30
    assert_attached(unit)


def test_optimizers_work_on_the_views() -> None:
    torch.manual_seed(0)
    native = nn.Linear(5, 3, dtype=torch.float64)
    unit = unit_of(native)
    (buffer,) = unit.buffers
    ours = torch.optim.AdamW(unit.parameters.values(), lr=0.1, fused=True)
    theirs = torch.optim.AdamW(native.parameters(), lr=0.1)
    for _ in range(3):
        step(unit)
        for parameter in native.parameters():
            parameter.grad = torch.ones_like(parameter)
        ours.step()
        theirs.step()
        ours.zero_grad()
    for slot in buffer.slots:
        wanted = native.get_parameter(slot.name)
        torch.testing.assert_close(slot.view_of(buffer.data), wanted.detach(), rtol=1e-12, atol=1e-12)
