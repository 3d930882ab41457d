"""`plait.verify` as a user calls it, and that a defect of the woven side is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verification_cases import case_of, label, mlp, mlp_case, rows_and_classes, verify_here

import plait
from parity.cases import USER_CASES, gpt2, llama
from parity.pairs import in_quick
from plait.engine import Engine
from plait.errors import DataError, ModelError, PlaitError, PlanError, ScheduleError
from plait.models.layers.layer_sequence import bits_of
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy
from plait.verification import verify as verify_module
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.report import VerificationReport
from plait.verification.step_location import StepPhase
from plait.verification.sweep import RefusedPlan
from plait.verification.verify import build_report, verify_all

PLAN = Plan(microbatches=2)
BY_NAME = {case.name: case for case in USER_CASES}
QUICK = ("on_meta", "dictionary_to_the_end", "crossing_ties", "twice_in_a_layer", "buffers", "weighted")
"""Of the users' models; the full run has all."""


def over(thread_ranks: RankPool, case: Case, plan: Plan) -> VerificationReport:
    """`plait.verify` on ranks that are there already."""
    return build_report(thread_ranks.run(verify_rank, case, plan, ranks=plan.world), plan, case.options)


def test_verify_over_two_ranks_does_not_alter_the_users_model() -> None:
    model = mlp()
    before = {name: bits_of(value) for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    inputs, targets = rows_and_classes()
    given = bits_of(inputs)
    plan = Plan(pp=2, microbatches=2, schedule="zb-h1")
    report = plait.verify(model, plan, inputs, targets, threads=1, device="cpu")
    assert report, report
    assert (report.options.mode, report.options.steps, report.plan) == ("float64", 2, plan)
    assert {StepPhase.MESSAGE, StepPhase.GRADIENT_MESSAGE} <= report.tallies.keys()
    assert {name: bits_of(value) for name, value in model.state_dict().items()} == before
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert bits_of(inputs) == given


@pytest.mark.full
def test_verify_builds_a_model_from_a_function_on_ranks_it_starts() -> None:
    assert plait.verify(lambda: mlp(), Plan(dp=2, microbatches=2), *rows_and_classes(), threads=1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, microbatches=2),
        Plan(pp=2, microbatches=4, schedule="gpipe"),
        Plan(pp=2, dp=2, microbatches=2, schedule="zb-h2"),
    ],
    ids=label,
)
def test_verify_takes_a_function_that_builds_the_model(plan: Plan, thread_ranks: RankPool) -> None:
    case = Case(lambda: mlp(), cross_entropy, [rows_and_classes(8)] * 2, VerifyOptions(), device="cpu")
    report = over(thread_ranks, case, plan)
    assert report, report


def test_gpt2_and_llama_over_tensor_parallel_ranks_are_equal(thread_ranks: RankPool) -> None:
    for case, plan in (
        (gpt2(layers=1), Plan(tp=2, microbatches=2)),
        (llama(layers=1), Plan(pp=2, tp=2, microbatches=2)),
    ):
        report = over(thread_ranks, case_of(case), plan)
        assert report, report


@pytest.mark.parametrize("name", in_quick(BY_NAME, *QUICK))
def test_verify_finds_users_models_on_one_rank_equal(name: str) -> None:
    report = verify_here(case_of(BY_NAME[name]))
    assert report, report
    assert report.used < 0.5


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("case", USER_CASES, ids=lambda case: case.name)
def test_verify_finds_users_models_over_four_ranks_equal(
    case: Any, schedule: str, thread_ranks: RankPool
) -> None:
    plan = Plan(pp=2, dp=2, microbatches=2, schedule=schedule)
    report = over(thread_ranks, case_of(case, rows=8), plan)
    assert report, report


class MaskedAttention(nn.Module):
    """Takes and gives a mask beside the hidden: numbers that are added to scores, or bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = value
        scores = hidden @ hidden.mT
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return self.linear(scores.softmax(-1) @ hidden), mask


class MakeMask(nn.Module):
    """To `[rows, 6, 1]` vectors of one feature, made six by a linear, a causal mask."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(1, 6), kind

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(inputs.unsqueeze(-1))
        later = torch.ones(len(inputs), 6, 6, device=inputs.device).triu(1).bool()
        return hidden, later if self.kind == torch.bool else hidden.new_zeros(()).masked_fill(
            later, -torch.inf
        )


class Close(nn.Module):
    """Logits of the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.linear(value[0][:, -1])
        return logits


def masked(kind: torch.dtype) -> Case:
    model = nn.Sequential(MakeMask(kind), MaskedAttention(), MaskedAttention(), Close())
    return Case(model, cross_entropy, [rows_and_classes()] * 2, VerifyOptions())


@pytest.mark.parametrize("kind", in_quick((torch.bool, torch.float64), torch.bool))
def test_verify_finds_a_model_whose_layers_pass_masks_equal(kind: torch.dtype) -> None:
    assert verify_here(masked(kind))


def moved_weight(engine: Engine) -> None:
    with torch.no_grad():
        next(iter(engine.parameters())).mul_(1 + 1e-6)


def another_layer(model: nn.Sequential) -> nn.Sequential:
    """Without its third layer's function."""
    first, second, _, last = model
    return nn.Sequential(first, second, nn.Identity(), last)


@pytest.mark.parametrize("mode", ["float64", "exact"])
def test_a_weight_that_is_slightly_wrong_is_found(broken: Callable[..., None], mode: str) -> None:
    broken(moved_weight)
    report = verify_here(mlp_case(mode=mode, steps=1))
    assert report.first is not None
    location = report.first.difference.location
    assert (location.step, location.phase, location.name) == (0, StepPhase.INITIAL, "0.weight")


@pytest.mark.parametrize("mode", ["float64", "exact"])
def test_a_layer_that_computes_something_else_is_found(broken: Callable[..., None], mode: str) -> None:
    broken(replace=another_layer)
    report = verify_here(mlp_case(mode=mode, steps=1))
    assert not report
    assert report.first is not None
    assert (report.first.difference.location.phase, report.first.layer) == (StepPhase.FORWARD, "2")


@pytest.mark.parametrize("kind", in_quick((torch.bool, torch.float64), torch.float64))
def test_a_wrong_layer_is_found_where_masks_flow_between_layers(
    broken: Callable[..., None], kind: torch.dtype
) -> None:
    broken(replace=another_layer)
    report = verify_here(masked(kind))
    assert report.first is not None
    assert (report.first.difference.location.phase, report.first.layer) == (StepPhase.FORWARD, "2")


def test_unclipped_gradients_are_found(broken: Callable[..., None]) -> None:
    def damage(engine: Engine) -> None:
        clip = engine.clip_grad_norm_
        engine.clip_grad_norm_ = lambda *_: clip(float("inf"))  # type: ignore[method-assign]

    broken(damage)
    report = verify_here(mlp_case())
    assert report.first is not None
    assert report.first.difference.location.phase is StepPhase.CLIP
    assert report.first.difference.location.step == 0
    assert report.first.cause == "it was not scaled."


def test_with_isolate_the_same_mistake_is_counted_by_itself(broken: Callable[..., None]) -> None:
    broken(replace=another_layer)
    everything, alone = (verify_here(mlp_case(steps=1, isolate=isolate)) for isolate in (False, True))
    assert alone.first is not None
    assert everything.first is not None
    assert alone.first.difference.location == everything.first.difference.location
    assert alone.different < everything.different / 3


def test_a_loss_that_does_not_add_up_is_seen_on_the_reference_alone() -> None:
    class OfTheBatch:
        """A mean over rows, given as if it were a sum over targets."""

        def total(self, output: Tensor, targets: Tensor) -> Tensor:
            return (output - output.mean(0)).square().sum()

        def weight(self, targets: Tensor) -> Tensor:
            return torch.tensor(len(targets))

    report = verify_here(mlp_case(loss=OfTheBatch()))
    assert report.first is not None
    assert report.first.difference.location.phase is StepPhase.BATCH
    assert "depends on how the batch is cut" in report.first.cause


def test_mode_native_verifies_in_the_plans_precision() -> None:
    plan = replace(PLAN, precision="bf16")
    report = verify_here(mlp_case(mode="native"), plan)
    assert report, report
    assert verify_here(mlp_case(), plan)


def test_verify_takes_other_optimizers_and_settings() -> None:
    def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    dropping = nn.Sequential(*mlp()[:3], nn.Dropout(0.5), mlp()[3])  # of other features in each step
    case = replace(mlp_case(optimizer=momentum, clip=1e9, steps=3, seed=4), model=dropping)
    report = verify_here(case)
    assert report, report
    assert (report.clip, report.tallies[StepPhase.NORM].compared) == (1e9, 3 + 2 + 3)


def test_verify_finds_a_frozen_model_equal() -> None:
    case = mlp_case()
    frozen = mlp().requires_grad_(False)
    report = verify_here(replace(case, model=frozen))
    assert report, report


def refused_by_parallelize(model: nn.Module, plan: Plan) -> str:
    mesh = Mesh(plan)
    try:
        plait.parallelize(model, plan, mesh, cross_entropy)
    except (PlanError, ScheduleError) as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_a_plan_that_cannot_be_raises_as_parallelize_does(thread_ranks: RankPool) -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    plan = Plan(pp=2, microbatches=2)
    told = thread_ranks.run(refused_by_parallelize, model, plan, ranks=2)[0]
    assert "2 stages" in told
    case = Case(model, cross_entropy, [rows_and_classes()], VerifyOptions(steps=1))
    with pytest.raises((PlanError, ScheduleError)) as caught:
        over(thread_ranks, case, plan)
    assert str(caught.value) == told


@pytest.mark.parametrize("mode", ["float64", "exact"])
@pytest.mark.parametrize(
    ("model", "inputs", "error"),
    [
        ("a name", torch.ones(2, 6), ModelError),
        (lambda: 3, torch.ones(2, 6), ModelError),
        (mlp(), torch.ones(3, 6), PlanError),
        (mlp(), torch.tensor(1.0), PlaitError),
        (mlp(), "no tensor", PlaitError),
    ],
    ids=["no model", "no model built", "three rows", "no rows", "no tensor"],
)
def test_models_and_batches_that_verify_cannot_run_are_refused(
    model: Any, inputs: Any, error: type, mode: Any
) -> None:
    rows = len(inputs) if isinstance(inputs, Tensor) and inputs.dim() else 2
    targets = torch.zeros(rows, dtype=torch.int64)
    case = Case(model, cross_entropy, [(inputs, targets)], VerifyOptions(mode=mode, steps=1))
    with pytest.raises(error):
        verify_rank(case, PLAN)


@pytest.mark.parametrize("inputs", [torch.tensor(1.0), "no tensor"])
def test_every_layout_of_a_batch_without_rows_is_a_sentence(inputs: Any) -> None:
    """`verify_all` raises an error that names the inputs."""
    case = replace(mlp_case(steps=1), batches=[(inputs, torch.zeros(2, dtype=torch.int64))])
    with pytest.raises((DataError, PlanError), match="the inputs have"):
        verify_all(case, PLAN, 1)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "a name"}, "the model is 'a name': give an nn.Module, or a function that builds one."),
    ({"plan": 3}, "the plan is an object of int: give a plait.Plan."),
    ({"timeout": 0}, "timeout is 0: give a number above 0, or math.inf for no limit."),
    ({"reference": 3}, "the reference is 3: give an nn.Module, or a function of the inputs."),
    ({"reference": mlp(), "steps": 1}, "steps = 1 does not go with a reference"),
    ({"mode": "fast"}, "mode is 'fast'"),
    ({"steps": "2"}, "steps is '2'"),
    ({"clip": -1.0}, "clip is -1.0"),
    ({"mode": "exact", "steps": 2}, "steps is 2: mode exact takes 1"),
]


def test_bad_arguments_are_refused_before_any_rank_starts() -> None:
    inputs, targets = rows_and_classes()
    for arguments, told in BAD_ARGUMENTS:
        given = {"model": mlp(), "plan": PLAN, "inputs": inputs, "targets": targets} | arguments
        with pytest.raises(PlaitError) as caught:
            plait.verify(**given)
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("mode", "in_chunks"), in_quick([("float64", True), ("exact", False)], ("float64", True))
)
def test_every_plan_of_a_sweep_is_verified_or_refused(
    monkeypatch: pytest.MonkeyPatch, mode: Any, in_chunks: bool
) -> None:
    given, progress = [], []
    plans = (Plan(microbatches=3), PLAN, replace(PLAN, microbatches=4))

    def two(*arguments: Any, **options: Any) -> tuple[Plan, ...]:
        given.append((arguments, options))
        return plans

    monkeypatch.setattr(verify_module, "plans_on", two)
    case = replace(mlp_case(mode=mode, steps=1), ranks_as="threads")
    sweep = verify_all(case, PLAN, 1, report_progress=lambda done, of: progress.append((done, of)))
    assert given == [((1, PLAN, 4), {"in_parts": False, "in_chunks": in_chunks, "with_experts": False})]
    assert (sweep.ranks, tuple(plan for plan, _ in sweep.rows)) == (1, plans)
    assert [isinstance(result, RefusedPlan) for _, result in sweep.rows] == [True, False, False]
    assert [report.plan for report in sweep.reports] == list(plans[1:])
    assert sweep
    assert progress == [(2, 3), (3, 3)]
    other = replace(case, loss=lambda output, targets: output.sum())
    verify_all(other, PLAN, 1)
    assert given[1] == ((1, PLAN, 4), {"in_parts": False, "in_chunks": False, "with_experts": False})
