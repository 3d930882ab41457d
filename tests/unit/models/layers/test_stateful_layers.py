"""A layer's result depends on its own micro-batch: what it writes and keeps is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import plait
from plait.errors import DataError, ModelError
from plait.models.layers.stateful_layer_check import refuse_carried_values
from plait.tensor.named_layer import NamedLayer

OUTSIDE = nn.Parameter(torch.tensor(2.0))
BATCHES: list[Tensor] = []


class Layer(nn.Module):
    """Has one of everything, and does what it is given."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)
        self.register_buffer("angles", torch.zeros(0, 4), persistent=False)
        self.plain: Any = torch.zeros(4)
        self.kept: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        shift = self.does(self, x)
        return self.linear(x if shift is None else x + shift)


def looked_at(does: Callable[[Any, Tensor], Any]) -> tuple[str, ...]:
    with torch.device("meta"):
        return refuse_carried_values(NamedLayer("blocks.0", Layer(does)), torch.empty(3, 4), 0)


def average(module: Any, x: Tensor) -> Tensor:
    module.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return module.mean


def average_in_training(module: Any, x: Tensor) -> None:
    if module.training:
        module.mean.data.lerp_(x.detach().mean(0), 0.1)


def assigned(module: Any, x: Tensor) -> None:
    module.mean = 0.9 * module.mean + x.detach().mean(0)


def data_assigned(module: Any, x: Tensor) -> None:
    module.mean.data = x.detach().mean(0)


@torch.no_grad()
def by_out(module: Any, x: Tensor) -> None:
    torch.add(module.mean, x.mean(0), out=module.mean)


@torch.no_grad()
def by_list(module: Any, x: Tensor) -> None:
    torch._foreach_add_([module.mean], [x.mean(0)])


@torch.no_grad()
def nearest(module: Any, x: Tensor) -> None:
    codes = torch.cdist(x, module.mean.view(1, 4)).argmin(-1)
    module.mean.index_add_(0, codes, x[:, 0])


def batch_norm(module: Any, x: Tensor) -> Tensor:
    return functional.batch_norm(x, module.mean, module.variance, training=True)


def noise(module: Any, x: Tensor) -> Tensor:
    return module.mean.normal_()


@pytest.mark.parametrize(
    "does",
    [average, average_in_training, assigned, data_assigned, by_out, by_list, nearest, batch_norm, noise],
)
def test_a_saved_buffer_that_is_set_from_inputs_is_refused(does: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(
        ModelError, match=r"^blocks\.0\.mean, a buffer of Layer, is set from the layer's inputs"
    ):
        looked_at(does)


def unsaved(module: Any, x: Tensor) -> Tensor:
    return module.unsaved.add_(x.detach().mean(0))


def attribute(module: Any, x: Tensor) -> Tensor:
    module.plain = 0.9 * module.plain + x.detach().mean(0)
    return module.plain


def in_a_dictionary(module: Any, x: Tensor) -> Tensor:
    module.kept["mean"] = module.kept.get("mean", 0) + x.detach().mean(0)
    return module.kept["mean"]


def the_one_before(module: Any, x: Tensor) -> Tensor | None:
    before, module.plain = module.plain, x.detach()
    return before


@pytest.mark.parametrize("does", [unsaved, attribute, in_a_dictionary, the_one_before])
def test_an_output_that_depends_on_the_run_before_is_refused(does: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(ModelError, match=r"^layer 'blocks\.0' \(Layer\) keeps a tensor of one micro-batch"):
        looked_at(does)


def clamped(module: Any, x: Tensor) -> Tensor:
    return module.weight.data.clamp_(-1, 1)


@torch.no_grad()
def decayed(module: Any, x: Tensor) -> Tensor:
    return module.weight.mul_(0.9)


def data_replaced(module: Any, x: Tensor) -> Tensor:
    module.weight.data = module.weight.data / 2
    return module.weight


def parameter_replaced(module: Any, x: Tensor) -> Tensor:
    module.weight = nn.Parameter(torch.ones(4))
    return module.weight


@pytest.mark.parametrize("does", [clamped, decayed, data_replaced, parameter_replaced])
def test_a_parameter_that_a_forward_writes_is_refused(does: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(
        ModelError, match=r"^blocks\.0\.weight is a parameter that Layer writes to in its forward"
    ):
        looked_at(does)


def test_a_trained_tensor_from_elsewhere_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"computes with a tensor \[\] that requires a gradient but is none of"
    ):
        looked_at(lambda module, x: OUTSIDE * x)


def test_a_backward_within_a_forward_is_refused_unless_no_parameter_gets_a_gradient() -> None:
    """It would add to a buffer that holds nothing of the step yet, or whose memory is not allocated."""
    with pytest.raises(
        ModelError, match=r"^layer 'blocks\.0' \(Layer\) calls backward\(\) in its forward, .* linear\.weight"
    ):
        looked_at(lambda module, x: module.linear(x.detach()).sum().backward())

    def score(module: Any, x: Tensor) -> Tensor:
        given = x.detach().requires_grad_()
        return torch.autograd.grad(module.linear(given).sum(), given)[0]

    assert looked_at(score) == ()


def recorded(module: Any, x: Tensor) -> None:
    module.plain, module.kept["x"] = x.detach(), x.detach()
    module.unsaved.copy_(x.detach()[0])
    BATCHES.append(x.detach())


def extended(module: Any, x: Tensor) -> Tensor:
    if len(module.angles) < len(x):
        module.angles = torch.arange(4.0 * len(x)).view(-1, 4)
    return module.angles[: len(x)]


def cached_for_a_shape(module: Any, x: Tensor) -> Tensor:
    if "mask" not in module.kept:
        module.kept["mask"] = torch.ones_like(x)
    return module.kept["mask"]


def norm_of_fixed_statistics(module: Any, x: Tensor) -> Tensor:
    return functional.batch_norm(x, module.mean, module.variance, training=False)


def attended(module: Any, x: Tensor) -> Tensor:
    """An operation that may draw random numbers is not what the layer records of its run."""
    kept = functional.dropout(x, 0.1)
    module.plain, module.largest = kept.detach(), len(x)
    return kept


def longest(module: Any, x: Tensor) -> None:
    module.longest = max(getattr(module, "longest", 0), len(x))


@pytest.mark.parametrize(
    "does", [recorded, extended, cached_for_a_shape, norm_of_fixed_statistics, longest, attended]
)
def test_state_that_no_later_output_depends_on_is_allowed(does: Callable[[Any, Tensor], Any]) -> None:
    assert looked_at(does) == ()


def test_buffers_and_numbers_that_count_runs_are_found() -> None:
    assert looked_at(lambda module, x: module.count.add_(1)) == ("count",)
    assert looked_at(lambda module, x: setattr(module, "count", module.count + 1)) == ("count",)
    assert looked_at(lambda module, x: setattr(module, "runs", getattr(module, "runs", 0) + 1)) == ("runs",)


class Counting(nn.Module):
    """Divides by the number of its runs, in a buffer that is written, one that is replaced, and a number."""

    def __init__(self, *, reads_number: bool = True) -> None:
        super().__init__()
        self.reads_number = reads_number
        self.linear = nn.Linear(4, 4)
        self.register_buffer("runs", torch.tensor(1.0))
        self.register_buffer("again", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.again = self.again + 1
        self.steps = getattr(self, "steps", 0) + 1
        hidden: Tensor = torch.tanh(self.linear(x) / self.runs) * self.again
        return hidden / self.steps if self.reads_number else hidden


def counting_model(*, reads_number: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    counting = Counting(reads_number=reads_number)
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), counting, nn.Linear(4, 2)).double()


PLANS = [
    plait.Plan(dp=2, microbatches=2, strategy="full", recompute="full"),
    plait.Plan(pp=2, microbatches=4, schedule="zb-h1", recompute=("none", "selective", "none")),
]


@pytest.mark.parametrize(
    "plan", [pytest.param(PLANS[0], marks=pytest.mark.full), *PLANS[1:]], ids=["dp", "pp"]
)
def test_a_buffer_that_counts_forwards_equals_one_rank_on_every_plan(plan: plait.Plan) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    model, targets = counting_model(reads_number=False), torch.arange(8) % 2
    report = plait.verify(model, plan, inputs, targets, threads=1, ranks_as="threads")
    assert report, report


def test_a_number_that_no_checkpoint_holds_is_found_where_a_loaded_run_goes_on() -> None:
    inputs, targets = torch.ones(4, 3), torch.arange(4) % 2
    report = plait.verify(counting_model(), plait.Plan(), inputs, targets, threads=1, ranks_as="threads")
    assert report.first is not None
    assert report.first.difference.location.step == 2, report  # the one after the checkpoint


def counted_around_evaluations() -> list[float]:
    plan, found = plait.Plan(microbatches=2, precision="fp64"), []
    engine = plait.parallelize(counting_model(), plan, plait.Mesh(plan), plait.cross_entropy)
    inputs, targets = torch.ones(4, 3, dtype=torch.float64), torch.arange(4) % 2
    for does in (engine.evaluate, engine.forward_backward, engine.evaluate, engine.forward_backward):
        does(inputs, targets)
        found.append(engine.state_dict()["1.runs"].item())
    return found


def test_an_evaluation_does_not_advance_a_counting_buffer(thread_ranks: Any) -> None:
    assert thread_ranks.run(counted_around_evaluations, ranks=1) == [[1.0, 2.0, 2.0, 3.0]]


def steps_and_a_failure() -> tuple[list[float], dict[str, Tensor], int]:
    plan = plait.Plan(microbatches=2, precision="fp64")
    engine = plait.parallelize(counting_model(), plan, plait.Mesh(plan), plait.cross_entropy)
    inputs = torch.ones(4, 3, dtype=torch.float64)
    losses = [engine.forward_backward(inputs, torch.arange(4) % 2).item() for _ in range(2)]
    with pytest.raises(DataError, match="the target 9 is no class"):
        engine.forward_backward(inputs, torch.full((4,), 9))
    (layer,) = [one for one in engine._runner.modules if isinstance(one, Counting)]
    return losses, engine.state_dict(), layer.steps


def test_one_rank_counts_as_plain_pytorch_and_a_failed_step_does_not_count(thread_ranks: Any) -> None:
    ((losses, state, steps),) = thread_ranks.run(steps_and_a_failure, ranks=1)
    plain, inputs = counting_model(), torch.ones(4, 3, dtype=torch.float64)
    wanted = [functional.cross_entropy(plain(inputs), torch.arange(4) % 2).item() for _ in range(2)]
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert state["1.runs"] == state["1.again"] == steps + 1 == 3


def shared_count() -> None:
    layer, plan = Counting(), plait.Plan()
    engine = plait.parallelize(nn.Sequential(layer, layer), plan, plait.Mesh(plan), plait.cross_entropy)
    engine.forward_backward(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))


def test_a_counter_that_layers_share_is_refused(thread_ranks: Any) -> None:
    with pytest.raises(
        ModelError, match=r"^0\.runs changes in each run of its layer, and the layers 0, 1 share it"
    ):
        thread_ranks.run(shared_count, ranks=1)


def average_on_two_stages(plan: plait.Plan) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Layer(average), nn.Linear(4, 2))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    engine.evaluate(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    return engine.forward_backward(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)).item()


@pytest.mark.parametrize("plan", [plait.Plan(), plait.Plan(dp=2), plait.Plan(pp=2, compile="graphs")])
def test_a_running_mean_is_refused_on_all_ranks_and_free_in_evaluation(
    thread_ranks: Any, plan: plait.Plan
) -> None:
    with pytest.raises(ModelError, match=r"^1\.mean, a buffer of Layer, is set from the layer's inputs"):
        thread_ranks.run(average_on_two_stages, plan, ranks=plan.world)
