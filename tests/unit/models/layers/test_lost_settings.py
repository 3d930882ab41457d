"""What is set on a model is there on the ranks, or refused with its name; gradients equal plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import plait
from plait.engine.tensor_sources import LocalSource, locate_tensors
from plait.errors import DataError, ModelError, PlanError
from plait.models.layers.model_validation import (
    buffers_of_loss,
    refuse_lost_settings,
    refusing_changed_buffers,
)
from plait.ranks.gradient_hook_detection import first_gradient_hook
from plait.ranks.launch.rank_job import dumps_call
from plait.tensor import mean_loss
from plait.tensor.find_module_hooks import call_hooks

TARGETS = torch.arange(8) % 3


def made() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), inner, nn.Linear(4, 3)).double()


def rows() -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class OwnParameter(nn.Parameter):
    pass


class OwnTensor(Tensor):
    pass


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> int:
        return 3


def set_gradient(model: Any) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


def set_item(number: int, name: str, value: Callable[[Any], object]) -> Callable[[Any], None]:
    return lambda model: setattr(model[number], name, value(model))


def save_doubled(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]


def save_more(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    state[f"{prefix}more"] = torch.ones(1)


def replace_layer(model: Any, layer: nn.Module) -> None:
    model[0] = layer


LOST: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (lambda m: m[0].weight.register_hook(abs), r"0\.weight has a hook of register_hook"),
    "post hook": (
        lambda m: m[3].bias.register_post_accumulate_grad_hook(print),
        r"3\.bias has a hook of register_post_accumulate_grad_hook",
    ),
    "gradient": (set_gradient, r"0\.weight has a gradient already"),
    "class": (set_item(0, "weight", lambda m: OwnParameter(m[0].weight)), r"0\.weight is a OwnParameter"),
    "lazy": (lambda m: replace_layer(m, nn.LazyLinear(4)), r"0\.weight has no shape yet"),
    "buffer's class": (
        lambda m: m[0].register_buffer("b", torch.ones(2).as_subclass(OwnTensor)),
        r"0\.b is a OwnTensor",
    ),
    "buffer's gradient": (
        lambda m: m[0].register_buffer("b", torch.ones(2, requires_grad=True)),
        r"0\.b is a buffer that requires a gradient",
    ),
    "attribute": (set_item(0, "b", lambda m: torch.ones(2, requires_grad=True)), r"0\.b is a tensor \[2\]"),
    "attribute of another layer": (set_item(3, "b", lambda m: [m[0].weight]), r"3\.b is a tensor \[4, 4\]"),
    "attribute with a graph": (set_item(0, "b", lambda m: 2 * m[0].weight), "but requires a gradient"),
    "attribute without values": (
        set_item(0, "b", lambda m: {"inside": torch.ones(2, device="meta")}),
        r"0\.b .* is on the meta device, where nothing gives it a value",
    ),
    "hook on the model": (
        lambda m: m.register_forward_hook(print),
        r"the model \(Sequential\) has a hook of",
    ),
    "hook on a sequence": (
        lambda m: m[2].register_full_backward_hook(print),
        r"2 \(Sequential\) has a hook of register_full_backward_hook",
    ),
    "parameter of the model": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
        r"scale is a tensor of the model \(Sequential\) itself",
    ),
    "state dict entry": (
        lambda m: m[0].register_state_dict_post_hook(save_more),
        r"state_dict\(\) has the entry 0\.more",
    ),
    "state dict value": (
        lambda m: m[0].register_state_dict_post_hook(save_doubled),
        r"state_dict\(\) has another value of 0\.weight",
    ),
    "extra state": (lambda m: replace_layer(m, WithExtraState(4, 4)), r"the entry 0\._extra_state"),
    "wrapper": (lambda m: replace_layer(m, nn.DataParallel(nn.Linear(4, 4))), "0 is a DataParallel"),
}


@pytest.mark.parametrize("what", LOST)
def test_settings_that_a_copy_of_the_layers_would_lose_are_refused_by_name(what: str) -> None:
    (change, message), model = LOST[what], made()
    refuse_lost_settings(model, None)
    change(model)
    with pytest.raises(ModelError, match=message):
        refuse_lost_settings(model, None)


def test_removed_hooks_and_gradients_of_zero_are_no_reason_to_refuse() -> None:
    model = made()
    model[0].weight.register_hook(abs).remove()
    model[0].weight.register_post_accumulate_grad_hook(print).remove()
    model[2].register_forward_hook(print).remove()
    model[0].bias.grad = torch.zeros_like(model[0].bias)
    model[0].mean = nn.Buffer(torch.ones(2))
    model[0].alias = [model[0].weight]
    refuse_lost_settings(model, None)


def test_torch_lists_hooks_where_plait_reads_them() -> None:
    parameter, module = nn.Parameter(torch.ones(2)), nn.Tanh()
    assert first_gradient_hook({"weight": parameter}) is None
    parameter.register_post_accumulate_grad_hook(print)
    assert first_gradient_hook({"weight": parameter}) == ("weight", "register_post_accumulate_grad_hook")
    parameter.register_hook(print)
    assert first_gradient_hook({"weight": parameter}) == ("weight", "register_hook")
    registers = ["register_forward_pre_hook", "register_forward_hook"]
    registers += ["register_full_backward_pre_hook", "register_full_backward_hook"]
    for register in registers:
        getattr(module, register)(print)
    assert list(call_hooks(module)) == [(register, print) for register in registers]


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    loss = mean_loss(nn.Linear(3, 3), over="rows")
    with pytest.raises(
        PlanError, match=r"weight, a parameter of the loss .* requires a gradient, but an engine"
    ):
        refuse_lost_settings(made(), loss)


def test_values_that_a_hook_would_convert_are_refused_but_for_hooks_of_torch() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    source = LocalSource(locate_tensors([("0", model[0]), ("1", model[1])]), 0, model.state_dict())
    assert len(list(source.known())) == 5
    model[1].register_load_state_dict_pre_hook(print)
    source = LocalSource(source.locations, 0, model.state_dict())
    with pytest.raises(ModelError, match=r"^layer '1' has a hook that converts a state dict before loading"):
        list(source.known())
    assert len(list(LocalSource(source.locations, 0).known())) == 5


def test_hooks_on_parameters_are_not_lost_on_the_way_to_processes_or_set_on_an_engine() -> None:
    model, plan = made(), plait.Plan()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    next(engine.parameters()).register_hook(abs)
    with pytest.raises(PlanError, match=r"^0\.weight has a hook of register_hook, which would not be called"):
        engine.forward_backward(rows(), TARGETS)
    model[0].weight.register_hook(abs)
    with pytest.raises(
        ModelError, match=r"^0\.weight has a hook of register_hook, which would not be called"
    ):
        plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    with pytest.raises(ModelError, match=r"^0\.weight has a hook of register_hook"):
        plait.verify(model, plan, rows(), TARGETS, mode="exact", threads=1, ranks_as="threads")
    with pytest.raises(
        ModelError, match=r"tensor \[4, 4\] has a hook of register_hook, which would not reach"
    ):
        dumps_call((print, (model,)))


def test_a_batch_whose_gradients_would_end_at_the_engine_is_refused() -> None:
    plan = plait.Plan()
    engine = plait.parallelize(made(), plan, plait.Mesh(plan), plait.cross_entropy)
    learned = rows().requires_grad_()
    with pytest.raises(DataError, match=r"^the inputs require a gradient, which a step does not pass on"):
        engine.forward_backward({"x": learned}, TARGETS)
    with pytest.raises(DataError, match=r"^the targets require a gradient"):
        engine.forward_backward(rows(), learned)
    engine.evaluate(learned, TARGETS)
    engine.forward_backward(learned, TARGETS, input_gradients=True)
    assert engine.input_gradients().any()


class Recorder:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, given: object, output: Tensor) -> None:
        if not output.is_meta:
            self.seen.append(output)


def test_a_hook_that_is_an_object_or_its_method_is_the_users_own() -> None:
    recorders, model, plan = [Recorder(), Recorder()], made(), plait.Plan()
    model[0].register_forward_hook(recorders[0])
    model[1].register_forward_hook(recorders[1].__call__)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    engine.forward_backward(rows(), TARGETS)
    assert [len(recorder.seen) for recorder in recorders] == [1, 1]


class Lower(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tril()


class Reversed(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed([*super().__iter__()])


class Twice(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(super().__call__(x))


def own_forward(model: Any) -> None:
    inner = model[2]
    inner.forward = partial(thrice, inner)


def thrice(module: Any, x: Tensor) -> Tensor:
    return 3 * module[0](x)


def double(module: nn.Module, *given: Any) -> Any:
    return 2 * given[-1] if isinstance(given[-1], Tensor) else tuple(2 * one for one in given[-1])


def double_input_gradient(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(2 * one for one in of_inputs)


HONOURED: dict[str, Callable[[Any], object]] = {
    "forward hook": lambda m: m[0].register_forward_hook(double),
    "forward pre-hook": lambda m: m[2][0].register_forward_pre_hook(double),
    "backward hook": lambda m: m[2][0].register_full_backward_hook(double_input_gradient),
    "backward pre-hook": lambda m: m[2][0].register_full_backward_pre_hook(double),
    "weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "old weight norm": lambda m: nn.utils.weight_norm(m[0]),
    "pruned twice": lambda m: [
        prune.l1_unstructured(m[0], "weight", 0.5),
        prune.l1_unstructured(m[0], "weight", 0.2),
    ],
    "mask": lambda m: parametrize.register_parametrization(m[0], "weight", Lower()),
    "own order": lambda m: m.__setitem__(2, Reversed(nn.Linear(4, 4), nn.Tanh()).double()),
    "own call": lambda m: m.__setitem__(2, Twice(nn.Linear(4, 4), nn.Tanh()).double()),
    "own forward": own_forward,
}
PLANS = [
    plait.Plan(),
    plait.Plan(pp=2, microbatches=2, schedule="zb-h1"),
    plait.Plan(dp=2, strategy="full", recompute="full"),
]


def gradients(change: Callable[[Any], object], plan: plait.Plan) -> dict[str, Tensor]:
    model = made()
    change(model)
    mesh = plait.Mesh(plan)
    engine = plait.parallelize(model, plan, mesh, plait.cross_entropy)
    mine = [one.chunk(plan.dp)[mesh.index("dp")] for one in (rows(), TARGETS)]
    engine.forward_backward(mine[0], mine[1])
    return dict(engine.named_gradients())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("what", HONOURED)
def test_hooks_and_computed_weights_of_modules_are_honoured_on_every_plan(
    thread_ranks: Any, what: str
) -> None:
    model = made()
    HONOURED[what](model)
    nn.functional.cross_entropy(model(rows()), TARGETS).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(one.abs().max()) for one in wanted.values() if one is not None)
    for plan in PLANS:
        found = thread_ranks.run(gradients, HONOURED[what], plan, ranks=plan.world)[0]
        for name, one in wanted.items():
            expected = torch.zeros_like(found[name]) if one is None else one
            assert (found[name] - expected).abs().max() <= 1e-12 * largest, (plan, name)


class ScaledByAttribute(nn.Linear):
    """Reads an attribute of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.weight.factor


def attributes(factor: float, plan: plait.Plan) -> tuple[list[dict[str, object]], float]:
    torch.manual_seed(0)
    model = nn.Sequential(ScaledByAttribute(4, 3).double(), nn.Linear(3, 3).double())
    model[0].weight.factor = factor
    model[1].bias.no_weight_decay = True
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    loss = engine.forward_backward(rows()[:4], TARGETS[:4])
    names = ("factor", "no_weight_decay")
    held = [{name: vars(one)[name] for name in names if name in vars(one)} for one in engine.parameters()]
    return held, loss.item()


@pytest.mark.parametrize("plan", [plait.Plan(), plait.Plan(dp=2, strategy="full")])
def test_attributes_of_parameters_are_there_in_the_layers_and_for_the_optimizer(
    thread_ranks: Any, plan: plait.Plan
) -> None:
    for factor in (2.0, 3.0):  # another model for the results of runs on the meta device
        found, loss = thread_ranks.run(attributes, factor, plan, ranks=plan.world)[0]
        assert found == [{"factor": factor}, {}, {}, {"no_weight_decay": True}]
        torch.manual_seed(0)
        first, second = nn.Linear(4, 3).double(), nn.Linear(3, 3).double()
        wanted = nn.functional.cross_entropy(second(first(rows()[:4]) * factor), TARGETS[:4])
        assert loss == pytest.approx(wanted.item(), rel=1e-12)


class Counting(nn.Module):
    """A loss with a buffer."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((2,), value))


class Holding:
    """A loss that is no module, and holds one."""

    def __init__(self) -> None:
        self.inner, self.number = Counting(float("-0.0")), 3


def set_of(loss: Any, value: Tensor) -> None:
    loss.seen = value


def test_a_loss_whose_buffer_changes_is_refused() -> None:
    assert [*buffers_of_loss(Holding())] == ["inner.seen"]
    assert [*buffers_of_loss(Counting())] == ["seen"]
    assert buffers_of_loss(mean_loss) == {}
    same: list[Callable[[Any], object]] = [
        lambda loss: None,
        lambda loss: loss.seen.copy_(torch.ones(2)),
        lambda loss: set_of(loss, torch.ones(2)),
        lambda loss: set_of(loss, torch.zeros(2, device="meta")),
    ]
    changed: list[Callable[[Any], object]] = [
        lambda loss: loss.seen.add_(1),
        lambda loss: set_of(loss, torch.zeros(2)),
        lambda loss: set_of(loss, torch.ones(1)),
        lambda loss: loss.register_buffer("seen", torch.ones(3)),
    ]
    for change in same:
        with refusing_changed_buffers(loss := Counting()):
            change(loss)
    for change in changed:
        loss = Counting()
        with (
            pytest.raises(
                ModelError, match=r"^seen, a buffer of the loss Counting, is set in training: its value"
            ),
            refusing_changed_buffers(loss),
        ):
            change(loss)
    held = Holding()
    with (
        pytest.raises(ModelError, match=r"^inner.seen, a buffer of the loss Holding"),
        refusing_changed_buffers(held),
    ):
        held.inner.seen += 1
    with (
        pytest.raises(ModelError, match=r"^added, a buffer of the loss"),
        refusing_changed_buffers(held.inner),
    ):
        held.inner.register_buffer("added", torch.ones(1))


def test_a_state_dict_that_is_not_the_models_is_refused() -> None:
    for change, told in (
        (
            lambda state: state.__delitem__("0.weight"),
            "^model.state_dict.. has no entry of 0.weight by a hook",
        ),
        (lambda state: state.update(new=torch.ones(1)), "has the entry new by a hook or get_extra_state"),
        (
            lambda state: state.update({"0.bias": state["0.bias"].clone()}),
            "has another value of 0.bias by a hook",
        ),
        (
            lambda state: state.update({"0.bias": state["0.bias"][:2]}),
            "has another value of 0.bias by a hook",
        ),
        (lambda state: state.update({"0.bias": 3}), "has another value of 0.bias by a hook"),
    ):
        model = made()
        refuse_lost_settings(model, mean_loss)
        model.register_state_dict_post_hook(lambda module, state, *_, change=change: change(state))
        with pytest.raises(ModelError, match=told):
            refuse_lost_settings(model, mean_loss)
