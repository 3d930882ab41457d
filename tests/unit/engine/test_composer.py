"""What `parallelize` decides and refuses, and a whole engine on one rank, without any backend."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity.cases import ONE_STAGE
from plait.engine import Engine
from plait.engine.blueprint import build_blueprint
from plait.engine.parallelize import parallelize
from plait.errors import MeshError, ModelError, PlanError, ScheduleError
from plait.plan.plan import Plan
from plait.ranks.mesh import Mesh
from plait.schedules.lowering.program import LayerIndex
from plait.tensor.losses import cross_entropy


def cut_by(model: nn.Module, plan: Plan) -> tuple[int, ...]:
    return build_blueprint(model, plan).layers_per_stage


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def test_plan_recompute_is_one_mode_or_one_for_each_layer() -> None:
    assert build_blueprint(linears(3), Plan()).recompute == ("none",) * 3
    assert build_blueprint(linears(3), Plan(recompute="full")).recompute == ("full",) * 3
    each = ("full", "none", "selective")
    assert build_blueprint(linears(3), Plan(recompute=each)).recompute == each
    with pytest.raises(PlanError) as caught:
        build_blueprint(linears(2), Plan(recompute=each))
    assert str(caught.value) == (
        "plan.recompute has 3 values, but the model has 2 layers: give one value per layer, or one for all."
    )


@pytest.mark.parametrize(
    ("layers", "plan", "counts"),
    [
        (5, Plan(pp=2, microbatches=32), (3, 2)),
        (5, Plan(pp=1), (5,)),
        (4, Plan(pp=4), (1, 1, 1, 1)),
        (5, Plan(pp=2, layers_per_stage=(1, 4)), (1, 4)),
        (5, Plan(pp=2, chunks=2, schedule="interleaved", microbatches=8), (2, 1, 1, 1)),
        (5, Plan(pp=2, schedule="zb-v", layers_per_stage=(1, 1, 1, 2)), (1, 1, 1, 2)),
        pytest.param(
            *(5, Plan(pp=2, schedule="auto", layers_per_stage=(1, 1, 1, 2)), (1, 1, 1, 2)),
            marks=pytest.mark.full,  # the search takes half a second
        ),
    ],
)
def test_layers_are_cut_into_stages_of_even_cost(layers: int, plan: Plan, counts: tuple[int, ...]) -> None:
    assert cut_by(linears(layers), plan) == counts


def test_a_costly_layer_shares_its_stage_with_fewer_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 20), nn.Linear(20, 2))
    assert cut_by(model, Plan(pp=2)) == (3, 1)


@pytest.mark.parametrize("counts", [(5,), (2, 2), (2, 4), (2, 2, 1)])
@pytest.mark.parametrize("policy", ["1f1b", "auto"])
def test_layers_per_stage_that_do_not_fit_the_model_are_refused(policy: str, counts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        cut_by(linears(5), Plan(pp=2, schedule=policy, chunks=1, layers_per_stage=counts))
    assert str(caught.value) == (
        f"plan.layers_per_stage = {list(counts)} does not cut 5 layers into 2 stages: "
        "give 2 counts of at least 1 with the sum 5."
    )


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="4 stages need at least 4 layers, but the model has 3"):
        cut_by(linears(3), Plan(pp=4))


def test_units_users_and_owners_of_a_tied_model() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    blueprint = build_blueprint(model, Plan(pp=2, microbatches=2, layers_per_stage=(2, 1)))
    assert blueprint.lowering_spec.units == {
        "0.weight": (LayerIndex(0, 0), LayerIndex(1, 0)),
        "1": (LayerIndex(0, 1),),
        "2": (LayerIndex(1, 0),),
    }
    assert blueprint.owners == {"0.weight": (0, 1), "1.weight": (0,), "2.bias": (1,)}


def test_layers_of_each_stage() -> None:
    blueprint = build_blueprint(linears(6), Plan(pp=3, layers_per_stage=(2, 1, 3), microbatches=3))
    assert blueprint.stage_layers == (range(2), range(2, 3), range(3, 6))


@pytest.mark.parametrize("loss", [None, nn.TripletMarginLoss(), lambda output, targets: 0, "cross_entropy"])
def test_parallelize_refuses_an_unknown_loss(loss: Any) -> None:
    with pytest.raises(PlanError, match=r"an object with total\(output, targets\), a sum, and weight"):
        parallelize(linears(2), Plan(), Mesh(), loss)


def test_parallelize_refuses_other_mistakes_before_anything_runs() -> None:
    with pytest.raises(MeshError, match="pp = 2 but the mesh has pp = 1"):
        parallelize(linears(2), Plan(pp=2), Mesh(), cross_entropy)
    with pytest.raises(ModelError, match=r"drops with p = 0\.5"):
        parallelize(nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout()), Plan(), Mesh(), cross_entropy)
    with pytest.raises(ScheduleError, match="chunks"):
        parallelize(linears(3), Plan(schedule="zb-v", chunks=3), Mesh(), cross_entropy)


class Mood:
    """Fails at the second call of `may_fail`, if told to."""

    def __init__(self) -> None:
        self.fails = False
        self.calls = 0

    def may_fail(self) -> None:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ZeroDivisionError("in the middle")


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mood: Mood) -> Tensor:
        ctx.mood = mood
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.mood.may_fail()
        return gradient, None


class Breakable(nn.Module):
    """A layer that can fail in the forward or the backward of its second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.forward_mood, self.backward_mood = Mood(), Mood()

    def forward(self, value: Tensor) -> Tensor:
        if not value.is_meta:
            self.forward_mood.may_fail()
        return torch.tanh(self.linear(Breaking.apply(value, self.backward_mood)))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), Breakable(), nn.LayerNorm(6), nn.Linear(6, 7, bias=False))
    model[3].weight = model[0].weight
    return model.double()


def woven(model: nn.Module, **choices: Any) -> Engine:
    plan = Plan(precision="fp64", microbatches=2, **choices)
    return parallelize(model, plan, Mesh(plan), cross_entropy)


INPUTS, TARGETS = torch.arange(12).view(4, 3) % 7, torch.arange(5, 17).view(4, 3) % 7


def reference(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    twin = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(twin(INPUTS).flatten(0, 1), TARGETS.flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_gradients(engine: Engine, wanted: dict[str, Tensor], times: int = 1) -> None:
    got = {name: parameter.grad for name, parameter in engine.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], times * gradient, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_one_rank_without_any_backend(schedule: str) -> None:
    assert not dist.is_initialized()
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    loss, gradients = reference(model)
    engine = woven(model, schedule=schedule)
    torch.testing.assert_close(engine.forward_backward(INPUTS, TARGETS), loss, rtol=1e-13, atol=0)
    assert_gradients(engine, gradients)
    torch.testing.assert_close(engine.evaluate(INPUTS, TARGETS), loss, rtol=1e-13, atol=0)
    assert_gradients(engine, gradients)
    assert engine.traffic() == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_second_step_adds_to_the_first() -> None:
    model = small_model()
    _, gradients = reference(model)
    engine = woven(model)
    for times in (1, 2, 3):
        engine.forward_backward(INPUTS, TARGETS)
        assert_gradients(engine, gradients, times)


@pytest.mark.parametrize(
    ("where", "kind", "layers"),
    [("forward", "F", "layer '1'"), ("backward", "B", "layers '1' to '2'")],  # which share a graph
)
def test_after_an_exception_in_a_layer_the_next_step_is_right(where: str, kind: str, layers: str) -> None:
    model = small_model()
    _, gradients = reference(model)
    getattr(model[1], f"{where}_mood").fails = True  # the engine's private copy has the same mood
    engine = woven(model, schedule="1f1b")
    with pytest.raises(ZeroDivisionError) as caught:
        engine.forward_backward(INPUTS, TARGETS)
    place, instruction = caught.value.__notes__
    assert place == f"in stage 0, micro-batch 1, {layers}"
    assert instruction.startswith(f"while running RunLayer(action=Action(stage=0, kind=<Kind.{kind}: ")
    (stage,) = engine._runner.pipeline.stages.values()
    assert not any((stage.values, stage.gradients, stage.runs, stage.work, stage.queue.pending)), (
        "memory is given back"
    )
    torch.optim.SGD(engine.parameters()).zero_grad()
    engine.forward_backward(INPUTS, TARGETS)
    assert_gradients(engine, gradients)


def test_an_optimizer_on_the_engines_parameters_lowers_the_loss() -> None:
    engine = woven(small_model())
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=0.05)
    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward(INPUTS, TARGETS).item())
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]


def test_parameter_groups_part_matrices_from_vectors() -> None:
    engine = woven(small_model())
    decay, rest = engine.parameter_groups(weight_decay=0.1)
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    assert {names[id(p)] for p in decay["params"]} == {"0.weight", "1.linear.weight"}
    assert {names[id(p)] for p in rest["params"]} == {"1.linear.bias", "2.weight", "2.bias"}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("rows", [1, 3, 0])
def test_a_batch_that_does_not_divide_is_refused(rows: int) -> None:
    with pytest.raises(
        PlanError, match=rf"the inputs have {rows} rows, which do not divide into 2 micro-batches"
    ):
        woven(small_model()).forward_backward(INPUTS[:rows], TARGETS[:rows])


class Squares:
    """Half the mean square."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum() / 2

    def weight(self, targets: Tensor) -> Tensor:
        return targets.numel()  # type: ignore[return-value]  # a plain number does as well


def single(model: nn.Module, plan: Plan) -> Engine:
    return parallelize(model, plan, Mesh(plan), loss=Squares())


class PlainAttribute(nn.Module):
    """A layer that keeps a tensor as neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_layer_may_keep_a_plain_tensor() -> None:
    engine = single(nn.Sequential(nn.Linear(2, 2), PlainAttribute()), Plan())
    x = torch.randn(4, 2)
    assert engine.forward_backward(x, x).isfinite()


def test_a_refused_batch_leaves_gradients_alone() -> None:
    engine = single(nn.Sequential(nn.Linear(2, 2)), Plan(microbatches=2))
    x = torch.randn(4, 2)
    engine.forward_backward(x, x)
    before = [parameter.grad.clone() for parameter in engine.parameters() if parameter.grad is not None]
    with pytest.raises(PlanError):
        engine.forward_backward(x[:3], x[:3])
    after = [parameter.grad for parameter in engine.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b is not None)


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    model = small_model()
    engine = woven(model)
    engine.forward_backward(INPUTS, TARGETS)
    _, wanted = reference(model)
    (layer,) = [layer for layer in engine._runner.modules if isinstance(layer, Breakable)]
    mood = layer.backward_mood
    mood.fails, mood.calls = True, 0
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(INPUTS, TARGETS)
    assert_gradients(engine, wanted)


def test_an_engine_does_not_keep_the_models_tensors_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    kept = [weakref.ref(tensor) for tensor in (*model.parameters(), model[1].running_mean)]
    engine = parallelize(model, Plan(), Mesh(), loss=cross_entropy)
    del model
    assert [reference() for reference in kept] == [None] * len(kept)
    assert len(list(engine.parameters())) == 4
