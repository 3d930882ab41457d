"""Are they equal? Every number of every rank against the single device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from parity import reference, woven
from parity.case import Case, Recipe
from parity.norm import TOLERANCE, assert_close, assert_equal
from parity.outcome import Outcome
from plait.comm.pool import RankPool
from plait.plan import Plan

THREE_STEPS = Recipe()


def check_parity(
    pool: RankPool, case: Case, plan: Plan, recipe: Recipe = THREE_STEPS, defect: woven.Defect = nullcontext
) -> None:
    """Run `recipe` on both sides and compare all that it gives. AssertionError says what differs."""
    dtype = woven.DTYPES[plan.precision]
    expected = reference.train(case, woven.global_rows(plan), recipe, dtype)
    ranks = pool.run(woven.train, case, plan, recipe, defect, ranks=plan.world)
    compare(ranks, expected, dtype)


def compare(ranks: Sequence[Outcome], expected: Outcome, dtype: torch.dtype) -> None:
    """What all ranks of one run gave against the single device."""
    tolerance = TOLERANCE[dtype]
    gradients = merged([outcome.gradients for outcome in ranks], "gradient")
    assert_equal(gradients, expected.gradients, tolerance, "the gradient")
    for rank, outcome in enumerate(ranks):
        assert outcome.losses == ranks[0].losses, f"rank {rank} has another loss than rank 0"
        assert outcome.norms == ranks[0].norms, f"rank {rank} has another norm than rank 0"
    parameters = merged([outcome.parameters for outcome in ranks], "parameter")
    for step, (actual, wanted) in enumerate(zip(ranks[0].losses, expected.losses, strict=True)):
        assert_close(actual, wanted, tolerance, f"the loss of call {step}")
    for step, (actual, wanted) in enumerate(zip(ranks[0].norms, expected.norms, strict=True)):
        assert_close(actual, wanted, tolerance, f"the gradient norm of step {step}")
    if dtype == torch.float64:  # AdamW divides by the gradient, so float32's rounding can be a whole step
        assert_equal(parameters, expected.parameters, tolerance, "the value")


def merged(ranks: Sequence[Mapping[str, Tensor]], what: str) -> dict[str, Tensor]:
    """One tensor per name; all ranks that hold it must hold the same bits."""
    whole: dict[str, Tensor] = {}
    for rank, held in enumerate(ranks):
        for name, tensor in held.items():
            first = whole.setdefault(name, tensor)
            assert torch.equal(first, tensor), f"rank {rank} holds another {what} of {name} than others do"
    return whole
