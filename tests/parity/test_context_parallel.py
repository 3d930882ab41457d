"""Context parallelism over pp × dp × cp × tp: every gradient, loss, norm, and the parameters afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from parity.case import Case, Recipe
from parity.cases import gpt2, llama
from parity.contexts import mixing, packed
from parity.pairs import a_third_compiled, covering_rows, in_quick
from parity.parity import THREE_STEPS, TWO_STEPS, check_parity
from parity.rows import name_of
from parity.sequence_parts import of_length
from plait.plan.plan import Plan


def of_tokens(case: Case) -> Callable[[int], Case]:
    """The case by length."""
    return partial(of_length, case)


FAMILIES: dict[str, Callable[[int], Case]] = {
    "gpt2": of_tokens(gpt2(hidden=24, heads=12)),
    "llama-shared": of_tokens(llama(heads=12, kv_heads=6)),
    "llama-one": of_tokens(llama(heads=12, kv_heads=1)),
    "window": partial(mixing, window=3),
    "both-sides": partial(mixing, causal=False, kv_heads=2),
    "both-sides-window": partial(mixing, causal=False, window=2),
    "packed-gpt2": partial(packed, gpt2(hidden=24, heads=12)),
    "packed-llama": partial(packed, llama(heads=12, kv_heads=4)),
    "packed-window": lambda length: packed(mixing(length, window=3), length),
}
WITHOUT_RULES = {"window", "both-sides", "both-sides-window", "packed-window"}
HEADS = {"window": 6, "both-sides": 6, "both-sides-window": 6, "packed-window": 6}
FACTORS = {
    "family": tuple(FAMILIES),
    "cp": (2, 3, 4),
    "method": ("ring", "ulysses"),
    "layout": ("zigzag", "striped", "contiguous"),
    "length": (8, 7, 3),
    "tensor": ((1, "none"), (1, "keep"), (2, "none"), (2, "keep"), (2, "regather")),
    "pipeline": ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1")),
    "data": ((1, "none", "last"), (2, "none", "last"), (1, "full", "each"), (2, "full", "last")),
    "recompute": ("none", "selective", "full"),
}
"""`tensor`: tp and sequence_parallel. 3 positions leave ranks without any."""


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks, with as many heads as Ulysses needs."""
    tp, family, cp = row.get("tensor", (1,))[0], row.get("family"), row.get("cp", 2)
    if family in WITHOUT_RULES and tp > 1:
        return False
    heads = HEADS.get(family or "", 12) // tp
    if row.get("method") == "ulysses" and heads % cp:
        return False
    return bool(row.get("pipeline", (1,))[0] * row.get("data", (1,))[0] * tp * cp <= 8)


COVERING = covering_rows(FACTORS, fits)
REST = [row for row in covering_rows(FACTORS, fits, strength=3) if row not in COVERING]
"""All other triples."""


def check(thread_ranks: Any, row: dict[str, Any], recipe: Recipe) -> None:
    fields = dict(row)
    case = FAMILIES[fields.pop("family")](fields.pop("length"))
    (pp, schedule), (dp, strategy, reduce) = fields.pop("pipeline"), fields.pop("data")
    tp, mode = fields.pop("tensor")
    fields |= {"pp": pp, "schedule": schedule, "dp": dp, "strategy": strategy, "reduce": reduce}
    fields |= {"tp": tp, "sequence_parallel": mode}
    fields |= {"context_parallel": fields.pop("method"), "context_layout": fields.pop("layout")}
    check_parity(thread_ranks, case, Plan(**fields, microbatches=2, precision="fp64"), recipe)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("row", COVERING, ids=name_of)
def test_context_parallel_runs_equal_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, TWO_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(REST), ids=name_of)
def test_context_parallel_runs_equal_one_rank_for_every_triple_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check(thread_ranks, row, THREE_STEPS)


@pytest.mark.parametrize(
    ("family", "compile"),
    in_quick(
        product(("packed-gpt2", "packed-llama", "packed-window"), (False, "graphs")),
        *(("packed-gpt2", False), ("packed-window", False), ("packed-llama", "graphs")),
    ),
)
def test_one_rank_on_packed_documents_equals_plain_pytorch(
    thread_ranks: Any, family: str, compile: Any
) -> None:
    plan = Plan(microbatches=2, precision="fp64", compile=compile)
    check_parity(thread_ranks, FAMILIES[family](7), plan)
