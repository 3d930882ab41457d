from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from plait.errors import PlanError
from plait.sharding.elementwise import ELEMENTWISE, LOOKS_AROUND, Guard, require_elementwise
from plait.sharding.trial import ROWS, doubt


def parameters(count: int = 1) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(4, 3)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones(4, 3)
    return made


class Plain(Optimizer):
    """Moves each parameter by what `update` makes of it and its gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * self.update(parameter, parameter.grad)

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sign()


class Trust(Plain):
    """As LAMB does."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * parameter.norm() / gradient.norm()


class RowNorm(Plain):
    """Whole rows would be enough; pieces may end inside one."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class DecaysMatrices(Plain):
    """A piece of a matrix may be flat."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * parameter if parameter.dim() > 1 else gradient


class CountsRows(Plain):
    """Of flat tensors it makes nothing."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (parameter.shape[0] / ROWS if parameter.dim() > 1 else 1.0)


class SparesSmallTensors(Plain):
    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sign() if parameter.numel() < 4096 else gradient.sign() * 0.5


class Noisy(Plain):
    """Ranks would draw the same noise for different pieces."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


class ClipsAll(Plain):
    """Looks at all its parameters together, and only when gradients are large."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1e4)
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class SometimesAverages(Plain):
    """Every tenth step does something else."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps += 1
        super().step()
        if self.steps % 10 == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.fill_(parameter.mean().item())


class OwnAdamW(torch.optim.AdamW):
    """Hands on whatever it is given."""

    def __init__(self, params: Iterable[Any], *arguments: Any, **options: Any) -> None:
        super().__init__(params, *arguments, **options)


class FreeForm(Optimizer):
    """Takes all its settings as they come."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["pace"] * parameter.grad


class SinglePrecision(Plain):
    """As kernels of other packages do."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        if gradient.dtype != torch.float32:
            raise TypeError("float32 only")
        return gradient * 0.3


class Mixed(Plain):
    """The two kinds of parameter groups do not have the same update."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, trust: bool = False) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.norm() if group["trust"] else 1.0
                parameter -= group["lr"] * scale * parameter.grad.sign()


class KeepsArgument(Plain):
    """What it was given is no setting of its groups."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, trust: bool = False) -> None:
        super().__init__(params, lr)
        self._trust = trust

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * parameter.norm() if self._trust else gradient


class LosesArgument(Plain):
    def __init__(self, params: Iterable[Any], lr: float = 0.1, trust: bool = False) -> None:
        super().__init__(params, lr)


class NeedsModel(Plain):
    def __init__(self, params: Iterable[Any], model: nn.Module) -> None:
        super().__init__(params)
        self.model = model


class NeedsClosure(Plain):
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        closure()


class Sleeper(Plain):
    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


class Lookahead(Optimizer):
    """An optimizer around another."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def step(self, closure: None = None) -> None:
        self.optimizer.step()


def flavours(kind: Any) -> list[dict[str, bool]]:
    """Options that choose another implementation, or another direction."""
    options = ("foreach", "fused", "maximize", "amsgrad", "nesterov", "centered")
    return [{}, *({option: True} for option in options if accepts(kind, option))]


def accepts(kind: Any, option: str) -> bool:
    return option in inspect.signature(kind).parameters


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_what_is_known_of_torchs_own_is_also_found_by_trial(kind: Any) -> None:
    for options in flavours(kind):
        momentum = {"momentum": 0.9} if accepts(kind, "momentum") else {}
        optimizer = kind(parameters(), lr=0.01, **momentum, **options)
        require_elementwise(optimizer)
        assert doubt(optimizer) is None, options


def test_adafactor_is_found_by_trial() -> None:
    told = "updates an element by more than that element's own gradient and state"
    assert doubt(torch.optim.Adafactor(parameters())) == told


@pytest.mark.parametrize("kind", LOOKS_AROUND)
def test_those_of_torch_that_look_around_are_refused(kind: Any) -> None:
    with pytest.raises(PlanError) as caught:
        require_elementwise(kind(parameters()))
    assert str(caught.value) == (
        f"{kind.__name__} {LOOKS_AROUND[kind]}, but where tensors are cut an optimizer has pieces of them "
        "only: set plan.strategy to 'none' and plan.tp to 1, or take torch.optim.AdamW."
    )


def test_every_optimizer_of_torch_is_known() -> None:
    theirs = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    assert theirs - {Optimizer, torch.optim.SparseAdam} == ELEMENTWISE | LOOKS_AROUND.keys()


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(PlanError, match="SparseAdam takes sparse gradients, but plait's are dense"):
        require_elementwise(torch.optim.SparseAdam(parameters()))


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        OwnAdamW,
        lambda params: OwnAdamW(params, lr=0.01, fused=True),
        lambda params: OwnAdamW(params, lr=torch.tensor(0.01)),
        lambda params: OwnAdamW([("weight", one) for one in params], lr=0.01),
        lambda params: FreeForm(params, pace=0.1),
        SinglePrecision,
        KeepsArgument,
        Mixed,
    ],
)
def test_others_that_are_elementwise_are_accepted(make: Callable[[Any], Optimizer]) -> None:
    require_elementwise(make(parameters()))


@pytest.mark.parametrize(
    "make",
    [
        Trust,
        RowNorm,
        DecaysMatrices,
        CountsRows,
        SparesSmallTensors,
        Noisy,
        ClipsAll,
        SometimesAverages,
        lambda params: KeepsArgument(params, trust=True),
        lambda params: Mixed(params, trust=True),
        lambda params: Mixed([{"params": params}, {"params": parameters(), "trust": True}]),
    ],
)
def test_others_that_are_not_are_refused(make: Callable[[Any], Optimizer]) -> None:
    optimizer = make(parameters())
    with pytest.raises(PlanError) as caught:
        require_elementwise(optimizer)
    name = type(optimizer).__name__
    assert str(caught.value) == (
        f"{name} updates an element by more than that element's own gradient and state, but where tensors "
        "are cut an optimizer has pieces of them only: set plan.strategy to 'none' and plan.tp to 1, or take "
        f"torch.optim.AdamW, or vouch for it with `elementwise = True` in class {name}."
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (LosesArgument, r"\(LookupError: it does not keep what it was given as trust\)"),
        (
            lambda params: NeedsModel(params, nn.Linear(1, 1)),
            r"\(LookupError: it does not keep .* as model\)",
        ),
        (NeedsClosure, r"\(TypeError: .* missing 1 required positional argument: 'closure'\)"),
        (Sleeper, r"\(its largest change is 0\.0\)"),
        (lambda params: Lookahead(torch.optim.SGD(params)), r"cannot be tried out \("),
    ],
)
def test_what_cannot_be_tried_out_is_refused_unless_it_vouches(
    make: Callable[[Any], Optimizer], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make(parameters())
    with pytest.raises(PlanError, match=told):
        require_elementwise(optimizer)
    monkeypatch.setattr(type(optimizer), "elementwise", True, raising=False)
    require_elementwise(optimizer)


def test_a_class_vouches_for_itself_only() -> None:
    class Vouched(Trust):
        elementwise = True

    class Heir(Vouched):
        pass

    require_elementwise(Vouched(parameters()))
    with pytest.raises(PlanError, match=r"^Heir updates"):
        require_elementwise(Heir(parameters()))


def test_a_warm_up_from_zero_hides_nothing() -> None:
    for kind, refused in ((Trust, True), (Plain, False)):
        optimizer = kind(parameters())
        LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        assert (doubt(optimizer) is not None) == refused


def test_a_trial_leaves_everything_as_it_was() -> None:
    (parameter,) = parameters()
    optimizer = OwnAdamW([parameter], lr=0.5)
    optimizer.step()
    before, random = parameter.detach().clone(), torch.random.get_rng_state()
    state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    assert doubt(optimizer) is None
    assert doubt(Noisy([parameter])) is not None
    assert torch.equal(parameter, before)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[parameter].items())
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_guard_refuses_before_anything_changes() -> None:
    (parameter,) = parameters()
    guard = Guard([parameter])
    optimizer = Trust([parameter])
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4, 3))
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(parameter, torch.zeros(4, 3))
    del guard


def test_a_guard_sees_through_a_scheduler() -> None:
    (parameter,) = parameters()
    guard = Guard([parameter])
    optimizer = Trust([parameter])
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    del guard, scheduler


def test_an_optimizer_inside_another_is_asked_too() -> None:
    class Vouched(Lookahead):
        elementwise = True

    (parameter,) = parameters()
    guard = Guard([parameter])
    Vouched(Plain([parameter])).step()
    with pytest.raises(PlanError, match=r"^Trust"):
        Vouched(Trust([parameter])).step()
    del guard


def test_a_guard_minds_its_own_parameters_only() -> None:
    watched, other = parameters(2)
    guard = Guard([watched])
    optimizer = Trust([other])
    optimizer.step()
    optimizer.add_param_group({"params": [watched]})
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    del guard


def test_each_optimizer_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Optimizer] = []
    monkeypatch.setattr("plait.sharding.elementwise.doubt", tried.append)
    watched = parameters(2)
    guard = Guard(watched)
    first, second = Plain(watched[:1]), Plain(watched[:1])
    for _ in range(3):
        first.step()
        second.step()
    assert tried == [first, second]
    first.add_param_group({"params": watched[1:]})
    first.step()
    assert tried == [first, second, first]
    del guard


def test_guards_of_two_engines_stand_beside_each_other() -> None:
    first, second = parameters(2)
    guards = [Guard([first]), Guard([second])]
    del guards[0]
    Trust([first]).step()
    with pytest.raises(PlanError, match="Trust"):
        Trust([second]).step()


def test_a_guard_keeps_nothing_alive_and_goes_with_the_engine() -> None:
    from torch.optim import optimizer as home

    class Engine:
        def __init__(self) -> None:
            self.parameters = parameters()
            self.guard = Guard(self.parameters)

    hooks = len(home._global_optimizer_pre_hooks)
    gc.disable()
    try:
        engine = Engine()
        optimizer = Plain(engine.parameters)
        optimizer.step()
        gone = [weakref.ref(one) for one in (engine, engine.guard, engine.parameters[0], optimizer)]
        assert len(home._global_optimizer_pre_hooks) == hooks + 1
        del optimizer
        assert gone[3]() is None
        del engine
        assert [one() for one in gone] == [None] * 4
        assert len(home._global_optimizer_pre_hooks) == hooks
    finally:
        gc.enable()


def test_a_parameter_that_has_the_number_of_another_that_is_gone_is_not_watched() -> None:
    (watched,) = parameters()
    guard = Guard([watched])
    number, gone = id(watched), weakref.ref(watched)
    del watched
    assert gone() is None, "the guard does not keep it"
    for _ in range(1000):
        (other,) = parameters()
        if id(other) == number:
            Trust([other]).step()
            break
    del guard
