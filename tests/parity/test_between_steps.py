"""What users do between steps: evaluating and generating, and what they must not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.cases import gpt2
from plait.engine import Engine
from plait.errors import NonFiniteError, PlanError
from plait.plan.plan import Plan

PLANS = {
    "none": Plan(dp=2),
    "sums": Plan(dp=2, precision="bf16", master_precision="fp32", gradient_precision="bf16"),
    "optimizer": Plan(dp=2, strategy="optimizer"),
    "gradients": Plan(dp=2, strategy="gradients", reduce="each"),
    "full": Plan(dp=2, strategy="full"),
    "scaled": Plan(dp=2, strategy="full", loss_scale=4.0),
}


class Squares:
    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> float:
        return float(targets.numel())


def tokens(plan: Plan) -> tuple[Tensor, Tensor]:
    inputs, targets = gpt2().draw(2 * plan.microbatches, torch.Generator().manual_seed(0))
    return inputs, targets


def gradients(engine: Engine) -> dict[str, Tensor | None]:
    grads = {name: parameter.grad for name, parameter in engine.named_parameters()}
    return {name: None if grad is None else grad.clone() for name, grad in grads.items()}


def evaluate_between(plan: Plan) -> None:
    """As a rank: they change no gradient, neither one that is there nor one that is not."""
    engine = plait.parallelize(gpt2().build(), plan, plait.Mesh(plan, timeout=20), plait.cross_entropy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    inputs, targets = tokens(plan)

    def look() -> None:
        engine.evaluate(inputs, targets)
        engine.generate(inputs[:1, :3], 2)

    look()
    assert set(gradients(engine).values()) == {None}
    engine.forward_backward(inputs, targets)
    engine.clip_grad_norm_(1e-3)
    before = gradients(engine)
    look()
    after = gradients(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()
    look()
    assert set(gradients(engine).values()) == {None}


@pytest.mark.parametrize("name", PLANS)
def test_evaluating_changes_no_gradient(thread_ranks: Any, name: str) -> None:
    thread_ranks.run(evaluate_between, PLANS[name], ranks=2)


class Table(nn.Module):
    """Hands on a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(32.0).reshape(4, 8) / 32)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, self.table[: len(value)]


class Sum(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1]


def hand_on(plan: Plan) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Table(), Sum(), nn.Linear(8, 8))
    engine = plait.parallelize(model, plan, plait.Mesh(plan, timeout=20), Squares())
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    loss = engine.forward_backward(inputs, torch.zeros(4, 8))
    return [loss, engine.evaluate(inputs, torch.zeros(4, 8)), engine.clip_grad_norm_(1.0)]


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_layer_may_return_its_parameter_as_output(thread_ranks: Any, strategy: Any) -> None:
    (alone,) = thread_ranks.run(hand_on, Plan(precision="fp64"), ranks=1)
    for rank in thread_ranks.run(hand_on, Plan(dp=2, strategy=strategy, precision="fp64"), ranks=2):
        torch.testing.assert_close(rank, alone, rtol=1e-12, atol=0)


def linears(plan: Plan, *, frozen: int = 0) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for parameter in model[:frozen].parameters():
        parameter.requires_grad_(False)
    return plait.parallelize(model, plan, plait.Mesh(plan, timeout=20), Squares())


def replace_data(plan: Plan) -> str:
    engine = linears(plan)
    for parameter in engine.parameters():
        parameter.data = parameter.data.clone()
    return told(lambda: engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4)))


def told(call: Callable[[], object]) -> str:
    with pytest.raises((PlanError, NonFiniteError)) as caught:
        call()
    return str(caught.value)


def test_replaced_data_is_refused(thread_ranks: Any) -> None:
    plan = Plan(dp=2, strategy="full")
    for message in thread_ranks.run(replace_data, plan, ranks=2):
        assert message.startswith("the data of 0."), "of the first that a rank has a shard of"
        assert message.endswith(
            " was replaced, which the layers would not see: write to it in place, with copy_()."
        )


HALF = Plan(pp=2, precision="fp16", master_precision="fp32", layers_per_stage=(2, 2))


def add_up_with_a_frozen_stage(plan: Plan) -> float:
    engine = linears(plan, frozen=2)
    for _ in range(3):
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
    return float(engine.clip_grad_norm_(float("inf")))


def test_gradients_add_up_where_one_stage_is_frozen(thread_ranks: Any) -> None:
    first, second = thread_ranks.run(add_up_with_a_frozen_stage, HALF, ranks=2)
    assert first == second > 0


def fail_and_go_on(plan: Plan) -> float:
    engine = linears(plan)
    with pytest.raises(plait.PlaitError):
        engine.forward_backward(torch.ones(2, 5), torch.ones(2, 4))
    return float(engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4)))


def test_a_refused_batch_does_not_count_as_an_fp16_step_whose_norm_was_not_checked(thread_ranks: Any) -> None:
    (loss,) = thread_ranks.run(fail_and_go_on, Plan(precision="fp16", master_precision="fp32"), ranks=1)
    assert loss > 0


def overflow(plan: Plan) -> tuple[bool, str]:
    """Whether gradients that overflowed are gone, and what is said where that is asked for."""
    engine = linears(plan)
    engine.forward_backward(torch.full((2, 4), 6e3), torch.ones(2, 4))
    assert not bool(engine.clip_grad_norm_(1.0).isfinite())
    gone = set(gradients(engine).values()) == {None}
    engine.forward_backward(torch.full((2, 4), 6e3), torch.ones(2, 4))
    message = told(lambda: engine.clip_grad_norm_(1.0, error_if_nonfinite=True))
    return gone and set(gradients(engine).values()) == {None}, message


@pytest.mark.parametrize("scale", [None, 2.0**14])
def test_zero_grad_discards_overflowed_gradients_and_the_loss_scale_continues(
    thread_ranks: Any, scale: float | None
) -> None:
    plan = Plan(precision="fp16", master_precision="fp32", loss_scale=scale)
    ((gone, message),) = thread_ranks.run(overflow, plan, ranks=1)
    assert gone
    assert "over all ranks: lower the learning rate" in message


def half_model(plan: Plan) -> tuple[float, bool]:
    model = nn.Sequential(nn.Linear(4, 4)).half()
    engine = plait.parallelize(model, plan, plait.Mesh(plan, timeout=20), Squares())
    return engine.loss_scale, engine.adapts_loss_scale


def test_a_model_in_half_precision_has_a_loss_scale(thread_ranks: Any) -> None:
    assert thread_ranks.run(half_model, Plan(master_precision="fp32"), ranks=1) == [(2.0**16, True)]


def test_a_model_in_half_precision_is_refused_without_wider_masters() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).half()
    told = r"the model's 0\.weight is float16, .* set plan\.master_precision to 'fp32'"
    with pytest.raises(PlanError, match=told):
        plait.memory(model, Plan())
    assert plait.memory(model.requires_grad_(False), Plan()).peak < 4 * (16 + 4), "it is not trained"


def test_memory_refuses_a_gradient_precision_that_bf16_masters_cannot_add_up_in() -> None:
    formats = {"precision": "bf16", "master_precision": "bf16", "gradient_precision": "fp32"}
    plan = Plan(dp=2, strategy="full", reduce="each", **formats)
    with pytest.raises(PlanError, match=r"add up in the bfloat16 .*choose reduce 'last'"):
        plait.memory(gpt2().build(), plan)


@pytest.mark.parametrize(
    "wrong", [{"rows": -1}, {"rows": 2.5}, {"moments": "two"}, {"moments": -1}, {"loss": None}], ids=str
)
def test_memory_refuses_invalid_rows_moments_and_loss(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        plait.memory(gpt2().build(), Plan(), **wrong)


def test_memory_refuses_rows_beside_inputs() -> None:
    with pytest.raises(PlanError, match="not both"):
        plait.memory(gpt2().build(), Plan(), torch.zeros(2, 8, dtype=torch.int64), rows=2)


def test_inference_mode_is_refused(thread_ranks: Any) -> None:
    assert "torch.inference_mode" in thread_ranks.run(in_inference_mode, Plan(), ranks=1)[0]


def in_inference_mode(plan: Plan) -> str:
    engine = linears(plan)
    with torch.inference_mode():
        return told(lambda: engine.evaluate(torch.ones(2, 4), torch.ones(2, 4)))
