from __future__ import annotations

import pytest
from torch import nn

import plait
from plait.errors import PlanError
from plait.plan.plan import Plan


def test_cuda_graphs_are_refused_on_cpus() -> None:
    plan = Plan(cuda_graphs=True)
    refused = (
        r"^plan.cuda_graphs is True, but this rank computes on cpu, which has no CUDA graphs: leave "
        r"plan.cuda_graphs out\.$"
    )
    with pytest.raises(PlanError, match=refused):
        plait.parallelize(nn.Sequential(nn.Linear(2, 2)), plan, plait.Mesh(plan), nn.functional.mse_loss)


def test_cuda_graphs_are_true_or_false() -> None:
    with pytest.raises(PlanError, match=r"plan.cuda_graphs is 1: give True or False"):
        Plan(cuda_graphs=1)  # type: ignore[arg-type]
