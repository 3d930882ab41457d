"""`plait.verify`: runs the reference and the candidate, on local or a launcher's ranks, and reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from torch import nn

from plait.comm.launch import launch
from plait.errors import ModelError, PlanError
from plait.layers.layer_sequence import sequence_of
from plait.layers.nested import Value
from plait.plan import Plan
from plait.rules import Rule, Rules
from plait.tensor.chunked_cross_entropy import require_cross_entropy
from plait.tensor.losses import Loss, cross_entropy
from plait.tensor.output_linear import output_linear_name
from plait.tensor.torch_losses import GivenLoss, as_loss
from plait.verification.case import Case, rows_of
from plait.verification.options import MakeOptimizer, Mode, VerifyOptions, adamw, usual_steps
from plait.verification.rank_verification import verify_rank
from plait.verification.report import VerificationReport
from plait.verification.report_from_ranks import build_report
from plait.verification.step_batches import batches_of_steps
from plait.verification.sweep import RefusedPlan, ReportProgress, Sweep, plans_on, verify_plans

Result = TypeVar("Result")


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    inputs: Value,
    targets: Value,
    loss: GivenLoss = cross_entropy,
    *,
    rules: Rules | None = None,
    mode: Mode = "float64",
    steps: int | None = None,
    optimizer: MakeOptimizer = adamw,
    clip: float | None = None,
    isolate: bool = False,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    timeout: float = 600.0,
    ranks_as: Literal["processes", "threads"] = "processes",
) -> VerificationReport:
    """Compare `model`, parallelized by `plan`, with one device, and report the first difference, if any.

    Trains on one rank in plain PyTorch, then on `plan.world` ranks from the same values and data. Compares,
    in order: each layer's output and input gradient, each micro-batch's weight gradients, final gradients,
    loss, norm, and after a step (of `Engine.step`, or by hand, in turns) parameters and optimizer state. Then
    saves, loads into a new engine and under another plan, and takes one more step; not in mode `exact`.

    Args:
        model: as `parallelize` takes it, or a function that builds it. It is not altered.
        plan: the plan to verify. In modes `float64` and `exact` its precision is `fp64`.
        inputs: those of a global batch: tensors whose dim 0 is the batch. Later steps take its rows in
            another order, so that nothing of an earlier step goes unnoticed.
        targets: likewise.
        loss: as `parallelize` takes it.
        rules: as `parallelize` takes them.
        mode: `float64`, in which little but a mistake is larger than rounding; `native`, with all precisions
            and the loss scale of the plan; `exact`, in whole numbers, where equality is that of bits.
        steps: training steps to compare; by default 2, in mode `exact` 1.
        optimizer: makes the optimizer from parameter groups; AdamW by default.
        clip: the maximum gradient norm; None: a third of the first step's, so that clipping is exercised.
        isolate: replace each value that differs by the reference's, so that one mistake makes one difference.
        seed: seed of parameters that the model leaves uninitialised.
        device: `cpu`, `cuda`, or `auto`: CUDA where every rank has a GPU of its own.
        threads: torch threads in each rank.
        timeout: seconds that a rank waits for another.
        ranks_as: `processes`, or `threads` of this process, as in `plait.launch`.

    Returns:
        The report, the same on every rank. It is true where both runs are equal; print it.

    Raises:
        PlaitError: the plan, the model or the batch cannot be run; the same errors as `parallelize` has.
    """
    _require_kinds(plan, model)
    steps = usual_steps(mode) if steps is None else steps
    options = VerifyOptions(
        mode=mode, steps=steps, clip=clip, optimizer=optimizer, isolate=isolate, seed=seed, resumes=True
    )
    batches = batches_of_steps(inputs, targets, options.steps, plan.dp * plan.microbatches)
    case = Case(model, as_loss(loss), batches, options, rules, device, timeout, ranks_as)
    return verify_case(case, plan, threads=threads)


def _require_kinds(plan: object, model: object) -> None:
    """Raise PlanError or ModelError for a plan that is none, and a model that is none and builds none."""
    if not isinstance(plan, Plan):
        raise PlanError(f"the plan is {plan!r}: give a plait.Plan.")
    if not callable(model):
        raise ModelError(f"the model is {model!r}: give an nn.Module, or a function that builds one.")


def verify_case(case: Case, plan: Plan, *, threads: int | None = None) -> VerificationReport:
    """Verify `plan` on the batches of `case`, one for each step."""
    outcomes = _launch(partial(verify_rank, case, plan), case, plan.world, threads)
    return build_report(outcomes, plan, case.options)


def verify_all(
    case: Case,
    plan: Plan,
    ranks: int,
    *,
    threads: int | None = None,
    report_progress: ReportProgress | None = None,
) -> Sweep:
    """Verify every layout, schedule and sharding that `ranks` ranks allow, with the other fields of `plan`.

    A plan that the model does not allow (heads that do not divide, more stages than layers) is listed with
    the reason. Sequences are cut where the model has a rule for that, and the loss is computed in chunks of
    rows where it can be. Rank 0 calls `report_progress` after
    each plan that it has run.
    """
    model = case.build()
    rules = case.rules_of(model) or {}
    in_pieces = any(isinstance(rule, Rule) and rule.kind == "sequence" for rule in rules.values())
    in_chunks = case.options.mode != "exact" and _computes_loss_in_chunks(case.loss, model)
    rows = rows_of(case.batches[0][0])
    plans = plans_on(ranks, plan, rows, in_pieces=in_pieces, in_chunks=in_chunks)
    outcomes = _launch(partial(verify_plans, case, plans, report_progress), case, ranks, threads)
    results: list[tuple[Plan, VerificationReport | RefusedPlan]] = []
    for number, one in enumerate(plans):
        of_ranks = [every[number] for every in outcomes]
        refused = [outcome for outcome in of_ranks if isinstance(outcome, RefusedPlan)]
        found = [outcome for outcome in of_ranks if not isinstance(outcome, RefusedPlan)]
        results.append((one, refused[0] if refused else build_report(found, one, case.options)))
    return Sweep(ranks, tuple(results))


def _computes_loss_in_chunks(loss: Loss, model: nn.Module) -> bool:
    """Return whether plans with `loss_rows` can run, but for what only a run of the last layer shows."""
    last = sequence_of(model).layers[-1]
    try:
        require_cross_entropy(loss, 1)
        output_linear_name(last, {}, 1)
    except PlanError:
        return False
    return True


def _launch(function: Callable[[], Result], case: Case, ranks: int, threads: int | None) -> list[Result]:
    return launch(
        function,
        ranks=ranks,
        threads=threads,
        timeout=case.timeout,
        device=case.device,
        ranks_as=case.ranks_as,
    )
