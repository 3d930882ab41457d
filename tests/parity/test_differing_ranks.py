"""One rank that is unlike the others in one thing: it is found, with the place and the values of both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine import Engine
from plait.errors import PlaitError
from plait.rules import column, entrance, row

WIDTH, ROWS, CLASSES = 8, 4, 5
PLANS = {
    "dp": plait.Plan(dp=2),
    "pp": plait.Plan(pp=2, microbatches=2, layers_per_stage=(1, 1)),
    "tp": plait.Plan(tp=2),
    "cp": plait.Plan(cp=2),
    "shards": plait.Plan(dp=2, strategy="full"),
}


class Layer(nn.Module):
    """A residual with attention: `[rows, length, width]` to the same shape, by what its attributes say."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = {"heads": 2, "causal": True, "window": None, "eps": None, "act": torch.relu}
        self.norm = nn.LayerNorm(WIDTH)
        self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("table", torch.full((2,), options.pop("filled", 1.0)))
        for name, value in (known | options).items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.outer(self.norm(x)))
        parts = hidden.unflatten(-1, (-1, 4)).transpose(1, 2)
        mixed = plait.attention(parts, parts, parts, causal=self.causal, window=self.window)
        return x + self.drop(self.inner(mixed.transpose(1, 2).flatten(2)))


@dataclass(frozen=True)
class Run:
    """What a rank gives to plait, and does."""

    layer: Mapping[str, Any] = field(default_factory=dict)
    change_model: Callable[[nn.Module], object] = lambda model: None
    change_plan: Mapping[str, Any] = field(default_factory=dict)
    loss: Any = plait.cross_entropy
    options: Mapping[str, Any] = field(default_factory=dict)
    guarded: bool = False
    optimizer: Callable[[Engine], torch.optim.Optimizer] = lambda engine: torch.optim.AdamW(
        engine.parameter_groups(0.1), lr=0.01
    )
    inputs: Callable[[Tensor], Tensor] = lambda inputs: inputs
    targets: Callable[[Tensor], Tensor] = lambda targets: targets
    before: Callable[[Engine, torch.optim.Optimizer], object] = lambda engine, optimizer: None
    """Before the steps."""
    forward: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float = 1.0
    by_hand: bool = False
    """Whether gradients are clipped and the optimizer steps in two calls."""
    between: Callable[[Engine, torch.optim.Optimizer], object] = lambda engine, optimizer: (
        optimizer.zero_grad()
    )
    """After a step."""

    def carry_out(self, plan: plait.Plan, steps: int, checks: bool = False) -> str:
        """Return what is raised in some steps, or an empty text."""
        plan = replace(plan, **self.change_plan)
        mesh = plait.Mesh(plan, guarded=self.guarded)
        torch.manual_seed(0)
        model = nn.Sequential(Layer(**self.layer), nn.Linear(WIDTH, CLASSES))
        self.change_model(model)
        drawn = torch.Generator().manual_seed(mesh.index("dp"))
        inputs = torch.randn(ROWS, 4, WIDTH, generator=drawn)
        targets = torch.randint(CLASSES, (ROWS, 4), generator=drawn)
        rules = {"0.outer": column, "0.inner": row, "0.norm": entrance}
        options = {"rules": rules if plan.tp > 1 else {}} | dict(self.options)
        engine = plait.parallelize(model, plan, mesh, self.loss, **options)
        optimizer = self.optimizer(engine)
        self.before(engine, optimizer)
        for _ in range(steps):
            engine.forward_backward(self.inputs(inputs), self.targets(targets), **self.forward)
            if self.by_hand:
                engine.clip_grad_norm_(self.max_norm)
                optimizer.step()
            else:
                engine.step(optimizer, self.max_norm)
            self.between(engine, optimizer)
            if checks:
                engine.check_replicas(optimizer)
        return ""


def outcomes(odd: Iterable[Run], plan: plait.Plan, usual: Run, *how: Any) -> list[str]:
    """What is raised where the last rank carries out each of `odd`, and the others `usual`."""
    found = []
    for one in odd:
        mine = one if plait.Mesh(plan).rank == plan.world - 1 else usual
        try:
            found.append(mine.carry_out(plan, *how))
        except PlaitError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def check(pool: Any, cases: Mapping[str, Case], plan: plait.Plan, usual: Run, *how: Any) -> None:
    """Every rank is told of every case, in the words of the case."""
    odd = [case.odd for case in cases.values()]
    for told in pool.run(outcomes, odd, plan, usual, *how, ranks=plan.world):
        for (name, case), sentence in zip(cases.items(), told, strict=True):
            assert re.search(case.told, sentence), f"{name}: {sentence!r}"


@dataclass(frozen=True)
class Case:
    """A run of the last rank that is unlike the others', and what is told of it."""

    odd: Run
    told: str


def unlike(usual: str, odd: str) -> str:
    return rf"do not agree \(.*rank 0.*: {usual}; rank 1: {odd}.*\): "


def replaced(name: str, make: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda model: model.set_submodule(name, make())


def enclosing(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, targets: plait.cross_entropy.total(output, targets) * factor


def frozen(model: nn.Module) -> None:
    model[0].norm.requires_grad_(False)  # type: ignore[index]


def hooked(model: nn.Module) -> None:
    model[1].register_forward_hook(lambda module, given, result: result * 2)  # type: ignore[index]


class Squashed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh())


MODELS = {
    "none": Case(Run(), "^$"),
    "heads": Case(Run({"heads": 4}), unlike(r"0\.heads = 2", r"0\.heads = 4")),
    "epsilon": Case(Run({"eps": 1e-6}), unlike(r"0\.eps = None", r"0\.eps = 1e-06")),
    "norm": Case(
        Run(change_model=lambda model: setattr(model[0].norm, "eps", 1e-6)),
        unlike(r"0\.norm\.eps = 1e-05", r"0\.norm\.eps = 1e-06"),
    ),
    "dropout": Case(
        Run(change_model=lambda model: setattr(model[0].drop, "p", 0.2)),
        unlike(r"0\.drop\.p = 0\.1", r"0\.drop\.p = 0\.2"),
    ),
    "causal": Case(Run({"causal": False}), unlike(r"0\.causal = True", r"0\.causal = False")),
    "window": Case(Run({"window": 3}), unlike(r"0\.window = None", r"0\.window = 3")),
    "function": Case(Run({"act": torch.tanh}), unlike(r"0\.act = .*relu", r"0\.act = .*tanh")),
    "code": Case(
        Run({"act": lambda x: x.sin()}), unlike(r"0\.act = .*relu", r"0\.act = .*<lambda> of code \w+")
    ),
    "configuration": Case(
        Run({"config": SimpleNamespace(base=1e4, inner={"window": [1, 3]})}),
        unlike(
            r"0\.config = .*\(base=10000.0, inner=\{'window': \[1, 2\]\}\)",
            r"0\.config = .*\(base=10000.0, inner=\{'window': \[1, 3\]\}\)",
        ),
    ),
    "plain tensor": Case(
        Run({"mask": torch.ones(3)}),
        unlike(r"0\.mask = float32\[3\] of bits \w+", r"0\.mask = float32\[3\] of bits \w+"),
    ),
    "class": Case(
        Run(change_model=replaced("0", Squashed)),
        unlike(r"0 = .*Layer of code \w+", r"0 = .*Squashed of code \w+"),
    ),
    "evaluation": Case(
        Run(change_model=lambda model: model.eval()),
        unlike(r"model\.training = True", r"model\.training = False"),
    ),
    "hook": Case(
        Run(change_model=hooked), unlike(r"hooks of 1 = {}", r"hooks of 1 = {'forward_hooks': .*hooked.*}")
    ),
    "frozen": Case(
        Run(change_model=frozen),
        unlike(r"0\.norm\.weight = .* = True", r"0\.norm\.weight = .* = False"),
    ),
    "buffer": Case(
        Run({"filled": 2.0}), "ModelError: the model starts from other values on rank 1 .*, first in 0.table"
    ),
}
LOSSES_AND_PLANS = {
    "smoothing": Case(
        Run(loss=plait.tensor.CrossEntropy(label_smoothing=0.1)),
        unlike(r"loss\.label_smoothing = 0\.0", r"loss\.label_smoothing = 0\.1"),
    ),
    "ignored": Case(
        Run(loss=plait.tensor.CrossEntropy(ignore_index=2)),
        unlike(r"loss\.ignore_index = -100", r"loss\.ignore_index = 2"),
    ),
    "class of loss": Case(
        Run(loss=nn.CrossEntropyLoss()), unlike("loss = .*CrossEntropy.*", "loss = .*ClassLoss.*")
    ),
    "enclosed": Case(
        Run(loss=plait.tensor.mean_loss(enclosing(2.0))),
        unlike("loss = .*CrossEntropy.*", "loss = .*MeanLoss.*"),
    ),
    "plan": Case(
        Run(change_plan={"overlap": True}), unlike(r"plan\.overlap = None", r"plan\.overlap = True")
    ),
    "micro-batches": Case(
        Run(change_plan={"microbatches": 4}), unlike(r"plan\.microbatches = \d", r"plan\.microbatches = 4")
    ),
    "seed": Case(Run(options={"seed": 1}), unlike("seed = 0", "seed = 1")),
    "broadcast": Case(Run(options={"broadcast": True}), unlike("broadcast = False", "broadcast = True")),
    "guard": Case(Run(guarded=True), unlike("guarded = False", "guarded = True")),
}
USUAL = Run({"config": SimpleNamespace(base=1e4, inner={"window": [1, 2]}), "mask": torch.zeros(3)})


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_with_different_models_losses_or_plans_are_found_at_parallelize(
    thread_ranks: Any, plan: str
) -> None:
    cases = {
        name: replace(case, odd=replace(case.odd, layer={**USUAL.layer, **case.odd.layer}))
        for name, case in (MODELS | LOSSES_AND_PLANS).items()
    }
    check(thread_ranks, cases, PLANS[plan], USUAL, 0)


class Other(torch.optim.AdamW):
    """AdamW by another name."""

    elementwise = True


def adamw(engine: Engine, lr: float = 0.01, decay: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(engine.parameter_groups(decay), lr=lr, **options)


def set_rate(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.02


def by_layer(engine: Engine, rate: float = 0.03) -> torch.optim.Optimizer:
    """Rates by layer, so that stages have others."""
    groups = [
        {"params": [one], "lr": rate if name.startswith("0") else 0.01}
        for name, one in engine.named_parameters()
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def without_one(engine: Engine) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for name, one in engine.named_parameters() if "bias" not in name], lr=0.01)


def shifted(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0)


def fewer(tensor: Tensor) -> Tensor:
    return tensor[:2]


DEFAULTS = r"optimizer\.defaults: {} = {}"
EVERYWHERE = {
    "none": Case(Run(), "^$"),
    "class of optimizer": Case(
        Run(optimizer=lambda engine: torch.optim.SGD(engine.parameter_groups(0.1), lr=0.01)),
        unlike(r"optimizer = .*AdamW", r"optimizer = .*SGD"),
    ),
    "subclass": Case(
        Run(optimizer=lambda engine: Other(engine.parameter_groups(0.1), lr=0.01)),
        unlike(r"optimizer = .*AdamW", r"optimizer = .*Other of code \w+"),
    ),
    "rate": Case(
        Run(optimizer=partial(adamw, lr=0.02)),
        unlike(DEFAULTS.format("lr", 0.01), DEFAULTS.format("lr", 0.02)),
    ),
    "decay": Case(
        Run(optimizer=partial(adamw, decay=0.2)),
        unlike("matrices of .*: weight_decay = 0.1", "matrices of .*: weight_decay = 0.2"),
    ),
    "epsilon of optimizer": Case(
        Run(optimizer=partial(adamw, eps=1e-7)),
        unlike(DEFAULTS.format("eps", 1e-08), DEFAULTS.format("eps", 1e-07)),
    ),
    "fused": Case(
        Run(optimizer=partial(adamw, fused=True)),
        unlike(DEFAULTS.format("fused", None), DEFAULTS.format("fused", True)),
    ),
    "input gradients": Case(
        Run(forward={"input_gradients": True}), unlike("input_gradients = False", "input_gradients = True")
    ),
    "clipping": Case(Run(max_norm=2.0), unlike("max_norm = 1.0", "max_norm = 2.0")),
    "forgotten zero_grad": Case(
        Run(between=lambda engine, optimizer: None),
        unlike(".*since zero_grad = 1", ".*since zero_grad = 2"),
    ),
    "rate set later": Case(
        Run(before=set_rate), unlike("matrices of .*: lr = 0.01", "matrices of .*: lr = 0.02")
    ),
    "passes": Case(
        Run(before=lambda engine, optimizer: setattr(engine, "passes", 7)),
        unlike("engine.passes = 0", "engine.passes = 7"),
    ),
}
BATCHES = {
    "targets": Case(Run(targets=shifted), unlike(r".* of the targets \w+", r".* of the targets \w+")),
    "inputs": Case(Run(inputs=shifted), unlike(r".*, tokens \w+, .*", r".*, tokens \w+, .*")),
    "rows": Case(Run(inputs=fewer, targets=fewer), unlike(r"a step on .*", r"a step on .*")),
    "dtype of inputs": Case(Run(inputs=Tensor.double), unlike(r".*float32.*", r".*float64.*")),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_take_different_steps_are_found_in_the_first_two(
    thread_ranks: Any, plan: str, by_hand: bool
) -> None:
    cases = dict(EVERYWHERE)
    cases |= BATCHES if plan in ("pp", "tp", "cp") else {}
    cases = {name: replace(case, odd=replace(case.odd, by_hand=by_hand)) for name, case in cases.items()}
    check(thread_ranks, cases, PLANS[plan], Run(by_hand=by_hand), 2)


def shadowed(engine: Engine) -> torch.optim.Optimizer:
    """One optimizer a stage knows nothing of the other's."""
    return by_layer(engine, 0.02)


def test_rates_by_layer_are_the_stages_own_and_compared_between_replicas(thread_ranks: Any) -> None:
    usual = Run(optimizer=by_layer)
    cases = {
        "none": Case(usual, "^$"),
        "another rate": Case(
            Run(optimizer=shadowed),
            unlike(r"the group of 0\.\w+\.\w+: lr = 0\.03", r"the group of 0\.\w+\.\w+: lr = 0\.02"),
        ),
        "without a parameter": Case(
            Run(optimizer=without_one), unlike(r"the group of .*", r"the group of .*")
        ),
    }
    check(thread_ranks, cases, PLANS["dp"], usual, 2)
    check(thread_ranks, {"none": cases["none"]}, PLANS["pp"], usual, 4)


@pytest.mark.parametrize("empty", [True, False], ids=["an empty optimizer", "no optimizer"])
def test_a_stage_without_parameters_to_step_is_not_compared(thread_ranks: Any, empty: bool) -> None:
    """Gradients of the first stage are never set to None, and it clips with the others."""

    def body() -> list[str]:
        plan = PLANS["pp"]
        mesh = plait.Mesh(plan)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        engine = plait.parallelize(model, plan, mesh, plait.cross_entropy)
        mine = list(engine.parameters()) if mesh.rank else []
        optimizer = torch.optim.SGD([{"params": mine}], lr=0.1) if mine or empty else None
        for _ in range(4):
            engine.forward_backward(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64))
            if optimizer is None:
                engine.clip_grad_norm_(1.0)
            else:
                engine.step(optimizer, 1.0)
                optimizer.zero_grad()
            engine.check_replicas(optimizer)
        return ["done"]

    assert thread_ranks.run(body, ranks=2) == [["done"]] * 2


def test_several_optimizers_may_divide_the_stages_between_them(thread_ranks: Any) -> None:
    """Matrices have one, vectors another: a stage without vectors has one only."""

    def body() -> list[str]:
        plan = PLANS["pp"]
        mesh = plait.Mesh(plan)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES))
        engine = plait.parallelize(model, plan, mesh, plait.cross_entropy)
        matrices = [one for one in engine.parameters() if one.dim() == 2]
        vectors = [one for one in engine.parameters() if one.dim() == 1]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(matrices, lr=0.1)]
        optimizers += [torch.optim.AdamW(vectors)] if vectors else []
        for _ in range(4):
            engine.forward_backward(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64))
            engine.clip_grad_norm_(1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return ["done"]

    assert thread_ranks.run(body, ranks=2) == [["done"]] * 2


def write(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    next(engine.parameters()).data[0] += 1


def write_gradient(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    next(engine.parameters()).grad[0] += 1  # type: ignore[index]


def add_to_step(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[next(engine.parameters())]["step"] += 1


def keep(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Keeps the gradients."""


def test_replicas_that_drift_in_a_later_step_are_found_by_check_replicas(thread_ranks: Any) -> None:
    """In the third step, which compares nothing by itself."""
    name = r"0\.\w+\.\w+"
    cases = {
        "none": Case(Run(between=keep), "^$"),
        "parameter": Case(Run(between=in_step(3, write)), rf"ReplicaError: the value of {name} is"),
        "gradient": Case(
            Run(between=in_step(3, write_gradient)), rf"ReplicaError: the gradient of {name} is"
        ),
        "state": Case(
            Run(between=in_step(3, add_to_step)), rf"ReplicaError: the optimizer state step of {name} is"
        ),
        "rate": Case(
            Run(between=in_step(3, set_rate)),
            r"ReplicaError: .* do not agree \(check_replicas; rank 0: .*lr = 0.01; rank 1: .*lr = 0.02\)",
        ),
        "zero_grad": Case(
            Run(between=in_step(3, lambda engine, optimizer: optimizer.zero_grad())),
            rf"ReplicaError: the gradient of {name} is .* on rank 0 \(dp 0\) but missing on rank 1",
        ),
    }
    check(thread_ranks, cases, PLANS["dp"], Run(between=keep), 3, True)


def in_step(number: int, act: Callable[[Engine, torch.optim.Optimizer], object]) -> Any:
    """Does something after a step, and nothing after others."""

    def between(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        if engine.passes == number:
            act(engine, optimizer)

    return between


def test_a_guard_compares_every_batch(thread_ranks: Any) -> None:
    """Tensors with fractions too, of which otherwise only those of the first two steps are."""

    def late(inputs: Tensor) -> Tensor:
        calls.append(1)
        return shifted(inputs) if len(calls) == 3 else inputs

    for guarded in (True, False):
        calls: list[int] = []
        told = unlike(".*, tokens .*", ".*, tokens .*") if guarded else "^$"
        cases = {"inputs": Case(Run(inputs=late, guarded=guarded), told)}
        check(thread_ranks, cases, PLANS["pp"], Run(guarded=guarded), 3)
