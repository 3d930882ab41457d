from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from plait.errors import PlanError
from plait.plan.parameter_units import kind_of
from plait.plan.plan import Plan
from plait.proof.optimizer_proof import (
    COUPLING,
    ELEMENTWISE,
    PARAMETERWISE,
    ROWS,
    OptimizerGuard,
    Partitioning,
    probe,
    require_elementwise,
)

CUT, STAGES, BOTH = (
    Partitioning(1, sharded=True),
    Partitioning(2, sharded=False),
    Partitioning(2, sharded=True),
)
WHOLE = Partitioning(1, sharded=False)
ADAMW = "or take torch.optim.AdamW"


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
    """Whole rows would be enough; shards may end inside one."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class DecaysMatrices(Plain):
    """A shard of a matrix has two dims, too."""

    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sign() + 0.1 * parameter if parameter.dim() > 1 else gradient.sign()


class CountsRows(Plain):
    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (len(parameter) / ROWS if parameter.dim() > 1 else 1.0)


class SparesSmallTensors(Plain):
    def update(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sign() if parameter.numel() < 4096 else gradient.sign() * 0.5


class Noisy(Plain):
    """Ranks would draw the same noise for different shards."""

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


class Prodigious(Plain):
    """A step size of all parameters together, which grows, as Prodigy and D-Adaptation have it."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, pace: float = 1e-6) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "pace": pace, "seen": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        every = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        seen = self.param_groups[0]["seen"] + sum(float(one.grad.abs().sum()) for one in every)  # type: ignore[union-attr]
        pace = max(self.param_groups[0]["pace"], 1e-3 * seen**0.5)
        for group in self.param_groups:
            group["seen"], group["pace"] = seen, pace
        for one in every:
            assert one.grad is not None
            one -= pace * one.grad.sign()


class GroupNorm(Plain):
    """The first group's norm scales all others: seen only where there are several."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, decay: float = 0.0) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        first = self.param_groups[0]
        norm = 1 + sum(float(one.grad.norm()) for one in first["params"])
        for group in self.param_groups:
            for one in group["params"]:
                one -= group["lr"] * one.grad.sign() / (1.0 if group is first else norm)


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
def test_a_trial_finds_torchs_known_elementwise_optimizers_elementwise(kind: Any) -> None:
    for options in flavours(kind):
        momentum = {"momentum": 0.9} if accepts(kind, "momentum") else {}
        optimizer = kind(parameters(), lr=0.01, **momentum, **options)
        require_elementwise(optimizer, BOTH)
        assert probe(optimizer, "element") is None, options
    assert probe(optimizer, "parameter") is None


def test_a_trial_finds_that_adafactor_uses_whole_parameters() -> None:
    optimizer = torch.optim.Adafactor(parameters())
    told = "updates an element by more than that element's own gradient and state"
    assert probe(optimizer, "element") == told
    assert probe(optimizer, "parameter") is None


@pytest.mark.parametrize("kind", PARAMETERWISE)
def test_torchs_optimizers_that_use_whole_parameters_are_refused_on_shards(kind: Any) -> None:
    owned = "Muon(" if kind is torch.optim.Muon else f"Owned({kind.__name__}, "
    for partitioning in (CUT, BOTH):
        with pytest.raises(PlanError) as caught:
            require_elementwise(kind(parameters()), partitioning)
        assert str(caught.value) == (
            f"{kind.__name__} {PARAMETERWISE[kind]}, but where tensors are sharded an optimizer has shards "
            f"of them only: take plait.{owned}engine, ...), set plan.strategy to 'none' and plan.tp to 1, "
            f"{ADAMW}."
        )
    require_elementwise(kind(parameters()), STAGES)


def test_lbfgs_is_refused_unless_a_rank_has_all_parameters() -> None:
    optimizer = torch.optim.LBFGS(parameters())
    require_elementwise(optimizer, WHOLE)
    with pytest.raises(PlanError) as caught:
        require_elementwise(optimizer, STAGES)
    assert str(caught.value) == (
        "LBFGS moves all parameters along one line, but with plan.pp = 2 an optimizer has the parameters of "
        f"its own stages only: set plan.pp to 1 and leave plan.tp at 1 and plan.strategy at 'none', {ADAMW}."
    )
    for partitioning in (CUT, BOTH):
        with pytest.raises(PlanError) as caught:
            require_elementwise(optimizer, partitioning)
        assert str(caught.value) == (
            "LBFGS moves all parameters along one line, but where tensors are sharded an optimizer has "
            f"shards of them only: set plan.strategy to 'none', and plan.tp and plan.pp to 1, {ADAMW}."
        )


def test_every_optimizer_of_torch_is_known() -> None:
    theirs = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    known = ELEMENTWISE | PARAMETERWISE.keys() | COUPLING.keys()
    assert theirs - {Optimizer, torch.optim.SparseAdam} == known


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(PlanError, match="SparseAdam takes sparse gradients, but plait's are dense"):
        require_elementwise(torch.optim.SparseAdam(parameters()), CUT)


@pytest.mark.parametrize(
    ("plan", "partitioning"),
    [
        (Plan(), WHOLE),
        (Plan(dp=4, replicate=2), WHOLE),
        (Plan(dp=2, replicate=2, strategy="full"), WHOLE),
        (Plan(strategy="full", offload="full"), WHOLE),
        (Plan(pp=2, strategy="full", offload="full"), STAGES),
        (Plan(dp=2, strategy="optimizer"), CUT),
        (Plan(tp=2), CUT),
        (Plan(pp=2, tp=2), BOTH),
    ],
)
def test_each_plan_leaves_an_optimizer_the_listed_partitioning(
    plan: Plan, partitioning: Partitioning
) -> None:
    assert Partitioning.of(plan, [kind_of(plan)]) == partitioning


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        DecaysMatrices,
        OwnAdamW,
        lambda params: OwnAdamW(params, lr=0.01, fused=True),
        lambda params: OwnAdamW(params, lr=torch.tensor(0.01)),
        lambda params: OwnAdamW([("weight", one) for one in params], lr=0.01),
        lambda params: FreeForm(params, pace=0.1),
        SinglePrecision,
        KeepsArgument,
        Mixed,
        lambda params: Mixed([{"params": params}, {"params": parameters(), "lr": 0.2}]),
    ],
)
def test_elementwise_optimizers_of_users_are_accepted(make: Callable[[Any], Optimizer]) -> None:
    require_elementwise(make(parameters()), BOTH)
    require_elementwise(make(parameters()), STAGES)


@pytest.mark.parametrize(
    "make",
    [
        Trust,
        RowNorm,
        CountsRows,
        SparesSmallTensors,
        SometimesAverages,
        lambda params: KeepsArgument(params, trust=True),
        lambda params: Mixed(params, trust=True),
        lambda params: Mixed([{"params": params}, {"params": parameters(), "trust": True}]),
    ],
)
def test_users_optimizers_that_use_whole_parameters_are_refused_on_shards(
    make: Callable[[Any], Optimizer],
) -> None:
    optimizer = make(parameters())
    require_elementwise(optimizer, STAGES)
    name = type(optimizer).__name__
    for partitioning in (CUT, BOTH):
        with pytest.raises(PlanError) as caught:
            require_elementwise(optimizer, partitioning)
        assert str(caught.value) == (
            f"{name} updates an element by more than that element's own gradient and state, but where "
            f"tensors are sharded an optimizer has shards of them only: take plait.Owned({name}, engine, "
            f"...), set plan.strategy to 'none' and plan.tp to 1, {ADAMW}, or declare `elementwise = True` "
            f"in class {name}."
        )


@pytest.mark.parametrize(
    "make",
    [
        ClipsAll,
        Prodigious,
        lambda params: GroupNorm([{"params": params}, {"params": parameters(), "decay": 0.1}]),
        Noisy,
    ],
)
def test_users_optimizers_that_use_all_parameters_are_refused_unless_a_rank_has_all(
    make: Callable[[Any], Optimizer],
) -> None:
    optimizer = make(parameters())
    require_elementwise(optimizer, WHOLE)
    name = type(optimizer).__name__
    told = f"{name} updates a parameter by more than that parameter's own gradient and state, but "
    with pytest.raises(PlanError) as caught:
        require_elementwise(optimizer, STAGES)
    assert str(caught.value) == (
        f"{told}with plan.pp = 2 an optimizer has the parameters of its own stages only: set plan.pp to 1 "
        f"and leave plan.tp at 1 and plan.strategy at 'none', {ADAMW}, or declare "
        f"`parameterwise = True` in class {name}."
    )
    with pytest.raises(PlanError) as caught:
        require_elementwise(optimizer, CUT)
    assert str(caught.value) == (
        f"{told}where tensors are sharded an optimizer has shards of them only: set plan.strategy to 'none', "
        f"and plan.tp and plan.pp to 1, {ADAMW}, or declare `elementwise = True` in class {name}."
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
        (lambda params: Lookahead(torch.optim.SGD(params)), r"cannot be tested \("),
    ],
)
def test_an_optimizer_that_cannot_be_tried_is_refused_unless_it_declares_elementwise(
    make: Callable[[Any], Optimizer], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make(parameters())
    with pytest.raises(PlanError, match=told):
        require_elementwise(optimizer, CUT)
    monkeypatch.setattr(type(optimizer), "parameterwise", True, raising=False)
    require_elementwise(optimizer, STAGES)
    with pytest.raises(PlanError, match=told):
        require_elementwise(optimizer, CUT)
    monkeypatch.setattr(type(optimizer), "elementwise", True, raising=False)
    require_elementwise(optimizer, CUT)


def test_a_declaration_elementwise_counts_for_its_own_class_only() -> None:
    class Vouched(Trust):
        elementwise = True

    class Heir(Vouched):
        pass

    require_elementwise(Vouched(parameters()), BOTH)
    with pytest.raises(PlanError, match=r"^Heir updates"):
        require_elementwise(Heir(parameters()), CUT)


def test_a_trial_finds_non_elementwise_updates_during_a_warm_up_from_zero() -> None:
    for kind, refused in ((Trust, True), (Plain, False)):
        optimizer = kind(parameters())
        LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        assert (probe(optimizer, "element") is not None) == refused


def test_a_trial_leaves_everything_as_it_was() -> None:
    (parameter,) = parameters()
    optimizer = OwnAdamW([parameter], lr=0.5)
    optimizer.step()
    before, random = parameter.detach().clone(), torch.random.get_rng_state()
    state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    assert probe(optimizer, "element") is None
    assert probe(Noisy([parameter]), "element") is not None
    assert torch.equal(parameter, before)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state[parameter].items())
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_guard_refuses_before_anything_changes() -> None:
    (parameter,) = parameters()
    guard = OptimizerGuard([parameter], CUT)
    optimizer = Trust([parameter])
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4, 3))
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(parameter, torch.zeros(4, 3))
    del guard


def test_a_guard_can_be_asked_before_a_step() -> None:
    watched, other = parameters(2)
    guard = OptimizerGuard([watched], STAGES)
    guard.check(ClipsAll([other]))
    with pytest.raises(PlanError, match="ClipsAll"):
        guard.check(ClipsAll([other, watched]))


def test_a_guard_sees_through_a_scheduler() -> None:
    (parameter,) = parameters()
    guard = OptimizerGuard([parameter], CUT)
    optimizer = Trust([parameter])
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    del guard, scheduler


def test_an_optimizer_inside_another_is_asked_too() -> None:
    class Vouched(Lookahead):
        elementwise = True

    (parameter,) = parameters()
    guard = OptimizerGuard([parameter], CUT)
    Vouched(Plain([parameter])).step()
    with pytest.raises(PlanError, match=r"^Trust"):
        Vouched(Trust([parameter])).step()
    del guard


def test_an_optimizer_guard_checks_only_steps_of_its_own_parameters() -> None:
    watched, other = parameters(2)
    guard = OptimizerGuard([watched], CUT)
    optimizer = Trust([other])
    optimizer.step()
    optimizer.add_param_group({"params": [watched]})
    with pytest.raises(PlanError, match="Trust"):
        optimizer.step()
    del guard


def test_each_optimizer_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Optimizer] = []
    monkeypatch.setattr("plait.proof.optimizer_proof.probe", lambda optimizer, reach: tried.append(optimizer))
    watched = parameters(2)
    guard = OptimizerGuard(watched, STAGES)
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
    guards = [OptimizerGuard([first], CUT), OptimizerGuard([second], CUT)]
    del guards[0]
    Trust([first]).step()
    with pytest.raises(PlanError, match="Trust"):
        Trust([second]).step()


def test_a_guard_keeps_nothing_alive_and_goes_with_the_engine() -> None:
    class Engine:
        def __init__(self) -> None:
            self.parameters = parameters()
            self.guard = OptimizerGuard(self.parameters, CUT)

    gc.disable()
    try:
        engine = Engine()
        optimizer = Plain(engine.parameters)
        optimizer.step()
        gone = [weakref.ref(one) for one in (engine, engine.guard, engine.parameters[0], optimizer)]
        del optimizer
        assert gone[3]() is None
        del engine
        assert [one() for one in gone] == [None] * 4
    finally:
        gc.enable()


def test_guards_come_and_go_while_another_thread_steps() -> None:
    """Ranks may be threads: torch's hooks of all optimizers must not change while one of them iterates."""
    from torch.optim import optimizer as home

    before = list(home._global_optimizer_pre_hooks)
    guard = OptimizerGuard(parameters(), CUT)
    assert list(home._global_optimizer_pre_hooks) == before
    del guard
    assert list(home._global_optimizer_pre_hooks) == before


def test_a_watched_parameter_can_be_saved_and_copied(tmp_path: Path) -> None:
    (watched,) = parameters()
    guard = OptimizerGuard([watched], CUT)
    torch.save(watched, tmp_path / "saved.pt")
    for other in (torch.load(tmp_path / "saved.pt", weights_only=True), copy.deepcopy(watched)):
        assert torch.equal(other, watched)
        other.grad = torch.ones_like(other)
        Trust([other]).step()  # nobody watches it
    del guard
