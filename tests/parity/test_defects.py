"""The parity tests go red when plait is wrong."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from parity.case import Recipe
from parity.cases import GPT2_VOCAB, gpt2
from parity.defects import DEFECTS
from parity.parity import check_parity
from plait.plan.plan import Plan

PLAN = Plan(pp=2, dp=2, schedule="gpipe", microbatches=3, precision="fp64")
PLAIN = gpt2(tied=True)


def draw_uneven(rows, generator):
    """Fewer and fewer targets count towards the end of the batch."""
    inputs, targets = PLAIN.draw(rows, generator)
    ignored = (targets + 1) * 4 * rows < targets.new_tensor(range(rows))[:, None] * GPT2_VOCAB * 3
    return inputs, targets.masked_fill(ignored, -100)


CASE = replace(PLAIN, draw=draw_uneven)
RECIPE = Recipe(steps=2)


def test_check_parity_passes_without_a_defect(rank_pool):
    check_parity(rank_pool, CASE, PLAN, RECIPE, nullcontext)


@pytest.mark.parametrize(("defect", "finding"), DEFECTS.items(), ids=[d.__name__ for d in DEFECTS])
def test_check_parity_finds_each_defect(rank_pool, defect, finding):
    with pytest.raises(AssertionError, match=finding):
        check_parity(rank_pool, CASE, PLAN, RECIPE, defect)
