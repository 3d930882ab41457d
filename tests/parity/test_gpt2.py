"""GPT-2 over every layout: every gradient, loss, norm, and the parameters after three steps."""

import pytest

from parity.cases import gpt2
from parity.pairs import covering_rows, every_row
from parity.parity import check_parity
from plait.composer import SCHEDULES
from plait.plan import Plan

FACTORS = {
    "degrees": ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)),
    "microbatches": (1, 2, 3, 4, 5),
    "layers": (2, 3),
    "schedule": SCHEDULES,
    "tied": (True, False),
}
COVERING = covering_rows(FACTORS)
REST = [row for row in every_row(FACTORS) if row not in COVERING]


def identify(row):
    (pp, dp), tied = row["degrees"], "tied" if row["tied"] else "untied"
    return f"pp{pp}-dp{dp}-{row['schedule']}-m{row['microbatches']}-{row['layers']}blocks-{tied}"


def check(rank_pool, row, precision="fp64"):
    pp, dp = row["degrees"]
    plan = Plan(pp=pp, dp=dp, schedule=row["schedule"], microbatches=row["microbatches"], precision=precision)
    check_parity(rank_pool, gpt2(layers=row["layers"], tied=row["tied"]), plan)


@pytest.mark.parametrize("row", COVERING, ids=identify)
def test_every_pair_of_factors(rank_pool, row):
    check(rank_pool, row)


@pytest.mark.full
@pytest.mark.parametrize("row", REST, ids=identify)
def test_every_other_combination(rank_pool, row):
    check(rank_pool, row)
