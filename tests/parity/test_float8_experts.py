"""Experts in float8: every layout has the numbers of one rank, whatever its micro-batches and its recipe.

In fp64 products are summed in fp64, so that no value crosses a border between two numbers of eight bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import woven
from parity.cases import GPT2_CONTEXT, sparse_llama
from parity.norm import assert_equal
from parity.pairs import covering_rows, in_quick
from parity.parity import TWO_STEPS, compare
from parity.rows import name_of
from plait.plan.plan import Plan
from plait.tensor.experts import expert_casts
from plait.tensor.float8.cast import ScaledMatrix

RECIPE = "float8-rowwise-gw"


sparse = partial(sparse_llama, wide=True, experts=4, shared=0)


FACTORS: dict[str, tuple[Any, ...]] = {
    "experts": ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)),
    "shared": (0, 32),
    "linears": ("float8", RECIPE),
    "tp": (1, 2),
    "cp": (1, 2),
    "sequence_parallel": ("none", "keep", "regather"),
    "pipeline": ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1")),
    "data": ((1, "none", "last"), (2, "none", "last"), (2, "full", "each")),
    "recompute": ("none", "selective", "full"),
    "compile": (False, "graphs"),
}
"""`experts`: ep and etp; `data`: dp, strategy and reduce."""


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks, of which those of a stage hold the experts."""
    in_stage = row.get("data", (2,))[0] * row.get("tp", 2) * row.get("cp", 2)
    ep, etp = row.get("experts", (1, 1))
    divided = row.get("tp", 2) > 1 or row.get("sequence_parallel", "none") == "none"
    ranks = row.get("pipeline", (1,))[0] * row.get("data", (1,))[0] * row.get("tp", 1) * row.get("cp", 1)
    return ranks <= 8 and divided and in_stage % (ep * etp) == 0


@pytest.mark.parametrize("row", covering_rows(FACTORS, fits), ids=name_of)
def test_every_layout_of_experts_equals_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    fields = dict(row)
    case = sparse(shared=fields.pop("shared"))
    (ep, etp), (pp, schedule) = fields.pop("experts"), fields.pop("pipeline")
    dp, strategy, reduce = fields.pop("data")
    fields |= {"pp": pp, "schedule": schedule, "dp": dp, "strategy": strategy, "reduce": reduce}
    plan = Plan(**fields, ep=ep, etp=etp, microbatches=2, precision="fp64")
    alone = Plan(precision="fp64", linears=plan.linears, microbatches=plan.dp * plan.microbatches)
    (expected,) = thread_ranks.run(woven.train, case, alone, TWO_STEPS, ranks=1)
    compare(thread_ranks.run(woven.train, case, plan, TWO_STEPS, ranks=plan.world), expected, torch.float64)


def test_row_by_row_no_number_depends_on_the_micro_batches(thread_ranks: Any) -> None:
    """With a scale for each row in linears, too: four micro-batches have the gradients of one."""
    plans = (Plan(microbatches=number, linears=RECIPE, precision="fp64") for number in (1, 4))
    (one,), (four,) = (thread_ranks.run(gradients_of_four_rows, plan, ranks=1) for plan in plans)
    assert_equal(four, one, 1e-12, "the gradient")


def gradients_of_four_rows(plan: Plan) -> dict[str, Tensor]:
    engine = woven.weave(sparse(), plan)
    ((inputs, targets),) = sparse().batches(4, 1, torch.float32)
    engine.forward_backward(inputs, targets)
    return {name: gradient.clone() for name, gradient in engine.named_gradients()}


@pytest.mark.parametrize("tokens", in_quick((2, 8), 2))
def test_experts_without_tokens_are_cut_like_others(thread_ranks: Any, tokens: int) -> None:
    """Some ranks of ep get no token at all; those of etp agree on that."""
    case = sparse(experts=16)
    draw = partial(_first_tokens, case.draw, tokens)
    plan = Plan(dp=4, ep=2, etp=2, linears=RECIPE, precision="fp64")
    alone = replace(plan, dp=1, ep=1, etp=1, microbatches=4)
    case = replace(case, name=f"{case.name}, {tokens} tokens", draw=draw)
    (expected,) = thread_ranks.run(woven.train, case, alone, TWO_STEPS, ranks=1)
    compare(thread_ranks.run(woven.train, case, plan, TWO_STEPS, ranks=4), expected, torch.float64)


def _first_tokens(draw: Callable[..., Any], count: int, rows: int, generator: torch.Generator) -> Any:
    inputs, targets = draw(rows, generator)
    return inputs[:, :count], targets[:, :count].contiguous()


def factors_of(plan: Plan) -> list[Tensor]:
    """The factors of one step's rows and weights, in the order of the casts."""
    found, original = list[Tensor](), expert_casts.factor_of

    def factor_of(*given: Any) -> Tensor:
        found.append(original(*given))
        return found[-1]

    engine = woven.weave(sparse(), plan)
    ((inputs, targets),) = sparse().batches(4, 1, torch.float32)
    rows = slice(4 // plan.dp * engine.mesh.index("dp"), 4 // plan.dp * (engine.mesh.index("dp") + 1))
    expert_casts.factor_of = factor_of  # type: ignore[assignment]
    try:
        engine.forward_backward(inputs[rows], targets[rows])
    finally:
        expert_casts.factor_of = original
    return found


def not_reduced(plan: Plan) -> list[Tensor]:
    """The factors where each rank takes the largest values of what it holds."""
    original = expert_casts.reduced
    expert_casts.reduced = lambda largest, _: largest  # type: ignore[assignment]
    try:
        return factors_of(plan)
    finally:
        expert_casts.reduced = original


def test_ranks_that_hold_parts_of_a_row_cast_it_by_one_scale(rank_pool: Any) -> None:
    plan = Plan(dp=2, etp=2, linears=RECIPE, precision="fp64")
    one, other = rank_pool.run(factors_of, plan, ranks=2)
    # Of each of two layers: rows and weights of two matrices, forward and backward.
    assert len(one) == len(other) == 2 * 2 * 2 * 2
    differing = [
        number for number, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)
    ]
    # What each rank has whole: output features of gate and up, of each layer, are other ones.
    assert differing == [1, 5]
    one, other = rank_pool.run(not_reduced, plan, ranks=2)
    assert any(
        not torch.equal(a, b)
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        if number not in differing
    )


def step_of_three_rows(plan: Plan) -> None:
    ((inputs, targets),) = sparse().batches(3, 1, torch.float32)
    woven.weave(sparse(), plan).forward_backward(inputs, targets)


def test_matrices_of_experts_are_cast_once_a_step_unless_they_are_freed_after_each_use(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of gate and up, and of down, in two layers, for outputs and for input gradients."""
    original, casts = expert_casts.cast_by, list[str]()

    def cast_by(matrix: Tensor, *how: Any) -> ScaledMatrix:
        if matrix.dim() == 3:
            casts.append(current_thread().name)
        return original(matrix, *how)

    monkeypatch.setattr(expert_casts, "cast_by", cast_by)
    plan = Plan(linears=RECIPE, precision="bf16", microbatches=3)
    for one, expected in ((plan, 8), (replace(plan, dp=2, strategy="full"), 3 * 8)):
        casts.clear()
        thread_ranks.run(step_of_three_rows, one, ranks=one.world)
        assert [*Counter(casts).values()] == [expected] * one.world


def etp_bytes(plan: Plan) -> dict[str, int]:
    """The bytes of a step over etp, by collective."""
    engine = woven.weave(sparse(), plan)
    ((inputs, targets),) = sparse().batches(2, 1, torch.float32)
    engine.forward_backward(inputs, targets)
    return {kind: count.bytes for kind, count in engine.traffic().get("etp", {}).items()}


@pytest.mark.parametrize("microbatches", in_quick((1, 2), 2))
def test_etp_reduces_four_bytes_a_row_and_those_of_weights_once_a_step(
    thread_ranks: Any, microbatches: int
) -> None:
    plan = Plan(tp=2, etp=2, linears=RECIPE, precision="bf16", microbatches=microbatches)
    layers, experts, hidden, rows = 2, 4, 32, 2 * GPT2_CONTEXT * 2
    per_row = 2 * rows  # of the inputs of `down`, and of the gradients of gate and up
    of_weights = experts * hidden + experts + experts  # rows of `down`; one of both for the input gradient
    for found in thread_ranks.run(etp_bytes, plan, ranks=2):
        assert found == {"all_reduce": 4 * layers * (per_row + of_weights)}


def losses_after_weights_changed(steps: int) -> tuple[float, float]:
    """In an evaluation and a step, of weights of experts that were changed after so many steps."""
    plan = Plan(linears=RECIPE, precision="fp64")
    engine = woven.weave(sparse(), plan)
    ((inputs, targets),) = sparse().batches(2, 1, torch.float64)
    for _ in range(steps):
        engine.forward_backward(inputs, targets)
        for parameter in engine.parameters():
            parameter.grad = None
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            if "experts" in name:
                parameter.mul_(3.7)
    return engine.evaluate(inputs, targets).item(), engine.forward_backward(inputs, targets).item()


def test_scales_of_experts_are_those_of_their_weights_in_each_step(thread_ranks: Any) -> None:
    (expected,) = thread_ranks.run(losses_after_weights_changed, 0, ranks=1)
    assert thread_ranks.run(losses_after_weights_changed, 1, ranks=1) == [expected]
