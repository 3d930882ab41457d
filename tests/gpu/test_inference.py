"""`evaluate` and `generate` on GPUs give what one rank gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import plait
from parity import reference, woven
from parity.case import SEED
from parity.cases import GPT2_CONTEXT, gpt2
from parity.norm import TOLERANCE, assert_close
from plait.plan.plan import Plan

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

PLANS = {
    "no axis": Plan(microbatches=2, precision="fp64"),
    "pp 2, zb-v": Plan(pp=2, schedule="zb-v", microbatches=2, precision="fp64"),
    "tp 2": Plan(tp=2, microbatches=2, precision="fp64"),
    "dp 2, full": Plan(dp=2, strategy="full", microbatches=2, precision="fp64"),
    "pp 2 x tp 2": Plan(pp=2, tp=2, microbatches=2, precision="fp64"),
}
PROMPT, MORE = [[1, 2, 3], [30, 20, 10]], GPT2_CONTEXT - 3


def evaluated_and_generated(plan: Plan) -> tuple[float, Tensor, Tensor]:
    """The mean loss of one batch, the likeliest tokens, and tokens that are drawn."""
    case = gpt2()
    engine = woven.weave(case, plan)
    (batch,) = woven.shares(case, engine, 1)
    prompt = torch.tensor(PROMPT)
    likeliest = engine.generate(prompt, MORE, temperature=0.0)
    return engine.evaluate(*batch).item(), likeliest.cpu(), engine.generate(prompt, MORE, seed=5).cpu()


@pytest.mark.parametrize("name", PLANS)
def test_loss_and_tokens_are_those_of_one_rank(gpu_ranks: GpuRanks, name: str) -> None:
    case, plan = gpt2(), PLANS[name]
    model = reference.materialise(case.build(), torch.float64)
    ((inputs, targets),) = case.batches(woven.global_rows(plan), 1, torch.float64)
    alone = plait.parallelize(
        case.build(),
        Plan(precision="fp64"),
        plait.Mesh(alone=True, device="cpu"),
        case.loss,
        seed=SEED,
    )
    tokens = torch.tensor(PROMPT)
    with torch.no_grad():
        loss = case.mean(model(inputs), targets).item()
        drawn = alone.generate(tokens, MORE, seed=5)
        for _ in range(MORE):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    for own_loss, likeliest, own_drawn in gpu_ranks.run(evaluated_and_generated, plan, ranks=plan.world):
        assert_close(own_loss, loss, TOLERANCE[torch.float64], "the loss")
        assert torch.equal(likeliest, tokens)
        assert torch.equal(own_drawn, drawn)
