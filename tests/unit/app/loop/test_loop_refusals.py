"""What the loop refuses while it runs, and callbacks, data and metrics that it cannot use."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import plait
from plait.app.loop.builtin_callbacks import ReplicaChecks
from plait.app.loop.meter import StepMetrics
from plait.app.loop.training_loop import TrainingLoop
from plait.app.loop.validation import Validation, ValidationRows
from plait.errors import ConfigError, DataError, NonFiniteError, ReplicaError

ROWS: Any = SimpleNamespace(size=4, rows=0, batch=lambda step, rows: None)


class Source:
    """Samples that no position leads to."""

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        raise AssertionError


REFUSED: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "the validation data have 0 rows: give at least one, or no validation.": (
        lambda: ValidationRows(ROWS),
        DataError,
    ),
    "Validation's metrics is an object of int: give a dictionary of functions.": (
        lambda: Validation(SimpleNamespace(size=1, batch=lambda step, rows: None), metrics=3),  # type: ignore
        ConfigError,
    ),
    "a stream's collate is 3: give a function of a list of samples.": (
        lambda: plait.Stream(Source(), batch=4, collate=3),  # type: ignore[arg-type]
        DataError,
    ),
}


def test_callbacks_data_and_metrics_that_cannot_be_used_are_refused() -> None:
    for said, (make, kind) in REFUSED.items():
        with pytest.raises(kind) as refusal:
            make()
        assert str(refusal.value) == said


def numbers(
    loss: float, norm: float, *, loss_rank: int = 4, gradient_rank: int = 4, **of: Any
) -> StepMetrics:
    row = {"step": 7, "loss": loss, "grad_norm": norm, "trained_tokens": of.pop("trained", 5)}
    return StepMetrics(row, 0, loss_rank, gradient_rank, of.pop("norm_ranks", ()), (0.0,) * 4, (0,) * 4)


def said_of(given: StepMetrics, *, scale: float = 1.0, adapts: bool = False) -> str:
    """What the loop says of a step on four ranks with two stages each; "" where it goes on."""
    schedule = SimpleNamespace(stages=4, stages_of=lambda pp: (pp, 3 - pp))
    mesh = SimpleNamespace(size=lambda axis: 4, coordinate_of=lambda rank: {"pp": rank % 2, "dp": rank // 2})
    engine = SimpleNamespace(schedule=schedule, adapts_loss_scale=adapts, loss_scale=scale)
    run: Any = SimpleNamespace(mesh=mesh, engine=engine, advice="lower it")
    try:
        TrainingLoop._refuse_non_finite(run, 6, given)
    except (NonFiniteError, DataError) as error:
        return str(error)
    return ""


def test_a_non_finite_loss_or_norm_is_reported_with_rank_and_stage() -> None:
    end = ": lower it, or look at the data of that step."
    nan, inf = math.nan, math.inf
    for given, said in (
        (numbers(2.0, 3.0), ""),
        (numbers(nan, 3.0, loss_rank=3), f"step 7: the loss is nan on rank 3, stage 3{end}"),
        (numbers(inf, inf), f"step 7: the loss is inf on rank 0, stage 3{end}"),
        (
            numbers(2.0, inf, gradient_rank=1, norm_ranks=(0, 1, 2, 3)),
            f"step 7: the gradient norm is inf on rank 1, stages 1 and 2{end}",
        ),
        (
            numbers(2.0, nan, gradient_rank=4),
            f"step 7: the gradient norm is nan on rank 0, stages 0 and 3{end}",
        ),
    ):
        assert said_of(given) == said
    assert "step 7: none of the batch's targets counts, all are -100" in said_of(numbers(nan, 0.0, trained=0))
    assert said_of(numbers(2.0, inf), adapts=True) == "", "the scale is lowered"
    assert said_of(numbers(2.0, inf), adapts=True, scale=0.5).startswith("step 7: the gradient norm is inf")
    assert said_of(numbers(nan, inf), adapts=True).startswith("step 7: the loss is nan")
    of_some = "step 7: the gradient norm is not finite on rank {}, and is on rank {}, whose replica"
    for gradient_rank, ranks, said in ((2, (1, 2), (2, 0)), (3, (0, 1), (0, 2))):
        given = numbers(2.0, inf, gradient_rank=gradient_rank, norm_ranks=ranks)
        assert said_of(given, adapts=True).startswith(of_some.format(*said))


def test_differing_replicas_are_reported_with_the_step() -> None:
    def differs(optimizer: object) -> None:
        raise ReplicaError(f"{optimizer} differs.")

    run: Any = SimpleNamespace(optimizer="it", engine=SimpleNamespace(check_replicas=differs))
    checks = ReplicaChecks(3)
    for step in (1, 2, 4):
        checks.measured(run, {"step": step})
    with pytest.raises(ReplicaError, match=r"^step 6: it differs\.$"):
        checks.measured(run, {"step": 6.0})
    ReplicaChecks(0).measured(run, {"step": 0})


def test_without_a_schedule_the_reported_learning_rate_is_that_of_the_first_group() -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    run: Any = SimpleNamespace(_rate=None, optimizer=SimpleNamespace(param_groups=groups))
    assert TrainingLoop.learning_rate(run, 3) == 0.5
    run._rate = lambda step: step / 8
    assert TrainingLoop.learning_rate(run, 3) == 0.375
