"""What once went wrong without a word: each is right now, or refused with a sentence."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import plait
from plait.engine import Engine
from plait.errors import DataError, ModelError, PlanError, RankError


class Squares:
    """Half the mean square over the rows, by a weight that is a plain number."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum() / 2

    def weight(self, targets: Tensor) -> float:
        return 0.1 * len(targets)


def weave(model: nn.Module, **plan: object) -> Engine:
    chosen = plait.Plan(precision="fp64", **plan)  # type: ignore[arg-type]
    return plait.parallelize(model, chosen, plait.Mesh(chosen), loss=Squares())  # type: ignore[arg-type]


def linears(*widths: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(a, b).double() for a, b in itertools.pairwise(widths)]


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients_of_flattened_inputs() -> tuple[Tensor | None, Tensor, float, float]:
    inputs, targets = rows(8, 2, 3), rows(8, 3)
    model = nn.Sequential(nn.Flatten(), *linears(6, 3))
    engine = weave(model, pp=2, microbatches=4, layers_per_stage=(1, 1))
    loss = engine.forward_backward(inputs, targets, input_gradients=True).item()
    leaf = inputs.clone().requires_grad_()
    wanted = (model(leaf) - targets).square().sum() / 2 / (0.1 * 8)
    wanted.backward()
    assert leaf.grad is not None
    return engine.input_gradients(), leaf.grad, loss, wanted.item()


def test_input_gradients_outlast_the_buffers_they_came_in(thread_ranks):
    (given, wanted, loss, wanted_loss), (nothing, *_) = thread_ranks.run(
        gradients_of_flattened_inputs, ranks=2
    )
    torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-14)
    assert loss == pytest.approx(wanted_loss, rel=1e-14)
    assert nothing is None


class Rounds(nn.Module):
    """Another dtype on real tensors than on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta else x.float()


def run_rounding() -> None:
    weave(nn.Sequential(*linears(3, 3), Rounds(), *linears(3, 3)), pp=2).forward_backward(
        rows(2, 3), rows(2, 3)
    )


def test_an_output_unlike_the_one_on_meta_is_refused(thread_ranks):
    with pytest.raises(ModelError, match=r"layer '1' gave torch\.float32 \[2, 3\], but torch\.float64"):
        thread_ranks.run(run_rounding, ranks=2)


class TwoInTraining(nn.Module):
    """Two tensors in training, one in evaluation."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        if isinstance(x, tuple):
            return x[0] + x[1]
        return (x, 2 * x) if self.training else x


def train_and_evaluate() -> tuple[float, float]:
    model = nn.Sequential(*linears(3, 3), TwoInTraining(), TwoInTraining(), *linears(3, 3))
    model[2].eval()
    engine = weave(model, pp=2, layers_per_stage=(2, 2))
    trained = engine.forward_backward(rows(2, 3), rows(2, 3)).item()
    return trained, engine.evaluate(rows(2, 3), rows(2, 3)).item()


def test_evaluation_may_send_other_tensors_between_stages_than_training(thread_ranks):
    (trained, evaluated), other = thread_ranks.run(train_and_evaluate, ranks=2)
    assert (trained, evaluated) == other
    assert trained != evaluated


def test_changing_requires_grad_after_parallelize_is_refused():
    model = nn.Sequential(*linears(3, 3, 3))
    model[0].requires_grad_(False)
    engine = weave(model)
    engine.forward_backward(rows(2, 3), rows(2, 3))
    dict(engine.named_parameters())["0.weight"].requires_grad_(True)
    with pytest.raises(PlanError, match=r"requires_grad of 0\.weight has changed to True since parallelize"):
        engine.forward_backward(rows(2, 3), rows(2, 3))


def test_replaced_gradients_are_what_is_clipped():
    engine = weave(nn.Sequential(*linears(3, 3)))
    engine.forward_backward(rows(2, 3), rows(2, 3))
    weight, bias = engine.parameters()
    weight.grad, bias.grad = weight.grad * 2, None
    norm = weight.grad.norm().item()
    assert engine.clip_grad_norm_(1e-3).item() == pytest.approx(norm, rel=1e-14)
    assert weight.grad.norm().item() == pytest.approx(1e-3, rel=1e-2)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class WritesFirst(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].mul_(2) + pair[1]


def test_writing_to_a_tensor_that_stands_twice_is_refused():
    with pytest.raises(ModelError, match=r"layer '2' writes to its input, in which one tensor stands twice"):
        weave(nn.Sequential(*linears(3, 3), Twice(), WritesFirst())).forward_backward(rows(2, 3), rows(2, 3))


def test_a_step_under_autocast_is_refused():
    engine = weave(nn.Sequential(*linears(3, 3)))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(PlanError, match="autocast is active"):
        engine.forward_backward(rows(2, 3), rows(2, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_weight_that_is_computed_is_trained(norm):
    torch.manual_seed(0)
    engine = weave(nn.Sequential(norm(nn.Linear(3, 3).double())))
    engine.forward_backward(rows(2, 3), rows(2, 3))
    assert all(parameter.grad.any() for parameter in engine.parameters())


@pytest.mark.parametrize("choice", [{"tokens": -1}, {"temperature": -1.0}, {"top_k": 0}])
def test_generate_refuses_invalid_token_counts_and_temperatures(choice):
    plan = plait.Plan()
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=7, context=8)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    with pytest.raises(DataError, match="of at least"):
        engine.generate(torch.tensor([[1, 2]]), **{"tokens": 2, **choice})


def test_losses_of_micro_batches_survive_other_engine_calls():
    plan = plait.Plan(microbatches=2)
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=7, context=8)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    with pytest.raises(DataError, match="there are no losses yet"):
        engine.microbatch_losses()
    tokens = torch.arange(12).view(4, 3) % 7
    loss = engine.forward_backward(tokens, tokens)
    engine.generate(tokens[:1], 2)
    assert engine.microbatch_losses().mean().item() == pytest.approx(loss.item())


class InBackward(torch.autograd.Function):
    """Does something on one rank when the backward comes by."""

    @staticmethod
    def forward(ctx, x, rank, action):
        ctx.rank, ctx.action = rank, action
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if torch.distributed.get_rank() == ctx.rank:
            ctx.action()
        return gradient, None, None


class Trap(nn.Module):
    def __init__(self, rank, action):
        super().__init__()
        self.rank, self.action = rank, action

    def forward(self, x):
        return InBackward.apply(x, self.rank, self.action)


def fail() -> None:
    raise ZeroDivisionError("in the middle")


def sleep() -> None:
    time.sleep(60)


def fail_while_a_reduction_is_under_way() -> None:
    first, second = linears(3, 3, 3)
    model = nn.Sequential(first, Trap(0, fail), second, Trap(1, sleep))
    weave(model, dp=2).forward_backward(rows(2, 3), rows(2, 3))


def test_a_failure_does_not_wait_for_reductions_that_the_peer_never_starts(rank_pool):
    with pytest.raises(RankError, match="rank 0 failed: ZeroDivisionError: in the middle"):
        rank_pool.run(fail_while_a_reduction_is_under_way, ranks=2, timeout=15)
