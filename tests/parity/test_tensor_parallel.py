"""GPT-2 and Llama over pp × dp × tp: every gradient, loss, norm, and the parameters after all steps.

37 tokens are an uneven vocabulary for 2, 3 and 4 ranks.
"""

from dataclasses import replace
from functools import partial

import pytest

from parity import data
from parity.case import Case
from parity.cases import ONE_STAGE, SMOOTHED, gpt2, llama
from parity.pairs import a_third_compiled, covering_rows, every_row
from parity.parity import THREE_STEPS, TWO_STEPS, check_parity
from plait.plan.plan import Plan
from plait.tensor.losses import CrossEntropy

FAMILIES = {
    "gpt2": partial(gpt2, hidden=24, heads=12),
    "llama": partial(llama, heads=12, kv_heads=12),
    "llama-gqa": partial(llama, heads=12, kv_heads=4),
    "llama-few": partial(llama, heads=4, kv_heads=2),
    "llama-one": partial(llama, heads=12, kv_heads=1),
}
"""Heads divide by 2, 3 and 4, but where there are few: those of keys and values are then repeated."""
FACTORS = {
    "family": tuple(FAMILIES),
    "schedule": ONE_STAGE,
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "dp": (1, 2),
    "microbatches": (1, 3),
    "tied": (True, False),
    "overlap": (True, False),
}


def fits(row):
    """On eight ranks."""
    return row.get("pp", 1) * row.get("dp", 1) * row.get("tp", 1) <= 8


DEGREES = every_row({name: FACTORS[name] for name in ("pp", "dp", "tp", "overlap")}, fits)
"""Each of them stands in some row, besides every pair."""
COVERING = covering_rows(FACTORS, fits, DEGREES)
PLANS = every_row({name: FACTORS[name] for name in ("schedule", "tp", "pp", "dp", "overlap")}, fits)
REST = [row for row in covering_rows(FACTORS, fits, PLANS) if row not in COVERING]
"""Every plan, but for the number of micro-batches; with what model is chosen pair by pair."""


def identify(row):
    degrees, tied = f"pp{row['pp']}-dp{row['dp']}-tp{row['tp']}", "tied" if row["tied"] else "untied"
    overlap, compiled = "overlap" if row["overlap"] else "defer", "-compiled" * bool(row.get("compile"))
    return f"{degrees}-{row['family']}-{row['schedule']}-m{row['microbatches']}-{tied}-{overlap}{compiled}"


def check(thread_ranks, row, recipe):
    kept = {name: value for name, value in row.items() if name not in ("family", "tied")}
    check_parity(
        thread_ranks, FAMILIES[row["family"]](tied=row["tied"]), Plan(**kept, precision="fp64"), recipe
    )


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("row", COVERING, ids=identify)
def test_tensor_parallel_runs_equal_one_rank_for_every_pair_of_factors(thread_ranks, row):
    check(thread_ranks, row, TWO_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(REST), ids=identify)
def test_tensor_parallel_runs_equal_one_rank_for_every_other_row(thread_ranks, row):
    check(thread_ranks, row, THREE_STEPS)


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-one"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_tensor_parallelism_over_three_ranks_equals_one_rank(thread_ranks, family, pp, dp):
    plan = Plan(pp=pp, dp=dp, tp=3, microbatches=2, precision="fp64")
    check_parity(thread_ranks, FAMILIES[family](tied=pp == 1), plan)


def ignoring(case: Case, **loss) -> Case:
    """The case with some targets that do not count, and another loss."""

    def draw(rows, generator):
        inputs, targets = case.draw(rows, generator)
        return inputs, targets.masked_fill(targets % 5 == 0, 0)

    return replace(case, draw=draw, **loss)


@pytest.mark.parametrize("tp", [2, 4])
def test_label_smoothing_and_ignored_targets_over_tp_equal_one_rank(thread_ranks, tp):
    case = ignoring(gpt2(layers=1, heads=4), loss=SMOOTHED, mean=data.mean_smoothed)
    check_parity(thread_ranks, case, Plan(tp=tp, dp=2, microbatches=2, precision="fp64"))


def test_z_loss_over_tp_equals_one_rank(thread_ranks):
    case = ignoring(gpt2(), loss=CrossEntropy(ignore_index=0, z_loss=0.1), mean=data.mean_with_z_loss)
    check_parity(thread_ranks, case, Plan(tp=2, pp=2, microbatches=2, precision="fp64"))


def test_a_loss_of_gathered_logits_over_tp_equals_one_rank(thread_ranks):
    case = replace(gpt2(), loss=data.WholeCrossEntropy())
    check_parity(thread_ranks, case, Plan(tp=2, dp=2, microbatches=2, precision="fp64"))


def test_llama_in_fp32_over_pp_tp_and_dp_equals_one_rank(thread_ranks):
    check_parity(thread_ranks, llama(layers=1), Plan(pp=2, tp=2, dp=2, microbatches=3, precision="fp32"))
