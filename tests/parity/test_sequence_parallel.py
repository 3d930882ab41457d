"""Sequence parallelism over pp × dp × tp: every gradient, loss, norm, and the parameters after all steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import sequence_parts, woven
from parity.case import Case, Recipe
from parity.cases import gpt2, llama
from parity.norm import TOLERANCE, assert_close, assert_equal
from parity.pairs import a_third_compiled, covering_rows, every_row
from parity.parity import THREE_STEPS, TWO_STEPS, check_parity
from parity.reference import materialise
from parity.rows import name_of
from parity.sequence_parts import of_length
from plait.plan.plan import Plan

FAMILIES = {
    "gpt2": partial(gpt2, hidden=24, heads=12),
    "llama": partial(llama, heads=12, kv_heads=12),
    "llama-one": partial(llama, heads=12, kv_heads=1),
}
"""In the last all ranks hold the same head of keys and values."""
FACTORS = {
    "family": tuple(FAMILIES),
    "sequence_parallel": ("keep", "regather"),
    "tp": (2, 3, 4),
    "pipeline": ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1"), (2, "zb-v")),
    "data": ((1, "none", "last"), (2, "none", "last"), (2, "full", "last"), (2, "full", "each")),
    "recompute": ("none", "selective", "full"),
    "tied": (True, False),
    "length": (8, 7, 1),
}
"""`data`: dp, strategy and reduce. 7 is uneven; of a single position all ranks but one have none."""
MODES = ("keep", "regather")


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks."""
    return row.get("pipeline", (1,))[0] * row.get("data", (1,))[0] * row.get("tp", 1) <= 8


COVERING = covering_rows(FACTORS, fits)
REST = [row for row in covering_rows(FACTORS, fits, strength=3) if row not in COVERING]
"""All other triples."""


def check(thread_ranks: Any, row: dict[str, Any], recipe: Recipe) -> None:
    fields = dict(row)
    case = of_length(FAMILIES[fields.pop("family")](tied=fields.pop("tied")), fields.pop("length"))
    (pp, schedule), (dp, strategy, reduce) = fields.pop("pipeline"), fields.pop("data")
    fields |= {"pp": pp, "schedule": schedule, "dp": dp, "strategy": strategy, "reduce": reduce}
    check_parity(thread_ranks, case, Plan(**fields, microbatches=2, precision="fp64"), recipe)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("row", COVERING, ids=name_of)
def test_sequence_parallel_runs_equal_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, TWO_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(REST), ids=name_of)
def test_sequence_parallel_runs_equal_one_rank_for_every_triple_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, THREE_STEPS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 2), (4, 2)])
def test_sequence_parallelism_with_key_heads_shared_by_ranks_equals_one_rank(
    thread_ranks: Any, tp: int, kv_heads: int, mode: Any
) -> None:
    """Two neighbours of four hold the same head: their sum is over them, that of norms over all."""
    case = of_length(llama(heads=4, kv_heads=kv_heads), 3)
    check_parity(thread_ranks, case, Plan(tp=tp, microbatches=2, sequence_parallel=mode, precision="fp64"))


# ── models of other kinds ──

OTHERS = {
    "floats": sequence_parts.numbers,
    "mixed": partial(sequence_parts.tokens, sequence_parts.mixed),
    "mask": partial(sequence_parts.tokens, sequence_parts.with_a_mask),
    "length-first": partial(sequence_parts.tokens, sequence_parts.length_first),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp3": {"tp": 3, "recompute": "full"},
    "tp4-selective": {"tp": 4, "recompute": "selective"},
    "pp2": {"tp": 2, "pp": 2, "schedule": "zb-h1"},
    "dp2": {"tp": 2, "dp": 2, "strategy": "full", "reduce": "each"},
}


OTHER_FACTORS = {"name": tuple(OTHERS), "layout": tuple(LAYOUTS), "mode": MODES}
OTHER_COVERING = covering_rows(OTHER_FACTORS)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row in OTHER_COVERING else pytest.mark.full, id=name_of(row))
        for row in every_row(OTHER_FACTORS)
    ],
)
def test_other_models_under_sequence_parallelism_equal_one_rank(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    plan = Plan(**LAYOUTS[row["layout"]], microbatches=2, sequence_parallel=row["mode"], precision="fp64")
    check_parity(thread_ranks, OTHERS[row["name"]](5), plan)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("cut", range(1, 8))
def test_sequence_parallelism_with_stages_cut_between_any_two_layers_equals_one_rank(
    thread_ranks: Any, cut: int
) -> None:
    """From parts to whole, from whole to parts, whole to whole, and the head's."""
    plan = Plan(
        tp=2,
        pp=2,
        layers_per_stage=(cut, 8 - cut),
        microbatches=3,
        sequence_parallel="keep",
        precision="fp64",
    )
    check_parity(thread_ranks, sequence_parts.tokens(sequence_parts.mixed, 5), plan)


# ── equal bits ──

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_schedules_under_sequence_parallelism_give_the_same_bits(thread_ranks: Any, mode: Any) -> None:
    case = of_length(gpt2(tied=True), 7)
    runs = []
    for schedule in SCHEDULES:
        plan = Plan(
            pp=2,
            tp=2,
            schedule=schedule,
            layers_per_stage=(3, 3),
            microbatches=3,
            sequence_parallel=mode,
            precision="fp64",
        )
        runs.append(thread_ranks.run(woven.train, case, plan, Recipe(steps=1), ranks=4))
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert (other.losses, other.norms) == (first.losses, first.norms)
            assert other.gradients.keys() == first.gradients.keys()
            for name in first.gradients:
                assert torch.equal(other.gradients[name], first.gradients[name]), name
                assert torch.equal(other.parameters[name], first.parameters[name]), name


def train_in_a_rank(case: Case, plan: Plan) -> dict[str, Tensor]:
    """Two steps that clip, and the parameters then; `check_replicas` looks at them and at AdamW's moments."""
    engine = woven.weave(case, plan)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    for batch in woven.shares(case, engine, 2):
        engine.forward_backward(*batch)
        engine.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
    engine.check_replicas(optimizer)
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{"tp": 4}, {"tp": 2, "dp": 2, "strategy": "full"}], ids=str)
def test_unsharded_parameters_stay_the_same_on_every_rank_of_tp(
    thread_ranks: Any, settings: dict[str, Any], mode: Any
) -> None:
    case = of_length(gpt2(heads=4), 7)
    plan = Plan(**settings, microbatches=2, sequence_parallel=mode, precision="fp32")
    ranks = thread_ranks.run(train_in_a_rank, case, plan, ranks=4)
    for rank in range(0, 4, plan.tp):  # tp is the innermost axis
        for other in range(rank + 1, rank + plan.tp):
            for name in ("blocks.0.attention.norm.weight", "blocks.1.mlp.down.bias", "head.norm.bias"):
                assert torch.equal(ranks[rank][name], ranks[other][name]), name


# ── without gradients, and with those of inputs ──


def look_in_a_rank(case: Case, plan: Plan) -> tuple[float, Tensor | None]:
    engine = woven.weave(case, plan)
    ((inputs, targets),) = woven.shares(case, engine, 1)
    return engine.evaluate(inputs, targets).item(), engine.generate(inputs[:1, :3], 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
def test_evaluation_and_generation_under_sequence_parallelism_equal_one_rank(
    thread_ranks: Any, settings: dict[str, Any], mode: Any
) -> None:
    """The prompt is shorter than tp, and grows."""
    case = of_length(gpt2(heads=4), 7)
    ((loss, text),) = thread_ranks.run(look_in_a_rank, case, Plan(precision="fp64"), ranks=1)
    plan = Plan(**settings, sequence_parallel=mode, precision="fp64")
    for evaluated, generated in thread_ranks.run(look_in_a_rank, case, plan, ranks=plan.world):
        assert_close(evaluated, loss, TOLERANCE[torch.float64], "the loss")
        assert torch.equal(generated, text)


def input_gradients_in_a_rank(case: Case, plan: Plan) -> Tensor | None:
    engine = woven.weave(case, plan)
    engine.forward_backward(*woven.shares(case, engine, 1)[0], input_gradients=True)
    given: Tensor | None = engine.input_gradients()
    return given


@pytest.mark.parametrize("length", [8, 5, 1])
@pytest.mark.parametrize("settings", [{"tp": 2}, {"tp": 3}, {"tp": 2, "pp": 2}], ids=str)
def test_gradients_of_inputs_are_whole(thread_ranks: Any, settings: dict[str, Any], length: int) -> None:
    case = sequence_parts.numbers(length)
    plan = Plan(**settings, microbatches=2, sequence_parallel="keep", precision="fp64")
    ((inputs, targets),) = case.batches(woven.global_rows(plan), 1, torch.float64)
    leaf = inputs.requires_grad_()
    case.mean(materialise(case.build(), torch.float64)(leaf), targets).backward()
    for rank, given in enumerate(thread_ranks.run(input_gradients_in_a_rank, case, plan, ranks=plan.world)):
        assert (given is None) == (rank >= plan.tp)
        if given is not None:
            assert_equal({"input": given}, {"input": leaf.grad}, TOLERANCE[torch.float64], "the gradient of")
