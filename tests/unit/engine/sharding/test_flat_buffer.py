from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from sharding_cases import case_of, layer_with, only_buffer, unit_of
from torch import Tensor, nn
from torch.nn import functional

from plait.engine.sharding.flat_buffer import allocate_storage, free_storage
from plait.engine.sharding.unit import Unit
from plait.errors import PlanError
from plait.plan.layout import assemble
from plait.plan.plan import Plan
from plait.tensor.autograd.private_torch_functions import zero_each

STRATEGIES = ("none", "optimizer", "gradients", "full")


def test_the_flat_tensor_may_be_refilled_between_forward_and_backward() -> None:
    unit = unit_of(nn.Linear(3, 2))
    buffer, weight = only_buffer(unit), unit.parameters["0.weight"]
    before = weight._version
    given_ = torch.ones(1, 3, requires_grad=True)
    output = functional.linear(given_, weight)
    kept = buffer.whole.clone()
    buffer.whole.zero_()
    buffer.whole.copy_(kept)
    assert weight._version == before, "a parameter has a version counter of its own"
    output.sum().backward()
    torch.testing.assert_close(given_.grad, weight.detach().sum(0, keepdim=True))


def test_memory_may_be_given_back_between_forward_and_backward() -> None:
    """What autograd has saved is valid again when the same storage is filled again."""
    layer = nn.Linear(64, 64)
    unit = unit_of(layer, dp=2, strategy="full")
    buffer, weight = only_buffer(unit), unit.parameters["0.weight"]
    assert buffer.whole.untyped_storage().nbytes() == 0
    slot = next(slot for slot in buffer.spec.offsets.slots if slot.name == "0.weight")

    def fill() -> None:
        allocate_storage(buffer.whole)
        slot.view_of(buffer.whole).copy_(layer.weight.detach())

    fill()
    given_ = torch.ones(1, 64, requires_grad=True)
    output = functional.linear(given_, weight)
    free_storage(buffer.whole)
    assert buffer.whole.untyped_storage().nbytes() == 0
    fill()
    output.sum().backward()
    torch.testing.assert_close(given_.grad, layer.weight.detach().sum(0, keepdim=True))


def step(unit: Unit) -> Tensor:
    """Attach, and add one to every gradient as a backward would; the value carried."""
    buffer = only_buffer(unit)
    carried = buffer.attach_gradients()
    zero_each(buffer.whole_gradients)
    for parameter in unit.parameters.values():
        parameter.grad.add_(1)
    return torch.zeros_like(buffer.whole) if carried is None else carried


def assert_attached(unit: Unit) -> None:
    buffer = only_buffer(unit)
    assert buffer.gradient is not None
    for slot in buffer.spec.offsets.slots:
        grad = unit.parameters[slot.name].grad
        assert grad.untyped_storage()._cdata == buffer.gradient.untyped_storage()._cdata
        assert (grad.storage_offset(), grad.shape) == (slot.start, slot.shape)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_again_after_zero_grad(set_to_none: bool) -> None:
    unit = unit_of(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(unit.parameters.values(), lr=0.1)
    for _ in range(3):
        assert not step(unit).any()
        assert_attached(unit)
        assert all((parameter.grad == 1).all() for parameter in unit.parameters.values())
        optimizer.zero_grad(set_to_none=set_to_none)


def test_a_gradient_buffer_is_divided_into_parameters_and_gaps() -> None:
    """Whichever parameters are left out, each other element is in one part; an empty one is in none."""
    layer = layer_with([(2, 3), (0,), (4,), (2, 2), (3,)])
    (view,) = only_buffer(case_of(layer, Plan()).make_alone()["0"]).stage_views
    for count in range(6):
        for left_out in map(set, combinations(view.gradients, count)):
            view.gradient.zero_()
            parts = view.gradient_without(left_out)
            for part in parts:
                part.add_(1)
            for name, gradient in view.gradients.items():
                assert gradient.eq(name not in left_out).all()
            rest = sum(view.gradients[name].numel() for name in left_out)
            assert view.gradient.sum() == view.gradient.numel() - rest
            assert all(part.numel() for part in parts)


def test_before_the_first_step_no_gradients_are_carried() -> None:
    assert only_buffer(unit_of(nn.Linear(3, 2))).attach_gradients() is None


def test_gradients_of_an_earlier_step_are_carried_as_a_copy() -> None:
    unit = unit_of(nn.Linear(3, 2))
    buffer = only_buffer(unit)
    step(unit)
    carried = step(unit)
    assert carried is not buffer.gradient
    for slot in buffer.spec.offsets.slots:
        assert (slot.view_of(carried) == 1).all()
        assert (unit.parameters[slot.name].grad == 1).all(), "this step's own"


def test_a_gradient_that_the_user_set_is_carried() -> None:
    unit = unit_of(nn.Linear(3, 2))
    unit.parameters["0.weight"].grad = torch.full((2, 3), 5.0)
    carried = only_buffer(unit).attach_gradients()
    assert carried is not None
    assert carried.sum() == 30
    assert_attached(unit)


def grads_of(parameters: dict[str, nn.Parameter]) -> set[float | None]:
    """The values that are in their gradients."""
    found: set[float | None] = {None for one in parameters.values() if one.grad is None}
    return found | {
        value for one in parameters.values() if one.grad is not None for value in one.grad.flatten().tolist()
    }


@pytest.mark.parametrize("strategy", ["optimizer", "gradients", "full"])
def test_gradients_of_shards_are_views_of_the_reduced_buffer(strategy: Any) -> None:
    """Twice: the second step's gradients are multiplied by 4 on the way, and those of the first carried."""
    unit = unit_of(nn.Linear(64, 64), index=1, dp=3, strategy=strategy)
    buffer = only_buffer(unit)
    assert buffer.shard_gradient is not None
    for scale, wanted in ((1.0, 5.0), (4.0, 5.0 + 5 / 4)):
        carried = buffer.attach_gradients()
        assert (carried is None) == (wanted == 5.0)
        assert_attached(unit)
        buffer.shard_gradient.fill_(5)
        buffer.finish_gradients(carried, scale)
        assert grads_of(unit.parameters) == {None}, "layers' gradients are nobody's business"
        assert grads_of(unit.shard_parameters) == {wanted}
        assert buffer.current_gradients(unit.shard_parameters) == [buffer.shard_gradient]


@pytest.mark.parametrize(
    "precisions",
    [
        {"gradient_precision": "bf16"},
        {"precision": "bf16", "master_precision": "bf16", "gradient_precision": "fp32"},
        {"precision": "bf16", "master_precision": "fp32", "gradient_precision": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimizer_gets_gradients_of_its_own_precision(strategy: Any, precisions: dict[str, Any]) -> None:
    """Most of torch's optimizers refuse any other."""
    unit = unit_of(nn.Linear(64, 64), dp=2, strategy=strategy, **precisions)
    buffer = only_buffer(unit)
    buffer.attach_gradients()
    buffer.finish_gradients(None, 1.0)
    torch.optim.AdamW(unit.shard_parameters.values(), fused=True).step()
    assert all(shard.grad.dtype == shard.dtype for shard in unit.shard_parameters.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_failed_leaves_gradients_as_they_were(strategy: Any) -> None:
    unit = unit_of(nn.Linear(64, 64), index=1, dp=3, strategy=strategy)
    buffer = only_buffer(unit)
    assert buffer.shard_gradient is not None
    buffer.restore_gradients(buffer.attach_gradients())
    assert grads_of(unit.shard_parameters) == grads_of(unit.parameters) == {None}
    buffer.attach_gradients()
    buffer.shard_gradient.fill_(5)
    buffer.finish_gradients(None, 1.0)
    carried = buffer.attach_gradients()
    buffer.shard_gradient.fill_(7)
    buffer.restore_gradients(carried)
    assert grads_of(unit.shard_parameters) == {5.0}
    buffer.shard_gradient.fill_(9)
    assert grads_of(unit.shard_parameters) == {5.0}, "what a reduction still writes does not reach them"
    assert not buffer.current_gradients(unit.shard_parameters)[0].eq(9).any()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", ["none", "optimizer"])
def test_optimizers_work_on_the_views(strategy: Any, set_to_none: bool) -> None:
    torch.manual_seed(0)
    native = nn.Linear(64, 64, dtype=torch.float64)
    made = case_of(nn.Sequential(native), Plan(dp=2, strategy=strategy))
    units = [made.make_alone(index)["0"] for index in range(2)]
    ours = [torch.optim.AdamW(unit.shard_parameters.values(), lr=0.1, fused=True) for unit in units]
    theirs = torch.optim.AdamW(native.parameters(), lr=0.1)
    for _ in range(3):
        for unit, optimizer in zip(units, ours, strict=True):
            buffer = only_buffer(unit)
            carried = buffer.attach_gradients()
            buffer.shard_gradient.fill_(1)
            buffer.finish_gradients(carried, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in native.parameters():
            parameter.grad = torch.ones_like(parameter)
        theirs.step()
    for name, wanted in native.named_parameters():
        got = assemble([unit.shard_parameters[f"0.{name}"] for unit in units], made.layouts[f"0.{name}"])
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)


def test_offloaded_shards_are_on_the_device_between_steps() -> None:
    """On the CPU too, where the device is the same: what is updated there counts in the next step."""
    layer = nn.Linear(64, 64)
    unit = unit_of(layer, dp=2, strategy="full", offload="parameters")
    buffer = only_buffer(unit)

    def lies_in(flat: Tensor) -> bool:
        first = flat.data_ptr()
        last = first + flat.nbytes
        return all(first <= one.data_ptr() < last for one in unit.shard_parameters.values() if one.numel())

    assert buffer.device_copy is not None
    assert lies_in(buffer.device_copy)
    with torch.no_grad():
        for shard in unit.shard_parameters.values():
            shard.add_(1)
    shards = {name: shard.detach().clone() for name, shard in unit.shard_parameters.items()}
    identities = {name: id(shard) for name, shard in unit.shard_parameters.items()}
    buffer.copy_back()
    assert buffer.device_copy is None
    assert lies_in(buffer.shard)
    buffer.copy_to_device()
    assert lies_in(buffer.device_copy)
    assert all(torch.equal(shard, shards[name]) for name, shard in unit.shard_parameters.items())
    assert identities == {name: id(one) for name, one in unit.shard_parameters.items()}, (
        "what optimizers know"
    )


@pytest.mark.parametrize("offload", ["none", "full"])
def test_without_parameter_offload_to_a_device_shards_are_not_copied(offload: Any) -> None:
    buffer = only_buffer(unit_of(nn.Linear(64, 64), dp=2, strategy="full", offload=offload))
    before = {name: shard.data_ptr() for name, shard in buffer.shard_parameters.items()}
    buffer.copy_back()
    buffer.copy_to_device()
    assert buffer.device_copy is None
    assert before == {name: shard.data_ptr() for name, shard in buffer.shard_parameters.items()}


def test_current_gradients_are_those_of_nonempty_shards_with_grad_set() -> None:
    unit = unit_of(nn.Linear(64, 64), index=1, dp=3, strategy="optimizer")
    buffer = only_buffer(unit)
    assert buffer.current_gradients(unit.shard_parameters) == [], "before the first step"
    buffer.attach_gradients()
    buffer.finish_gradients(None, 1.0)
    weight, bias = unit.shard_parameters["0.weight"], unit.shard_parameters["0.bias"]
    assert [one.data_ptr() for one in buffer.current_gradients(unit.shard_parameters)] == [
        buffer.shard_gradient.data_ptr()
    ]
    assert [one is weight.grad for one in buffer.current_gradients(["0.weight"])] == [True]
    weight.grad = weight.grad.clone()
    replaced = buffer.current_gradients(unit.shard_parameters)
    assert [one is other.grad for one, other in zip(replaced, (weight, bias), strict=True)] == [True, True]
    bias.grad = None
    assert len(buffer.current_gradients(unit.shard_parameters)) == 1


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_parameter_that_was_frozen_since_is_refused(strategy: Any) -> None:
    unit = unit_of(nn.Linear(3, 2), dp=2, strategy=strategy)
    only_buffer(unit).check_settings()
    unit.shard_parameters["0.bias"].requires_grad_(False)
    with pytest.raises(PlanError, match=r"requires_grad of 0\.bias has changed to False since parallelize"):
        only_buffer(unit).check_settings()
