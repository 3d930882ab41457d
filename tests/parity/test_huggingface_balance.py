"""The balance loss that a configuration of transformers asks for: the gradients of transformers' own loss."""

from __future__ import annotations

import sys
from functools import cache, partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import huggingface_cases as cases
from parity.norm import assert_close, assert_equal
from parity.pairs import in_quick
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

pytestmark = pytest.mark.transformers

ROWS, WEIGHT = 4, 0.7
NAMES = ("mixtral", "qwen2-moe-partly-dense", "qwen3-moe", "olmoe", "gpt-oss")
PLANS = {
    "one rank": Plan(microbatches=1, precision="fp64"),
    "gpipe": Plan(pp=2, schedule="gpipe", microbatches=2, precision="fp64"),
    "experts": Plan(dp=2, ep=2, strategy="full", microbatches=1, precision="fp64"),
    "tp in parts": Plan(tp=2, sequence_parallel="keep", microbatches=2, schedule="gpipe", precision="fp64"),
}
INPUTS, TARGETS = cases.draw_contexts(cases.GPT2_VOCAB)(ROWS, torch.Generator().manual_seed(3))


def build(name: str) -> nn.Module:
    return cases.drawn(partial(cases.SPARSE[name], output_router_logits=True, router_aux_loss_coef=WEIGHT))


@cache
def by_transformers(name: str) -> tuple[float, dict[str, Tensor]]:
    """The main loss, and the gradients of its sum with the weighted balance loss."""
    model = build(name)
    module = sys.modules[type(model).__module__]
    with (
        cases.norms_in_float64(),
        patch.object(module, "load_balancing_loss_func", cases.in_float64(module.load_balancing_loss_func)),
    ):
        output = model(INPUTS)
    loss = functional.cross_entropy(output.logits.flatten(0, 1), TARGETS.flatten())
    (loss + WEIGHT * output.aux_loss).backward()
    return float(loss.detach()), {
        key: one.grad for key, one in model.named_parameters() if one.grad is not None
    }


def by_plait(name: str, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """The same on a rank, with names of transformers."""
    layers = plait.models.from_huggingface(build(name))
    names: dict[str, str] = layers.huggingface_names  # type: ignore[assignment]
    engine = plait.parallelize(layers, plan, mesh := plait.Mesh(plan), plait.cross_entropy)
    share = slice(mesh.index("dp") * ROWS // plan.dp, (mesh.index("dp") + 1) * ROWS // plan.dp)
    loss = engine.forward_backward(INPUTS[share], TARGETS[share])
    return float(loss), {names[key]: one.clone() for key, one in engine.named_gradients()}


QUICK = (*(("mixtral", "gpipe"), ("qwen2-moe-partly-dense", "tp in parts")), ("olmoe", "experts"))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("name", "plan"), in_quick(product(NAMES, PLANS), *QUICK))
def test_gradients_with_the_balance_loss_are_those_of_transformers(
    thread_ranks: RankPool, name: str, plan: str
) -> None:
    expected = by_transformers(name)
    with cases.norms_in_float64():
        ranks = thread_ranks.run(by_plait, name, PLANS[plan], ranks=PLANS[plan].world)
    for loss, gradients in ranks:
        assert_close(loss, expected[0], 1e-12, "the main loss")
        assert_equal(gradients, expected[1], 1e-12, "the gradient")


def test_the_balance_loss_of_a_step_is_refused_where_its_counts_come_too_late(thread_ranks: RankPool) -> None:
    plan = Plan(pp=2, schedule="1f1b", microbatches=2, precision="fp64")
    with pytest.raises(PlanError, match="counts the whole step, but the first backward of schedule 1f1b"):
        thread_ranks.run(by_plait, "mixtral", plan, ranks=2)
