"""Memory is read and written in order on a GPU: no race in a step, and seeded races are found."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import woven
from parity.access_order import AccessOrder, ComputeAccesses, OrderedRules, stand_for_gpus
from parity.case import Case
from parity.cases import gpt2, sparse_llama
from parity.pairs import in_quick
from parity.stream_defects import (
    RACES,
    Defect,
    buffers_returned_too_early,
)
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.engine.optimizer_consistency_check import StepAgreement
from plait.errors import PlaitError
from plait.plan.plan import Plan

PLANS: dict[str, dict[str, Any]] = {
    "zb-v": {"pp": 2, "tp": 2, "schedule": "zb-v"},
    "full": {"pp": 2, "dp": 2, "strategy": "full", "reduce": "each", "schedule": "zb-h1"},
    "regather": {"tp": 2, "dp": 2, "sequence_parallel": "regather", "strategy": "gradients"},
    "offload": {"pp": 2, "dp": 2, "strategy": "full", "offload": "full", "reduce": "each"},
    "ring": {"cp": 2, "tp": 2, "context_parallel": "ring", "strategy": "full", "schedule": "zb-h1"},
    "kept": {"cp": 2, "pp": 2, "context_parallel": "ring", "sequence_parallel": "keep"},
    "ulysses": {"cp": 2, "pp": 2, "context_parallel": "ulysses", "schedule": "zb-h1"},
    "experts": {"pp": 2, "dp": 2, "ep": 2, "strategy": "full", "reduce": "each", "schedule": "zb-h1"},
    "float8": {"pp": 2, "dp": 2, "strategy": "full", "offload": "parameters", "linears": "float8"},
    "float8 over tp": {"tp": 2, "dp": 2, "strategy": "full", "linears": "float8"},
    "parts of experts": {"pp": 2, "tp": 2, "ep": 2, "recompute": "full"},
    "experts in float8": {"pp": 2, "dp": 2, "etp": 2, "schedule": "zb-h1", "linears": "float8-rowwise-gw"},
}
QUICK_RACES = (buffers_returned_too_early,)


def train_and_save(case: Case, plan: Plan, order: AccessOrder, folder: Path) -> None:
    """A step with clipping, one with an evaluation before the update, each saved in the background."""
    with ComputeAccesses(order):
        engine = woven.weave(case, plan)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.01, momentum=0.9)
        batches = woven.shares(case, engine, 2)
        manager, losses = CheckpointManager(folder), list[Tensor]()
        for step, batch in enumerate(batches):
            losses.append(engine.forward_backward(*batch) / 2)
            if step:
                engine.evaluate(*batch)
                optimizer.step()
            else:
                engine.step(optimizer, 0.05)
            manager.save(engine, optimizer, step, {})
            optimizer.zero_grad()
        manager.finish()


def run(
    thread_ranks: Any, folder: Path, fields: dict[str, Any], order: AccessOrder, defect: Defect = nullcontext
) -> None:
    """Run the plan with `fields` on ranks that stand for GPUs."""
    plan = Plan(**fields, microbatches=4, precision="fp64")
    case = gpt2(layers=4) if plan.linears is None else gpt2(hidden=64, heads=4)
    case = sparse_llama(layers=2, wide=plan.linears is not None) if plan.divides_experts else case
    with pytest.MonkeyPatch.context() as patches:
        stand_for_gpus(patches, order)
        # Most steps have no comparison of the ranks, whose waits would order what is not awaited by itself.
        patches.setattr(StepAgreement, "compare", lambda *_: None)
        ruled = thread_ranks.under_rules("early", lambda: OrderedRules(order))
        with defect():
            ruled.run(train_and_save, case, plan, order, folder, ranks=plan.world)


@pytest.mark.full
@pytest.mark.parametrize("name", in_quick(PLANS, "offload"))
def test_no_two_accesses_of_memory_are_unordered(thread_ranks: Any, tmp_path: Path, name: str) -> None:
    order = AccessOrder()
    run(thread_ranks, tmp_path, PLANS[name], order)
    assert not order.races, "\n".join(dict.fromkeys(order.races))
    assert order.count > 10_000


@pytest.mark.parametrize("defect", in_quick(RACES, *QUICK_RACES), ids=lambda defect: defect.__name__)
def test_unordered_accesses_of_memory_are_found(thread_ranks: Any, tmp_path: Path, defect: Defect) -> None:
    fields, told = RACES[defect]
    order = AccessOrder()
    with suppress(PlaitError):  # the rules, too, find most of them
        run(thread_ranks, tmp_path, fields, order, defect)
    assert any(re.search(told, race) for race in order.races), order.races[:10]
