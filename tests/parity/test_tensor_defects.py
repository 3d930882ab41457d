"""The parity tests go red when tensor parallelism is wrong as it has been wrong elsewhere."""

from contextlib import nullcontext

import pytest
import torch

from parity import woven
from parity.case import Recipe
from parity.cases import GPT2_CONTEXT, gpt2, llama
from parity.parity import check_parity
from parity.tensor_defects import TENSOR_DEFECTS, copies_not_summed, each_rank_takes_its_own_best
from plait.plan.plan import Plan

PLAN = Plan(tp=2, microbatches=2, precision="fp64")
RECIPE = Recipe(steps=2)
BIASED = gpt2()
SHARING = llama(kv_heads=1)


@pytest.mark.parametrize("case", [BIASED, SHARING], ids=lambda case: case.name)
def test_tensor_parallel_parity_passes_without_a_defect(rank_pool, case):
    check_parity(rank_pool, case, PLAN, RECIPE, nullcontext)


@pytest.mark.parametrize(
    ("defect", "finding"), TENSOR_DEFECTS.items(), ids=[defect.__name__ for defect in TENSOR_DEFECTS]
)
def test_tensor_parallel_parity_finds_each_defect(rank_pool, defect, finding):
    case = SHARING if defect is copies_not_summed else BIASED
    with pytest.raises(AssertionError, match=finding):
        check_parity(rank_pool, case, PLAN, RECIPE, defect)


def tokens_in_a_rank(plan, defect, *options):
    """What every rank gets when it continues two prompts, with each of the options."""
    with defect():
        engine = woven.weave(gpt2(heads=4), plan)
        prompt = torch.arange(6).reshape(2, 3)
        return [engine.generate(prompt, 2 * GPT2_CONTEXT, **each).tolist() for each in options]


@pytest.mark.full
def test_every_rank_of_every_layout_samples_the_same(rank_pool):
    def sampled(**degrees):
        plan = Plan(precision="fp64", **degrees)
        options = {"temperature": 0.0}, {"seed": 3}, {"seed": 3, "top_k": 5, "temperature": 2.0}
        ranks = rank_pool.run(tokens_in_a_rank, plan, nullcontext, *options, ranks=plan.world)
        assert all(tokens == ranks[0] for tokens in ranks)
        return ranks[0]

    single = sampled()
    for degrees in ({"tp": 4}, {"pp": 2, "dp": 2, "tp": 2}):
        assert sampled(**degrees) == single


def test_ranks_that_sample_different_tokens_are_noticed(rank_pool):
    plan = Plan(tp=2, precision="fp64")
    first, second = rank_pool.run(tokens_in_a_rank, plan, each_rank_takes_its_own_best, {}, ranks=2)
    assert first != second
