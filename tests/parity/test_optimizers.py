"""Which optimizers may update shards, and what happens to the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import plait
from parity.case import SEED
from parity.cases import gpt2
from plait.errors import PlanError
from plait.plan.plan import Plan


def step_by(plan: Plan, kind: str, groups: bool) -> str:
    """Take a step; return why the optimizer was refused, or "" where it was not."""
    case = gpt2()
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    (batch,) = case.batches(2, 1, torch.float32)
    parameters: Any = engine.parameters()
    if groups:
        parameters = engine.parameter_groups(weight_decay=0.0)[: 1 if kind == "Muon" else 2]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
    before = [parameter.detach().clone() for parameter in engine.parameters()]
    engine.forward_backward(*batch)
    try:
        optimizer.step(lambda: 0.0)
    except PlanError as refused:
        assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
        return str(refused)
    return ""


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("plan", [Plan(dp=2, strategy="full"), Plan(tp=2)], ids=["full", "tp"])
def test_elementwise_optimizers_step_on_sharded_parameters(thread_ranks: Any, plan: Plan, kind: str) -> None:
    assert thread_ranks.run(step_by, plan, kind, True, ranks=2) == ["", ""]


REFUSED = [
    ("Adafactor", Plan(dp=2, strategy="full"), "divides an element by the mean squares of its row"),
    ("Adafactor", Plan(tp=2), "divides an element by the mean squares of its row"),
    ("Muon", Plan(dp=2, strategy="full"), "makes the update of a whole matrix orthogonal, but where tensors"),
    ("LBFGS", Plan(pp=2), "moves all parameters along one line, but with plan.pp = 2 an optimizer has"),
]


@pytest.mark.parametrize(("kind", "plan", "told"), REFUSED, ids=["full", "tp", "muon", "pp"])
def test_optimizers_that_need_whole_parameters_are_refused_before_they_change_anything(
    thread_ranks: Any, kind: str, plan: Plan, told: str
) -> None:
    for refused in thread_ranks.run(step_by, plan, kind, kind == "Muon", ranks=2):
        assert refused.startswith(f"{kind} {told}")


def test_an_optimizer_of_the_models_parameters_is_refused_as_it_would_train_nothing(
    thread_ranks: Any,
) -> None:
    def refused() -> list[str]:
        case = gpt2()
        model = case.build()
        engine = plait.parallelize(model, Plan(), plait.Mesh(), case.loss)
        engine.forward_backward(*case.batches(2, 1, torch.float32)[0])
        wrong = torch.optim.SGD(model.parameters())
        told = []
        for use in (partial(engine.step, wrong, 1.0), partial(engine.check_optimizer, wrong)):
            with pytest.raises(PlanError) as caught:
                use()
            told.append(str(caught.value))
        batches: Any = plait.Loader(case.batches(2, 1, torch.float32), batch=2)
        with pytest.raises(PlanError) as caught:
            plait.fit(model, Plan(), batches, steps=1, optimizer=lambda groups: wrong)
        return [*told, str(caught.value)]

    (told,) = thread_ranks.run(refused, ranks=1)
    assert set(told) == {
        "SGD has parameters of the model, of which the engine has copies: make it of engine.parameters()."
    }


def test_the_engine_refuses_a_non_elementwise_optimizer_before_it_clips(thread_ranks: Any) -> None:
    for refused in thread_ranks.run(clipped_by_a_step_refused, Plan(pp=2), ranks=2):
        assert refused


def clipped_by_a_step_refused(plan: Plan) -> bool:
    """Whether `engine.step` refuses L-BFGS and leaves the gradients as they are."""
    case = gpt2()
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    (batch,) = case.batches(2, 1, torch.float32)
    engine.forward_backward(*batch)
    before = [one.grad.clone() for one in engine.parameters() if one.grad is not None]
    optimizer = torch.optim.LBFGS(engine.parameters())
    with pytest.raises(PlanError, match="LBFGS"):
        engine.check_optimizer(optimizer)
    with pytest.raises(PlanError, match="LBFGS"):
        engine.step(optimizer, 1e-3)
    after = [one.grad for one in engine.parameters() if one.grad is not None]
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def losses_by(plan: Plan, kind: str) -> list[float]:
    """The losses of four steps of an optimizer that looks at whole parameters, or at all of them."""
    case = gpt2()
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    (batch,) = case.batches(4, 1, torch.float32)
    share = [one.chunk(plan.dp)[engine.mesh.index("replicate")] for one in batch]
    options = {"max_iter": 4} if kind == "LBFGS" else {}
    optimizer = getattr(torch.optim, kind)(engine.parameters(), lr=0.01, **options)

    def closure() -> Any:
        optimizer.zero_grad()
        return engine.forward_backward(*share)

    return [float(optimizer.step(closure)) for _ in range(4)]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Adafactor", Plan(pp=2, precision="fp64")),
        ("LBFGS", Plan(dp=2, replicate=2, precision="fp64")),
    ],
    ids=["a parameter, pp", "all, dp"],
)
def test_adafactor_and_lbfgs_on_plans_that_allow_them_equal_one_rank(
    thread_ranks: Any, kind: str, plan: Plan
) -> None:
    (alone,) = thread_ranks.run(losses_by, Plan(precision="fp64"), kind, ranks=1)
    assert thread_ranks.run(losses_by, plan, kind, ranks=2)[0] == pytest.approx(alone, rel=1e-6)
    assert len(set(alone)) == 4
