"""Every policy on real ranks: several stages a rank, in loops and in a v, with every strategy."""

from __future__ import annotations

from typing import Any

import pytest

from parity.case import Recipe
from parity.cases import USER_CASES, gpt2, llama
from parity.pairs import a_third_compiled, covering_rows, in_turns
from parity.parity import THREE_STEPS, TWO_STEPS, check_parity
from parity.rows import name_of, plan_of
from parity.woven import layer_count
from plait.plan.plan import Plan
from plait.schedules.search.schedule_by_policy import POLICY_NAMES

FACTORS = {
    "schedule": ("interleaved", "zb-v", "v-half", "v-min"),
    "model": ((1, 1), (2, 1), (4, 1), (2, 2)),
    "data": ((1, 1), (2, 1), (2, 2)),
    "tied": (True, False),
    "microbatches": (1, 2, 4, 5),
    "strategy": ("none", "optimizer", "gradients", "full"),
    "reduce": ("last", "each"),
    "recompute": ("none", "selective", "full"),
}
"""`model`: pp and tp; `data`: dp and replicate."""
DEEP_CASES = [case for case in USER_CASES if layer_count(case) >= 4]


def allowed(row: dict[str, Any]) -> bool:
    (pp, tp), (dp, _) = row.get("model", (1, 1)), row.get("data", (1, 1))
    return pp * tp * dp <= 4


def differs(row: dict[str, Any]) -> bool:
    """Whether no row with fewer settings runs the same: strategies are of two ranks with shards.

    When gradients are reduced is tried without recomputation, with the strategies for which it is a choice.
    """
    (pp, tp), reduce = row.get("model", (1, 1)), row.get("reduce", "last")
    if (row.get("strategy", "none"), reduce) == ("none", "last"):
        return allowed(row)
    chosen = reduce == "last" or row.get("strategy", "full") in ("gradients", "full")
    once = reduce == "last" or row.get("recompute", "none") == "none"
    return chosen and once and row.get("data", (2, 1)) == (2, 1) and pp * tp <= 2


TRIPLES = covering_rows({**FACTORS, "schedule": POLICY_NAMES}, differs, strength=3)


def check(thread_ranks: Any, row: dict[str, Any], recipe: Recipe) -> None:
    plan = plan_of({name: value for name, value in row.items() if name != "tied"})
    family = llama if plan.tp > 1 else gpt2
    check_parity(thread_ranks, family(layers=3, tied=row["tied"]), plan, recipe)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_schedules_train_as_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, TWO_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(TRIPLES), ids=name_of)
def test_schedules_train_as_one_rank_for_every_triple_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, THREE_STEPS)


@pytest.mark.parametrize(
    ("case", "schedule"),
    in_turns(
        {case.name: case for case in USER_CASES if layer_count(case) >= 4},
        {"interleaved": {"schedule": "interleaved", "chunks": 2}, "zb-v": {"schedule": "zb-v"}},
    ),
)
def test_schedules_train_users_models_as_one_rank(
    thread_ranks: Any, case: Any, schedule: dict[str, Any]
) -> None:
    plan = Plan(pp=2, **schedule, microbatches=4, precision="fp64")
    check_parity(thread_ranks, case, plan)


@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        pytest.param(
            Plan(pp=2, dp=2, schedule="auto", microbatches=3, strategy="full", precision="fp64"),
            False,
            id="sharded",
        ),
        pytest.param(
            Plan(pp=4, schedule="auto", microbatches=4, memory_limit=3, precision="fp64"),
            True,
            id="limited",
            marks=pytest.mark.full,
        ),
    ],
)
def test_schedules_found_by_auto_train_as_one_rank(thread_ranks: Any, plan: Plan, tied: bool) -> None:
    check_parity(thread_ranks, gpt2(layers=3, tied=tied), plan)


def test_llama_on_eight_ranks_in_zb_v_trains_as_one_rank(thread_ranks: Any) -> None:
    plan = Plan(
        pp=2, tp=2, dp=2, schedule="zb-v", microbatches=3, strategy="full", reduce="each", precision="fp64"
    )
    check_parity(thread_ranks, llama(layers=2), plan)


def test_interleaved_with_four_chunks_trains_as_one_rank(thread_ranks: Any) -> None:
    plan = Plan(pp=2, schedule="interleaved", chunks=4, microbatches=4, precision="fp64")
    check_parity(thread_ranks, gpt2(layers=3), plan)
