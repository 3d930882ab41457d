"""Are they equal? Every number of every rank against the single device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from parity import reference, woven
from parity.case import Case, Recipe
from parity.norm import TOLERANCE, assert_close, assert_equal
from parity.outcome import Outcome
from plait.plan.layout import Coordinate, Layout, assemble
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

TWO_STEPS = Recipe(steps=2)
"""The second shows what the first one leaves: the optimizer's state, buffers that are used again."""
THREE_STEPS = Recipe()
"""Of the full products."""


def check_parity(
    pool: RankPool, case: Case, plan: Plan, recipe: Recipe = TWO_STEPS, defect: woven.Defect = nullcontext
) -> None:
    """Run `recipe` on both sides and compare all that it gives. AssertionError says what differs."""
    dtype = woven.DTYPES[plan.precision]
    expected = reference.train(case, woven.global_rows(plan), recipe, dtype)
    ranks = pool.run(woven.train, case, plan, recipe, defect, ranks=plan.world)
    compare(ranks, expected, dtype)


def compare(ranks: Sequence[Outcome], expected: Outcome, dtype: torch.dtype) -> None:
    """What all ranks of one run gave against the single device."""
    tolerance = TOLERANCE[dtype]
    gradients = merged(ranks, "gradients")
    assert_equal(gradients, expected.gradients, tolerance, "the gradient")
    for rank, outcome in enumerate(ranks):
        assert outcome.losses == ranks[0].losses, f"rank {rank} has another loss than rank 0"
        assert outcome.norms == ranks[0].norms, f"rank {rank} has another norm than rank 0"
    parameters = merged(ranks, "parameters")
    for step, (actual, wanted) in enumerate(zip(ranks[0].losses, expected.losses, strict=True)):
        assert_close(actual, wanted, tolerance, f"the loss of call {step}")
    for step, (actual, wanted) in enumerate(zip(ranks[0].norms, expected.norms, strict=True)):
        assert_close(actual, wanted, tolerance, f"the gradient norm of step {step}")
    if dtype == torch.float64:  # AdamW divides by the gradient, so float32's rounding can be a whole step
        assert_equal(parameters, expected.parameters, tolerance, "the value")


def merged(ranks: Sequence[Outcome], what: Literal["gradients", "parameters"]) -> dict[str, Tensor]:
    """The whole tensor of each name; all ranks that hold the same part must hold the same bits."""
    parts: dict[str, dict[Coordinate, Tensor]] = {}
    layouts: dict[str, Layout] = {}
    for rank, outcome in enumerate(ranks):
        for name, tensor in getattr(outcome, what).items():
            layout = layouts.setdefault(name, outcome.layouts[name])
            place = layout.coordinate(outcome.coordinate)
            first = parts.setdefault(name, {}).setdefault(layout.replicas(place)[0], tensor)
            assert torch.equal(first, tensor), (
                f"rank {rank} holds another {what[:-1]} of {name} than others do"
            )
            parts[name][place] = tensor
    return {name: assemble(held, layouts[name]) for name, held in parts.items()}
