"""GPT-2 over every layout: every gradient, loss, norm, and the parameters after three steps."""

import pytest

from parity.cases import ONE_STAGE, gpt2
from parity.pairs import covering_rows, every_row
from parity.parity import check_parity
from plait.plan.plan import Plan

FACTORS = {
    "microbatches": (1, 2, 3, 4, 5),
    "schedule": ONE_STAGE,
    "pp": (1, 2, 4),
    "dp": (1, 2, 4),
    "layers": (2, 3),
    "tied": (True, False),
}


def fits(row):
    """On four ranks."""
    return row.get("pp", 1) * row.get("dp", 1) <= 4


DEGREES = every_row({name: FACTORS[name] for name in ("pp", "dp", "tied")}, fits)
"""Each of them stands in some row, besides every pair."""
COVERING = covering_rows(FACTORS, fits, DEGREES)
PLANS = every_row({name: FACTORS[name] for name in ("microbatches", "schedule", "pp", "dp")}, fits)
REST = [row for row in covering_rows(FACTORS, fits, PLANS) if row not in COVERING]


def identify(row):
    degrees, tied = f"pp{row['pp']}-dp{row['dp']}", "tied" if row["tied"] else "untied"
    return f"{degrees}-{row['schedule']}-m{row['microbatches']}-{row['layers']}blocks-{tied}"


def check(thread_ranks, row):
    kept = {name: row[name] for name in ("pp", "dp", "schedule", "microbatches")}
    check_parity(thread_ranks, gpt2(layers=row["layers"], tied=row["tied"]), Plan(**kept, precision="fp64"))


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("row", COVERING, ids=identify)
def test_gpt2_equals_one_rank_for_every_pair_of_factors(thread_ranks, row):
    check(thread_ranks, row)


@pytest.mark.full
@pytest.mark.parametrize("row", REST, ids=identify)
def test_gpt2_equals_one_rank_for_every_other_row(thread_ranks, row):
    check(thread_ranks, row)
