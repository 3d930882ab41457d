"""While rank 0 runs the reference the others wait for it, step by step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from verification_cases import mlp_case

from plait.errors import CommunicationError, ModelError
from plait.plan.plan import Plan
from plait.ranks import Mesh
from plait.verification import rank_verification as rank
from plait.verification.reference.reference_layers import failure_named


def test_a_lost_rank_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further barrier would take another timeout."""
    waits = []

    def lost(*arguments: Any, **options: Any) -> Any:
        waits.append("a timeout")
        raise CommunicationError("rank 1 is gone")

    monkeypatch.setattr(rank, "barrier", lost)
    with (
        pytest.raises(CommunicationError, match="rank 1 is gone"),
        rank._barrier_per_scope(Mesh(), 3) as tick,
    ):
        tick()
    assert len(waits) == 1


@pytest.mark.parametrize("done", [0, 1, 3])
def test_each_rank_waits_as_often_and_an_error_is_raised_after_that(
    monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    waits: list[object] = []
    monkeypatch.setattr(rank, "barrier", lambda group, checked: waits.append(checked) or Waited())
    for error in (None, ModelError("it is NaN")):
        with pytest.raises(ModelError, match="it is NaN") if error else nullcontext():
            fail_after(done, error)
    assert waits == [False] * 6


def fail_after(done: int, error: ModelError | None) -> None:
    with rank._barrier_per_scope(Mesh(), 3) as tick:
        for _ in range(done):
            tick()
        if error is not None:
            raise error


class Waited:
    """The handle of an operation that is done."""

    def wait(self) -> None:
        pass


def test_plans_with_the_same_micro_batches_share_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    right, made = rank.record, []

    def counted(*arguments: Any) -> Any:
        made.append(arguments[-2])
        return right(*arguments)

    monkeypatch.setattr(rank, "record", counted)
    case, recordings = mlp_case(steps=1), {}
    plans = [Plan(microbatches=2), Plan(microbatches=4), Plan(microbatches=2, recompute="full")]
    for plan in (*plans, Plan(microbatches=2, loss_rows=2)):
        assert not rank.verify_rank(case, plan, recordings).findings.differences
    assert made == [2, 4, 2]  # the last computes logits in the loss, whose input is recorded
    assert [key[0] for key in recordings] == [2, 4, 2]
    rank.verify_rank(case, plans[0])
    assert len(made) == 4


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("  a line\nand another"), "3 fails on a single device, ValueError: a line"),
        (KeyError(), "3 fails on a single device, KeyError: no message"),
        (
            RuntimeError("expected dtype Half"),
            "expected dtype Half (it keeps tensors of another dtype: try mode",
        ),
        (
            RuntimeError("a meta tensor"),
            "a meta tensor (it meets a tensor that a trial run of a layer has left",
        ),
        (ModelError("is one sentence"), "is one sentence"),
    ],
)
def test_an_exception_of_the_reference_names_the_layer(error: Exception, told: str) -> None:
    with pytest.raises(ModelError) as caught, failure_named("3"):
        raise error
    assert told in str(caught.value)
    assert ("fails" in str(caught.value)) is not isinstance(error, ModelError)
