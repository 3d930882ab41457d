"""What frozen parameters cost: no gradient, no state of an optimizer, no reduction; counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity import test_memory as memory
from parity.case import Case
from plait.plan.plan import Plan

TOLERANCE = 0.01
"""What is claimed of the memory of frozen and of adapted models."""


def adapted() -> nn.Module:
    return plait.lora(memory.LLAMA.build(), rank=4, dropout=0.1)


def frozen() -> nn.Module:
    """All but the last block and the head, as transfer learning freezes a model."""
    model = memory.GPT2.build()
    model.requires_grad_(False)
    for part in ("blocks.3", "head.norm"):
        model.get_submodule(part).requires_grad_(True)
    return model


CASES = {one.__name__: Case(one.__name__, one, memory.draw) for one in (adapted, frozen)}
make = partial(Plan, microbatches=4, precision="fp32")
PLANS = {
    "none": make(dp=2),
    "full": make(dp=2, strategy="full", reduce="each"),
    "gradients": make(dp=2, strategy="gradients"),
    "halves": make(pp=2, tp=2, schedule="zb-h1", sequence_parallel="regather"),
    "everything": make(pp=2, tp=2, dp=2, strategy="full", recompute="selective"),
    "mixed": Plan(dp=2, microbatches=4, precision="bf16", master_precision="fp32", strategy="optimizer"),
}
QUICK = (("adapted", "full"),)
ROWS = [
    pytest.param(case, plan, marks=[] if (case, plan) in QUICK else pytest.mark.full)
    for case in CASES
    for plan in PLANS
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "plan"), ROWS)
def test_predicted_memory_of_an_adapted_model_is_what_ranks_allocate(
    rank_pool: Any, case: str, plan: str
) -> None:
    chosen = PLANS[plan]
    counted = rank_pool.run(memory.count_in_a_rank, CASES[case], chosen, memory.adamw, ranks=chosen.world)
    ranks, _ = memory.foretold(CASES[case], chosen, 2)
    for rank, foreseen in enumerate(ranks):
        found = counted[rank * chosen.dp * chosen.tp]
        assert foreseen.peak == pytest.approx(found.peak, rel=TOLERANCE)
        assert foreseen.at_rest == pytest.approx(found.at_rest, rel=TOLERANCE)


def counted(case: str, plan: Plan) -> dict[str, Any]:
    """On a rank: what a step sends, and the elements of gradients and of the optimizer's state."""
    engine = plait.parallelize(CASES[case].build(), plan, plait.Mesh(plan), memory.LLAMA.loss)
    optimizer = torch.optim.AdamW(engine.parameters())
    ((inputs, targets),) = CASES[case].batches(memory.ROWS // plan.dp, 1, torch.float32)
    for _ in range(2):
        engine.forward_backward(inputs, targets)
        optimizer.step()
    buffers = [buffer for unit in engine.runtime.units.values() for buffer in unit.buffers]
    state = (one for kept in optimizer.state.values() for one in kept.values())
    return {
        "traffic": engine.traffic(),
        "trainable": sum(one.spec.offsets.size for one in buffers if one.spec.kind.trains),
        "shards": sum(one.numel() for _, one in engine.named_parameters() if one.requires_grad),
        "gradients": sum(one.gradient.numel() for one in buffers if one.gradient is not None),
        "state": sum(one.numel() for one in state if one.dim()),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "plan", ["full", *(pytest.param(plan, marks=pytest.mark.full) for plan in ("none", "gradients"))]
)
def test_only_gradients_of_adapters_are_reduced_and_kept(thread_ranks: Any, case: str, plan: str) -> None:
    chosen = PLANS[plan]
    model = CASES[case].build()
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert trained < 0.3 * sum(one.numel() for one in model.parameters())
    for found in thread_ranks.run(counted, case, chosen, ranks=2):
        sent = [kinds for axis, kinds in found["traffic"].items() if axis in ("dp_cp", "dp", "shard")]
        calls = 4 if chosen.reduce == "each" else 1
        reduced = sum(
            one.get(kind).bytes for one in sent for kind in ("all_reduce", "reduce_scatter") if kind in one
        )
        assert trained <= found["trainable"] < 1.1 * trained  # padding
        assert abs(reduced - calls * 4 * found["trainable"]) < 100  # the loss is reduced, too
        assert found["gradients"] == found["trainable"]
        assert found["state"] == 2 * found["shards"]
