"""The loss in chunks of rows of logits (`Plan.loss_rows`): the numbers of whole logits on one rank."""

from dataclasses import replace
from functools import partial

import pytest

from parity import data
from parity.case import Case
from parity.cases import SMOOTHED, gpt2, llama
from parity.pairs import covering_rows
from parity.parity import check_parity
from plait.plan import Plan
from plait.tensor.losses import CrossEntropy


def ignoring(case: Case, **loss) -> Case:
    """The case with some targets that do not count, and another loss."""

    def draw(rows, generator):
        inputs, targets = case.draw(rows, generator)
        return inputs, targets.masked_fill(targets % 5 == 0, 0)

    return replace(case, draw=draw, **loss)


FAMILIES = {"gpt2": partial(gpt2, hidden=24, heads=12), "llama": partial(llama, heads=12, kv_heads=12)}
LOSSES = {
    "plain": {},
    "smoothed": {"loss": SMOOTHED, "mean": data.mean_smoothed},
    "z": {"loss": CrossEntropy(ignore_index=0, z_loss=0.1), "mean": data.mean_with_z_loss},
}
FACTORS = {
    "family": tuple(FAMILIES),
    "loss": tuple(LOSSES),
    "rows": (1, 5, 16, 1024),
    "tied": (True, False),
    "pp": (1, 2),
    "tp": (1, 2),
    "dp": (1, 2),
    "schedule": ("1f1b", "zb-h1"),
    "strategy": ("none", "full"),
    "reduce": ("last", "each"),
    "sequence": ("none", "regather"),
    "recompute": ("none", "selective", "full"),
}
"""A micro-batch has 2 rows of 8 tokens; chunks of 5 leave one token over."""


def allowed(row):
    return row.get("tp", 2) > 1 or row.get("sequence", "none") == "none"


def identify(row):
    return "-".join(f"{value}" if isinstance(value, str) else f"{name}{value}" for name, value in row.items())


@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=identify)
def test_every_pair_of_factors(thread_ranks, row):
    case = ignoring(FAMILIES[row["family"]](tied=row["tied"]), **LOSSES[row["loss"]])
    if row["loss"] == "plain":
        case = FAMILIES[row["family"]](tied=row["tied"])
    names = ("pp", "tp", "dp", "schedule", "strategy", "reduce", "recompute")
    plan = Plan(
        **{name: row[name] for name in names},
        loss_rows=row["rows"],
        sequence_parallel=row["sequence"],
        microbatches=3,
        precision="fp64",
    )
    check_parity(thread_ranks, case, plan)
