from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.errors import ModelError, PlanError
from plait.estimate.memory import predict_memory as forecast
from plait.estimate.memory.memory_ledger import Category
from plait.estimate.memory.memory_report import Memory
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.plan.plan import Plan
from plait.schedules.search.stage_cuts import schedule_and_cut

SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 64, "context": 16}


def gpt2(**sizes: Any) -> nn.Sequential:
    return plait.models.gpt2(**{**SIZES, **sizes})


def foretold(plan: Plan, **options: Any) -> Memory:
    return plait.memory(gpt2(), plan, **{"device": "cpu", **options})


def activations(memory: Memory) -> list[int]:
    return [rank.at_peak[Category.ACTIVATIONS] for rank in memory.ranks]


def test_memory_from_inputs_equals_memory_from_rows() -> None:
    plan = Plan(microbatches=2)
    tokens = torch.empty(6, 16, dtype=torch.int64, device="meta")
    assert foretold(plan, rows=6) == plait.memory(gpt2(), plan, tokens, tokens, device="cpu")
    assert foretold(plan) == foretold(plan, rows=2)


def test_a_shorter_sequence_and_fewer_rows_take_less() -> None:
    plan = Plan(microbatches=2)
    short = torch.empty(6, 8, dtype=torch.int64)
    whole, half = foretold(plan, rows=6), plait.memory(gpt2(), plan, short, device="cpu")
    assert activations(half)[0] == pytest.approx(activations(whole)[0] / 2, rel=0.01)
    assert activations(foretold(plan, rows=12))[0] == pytest.approx(2 * activations(whole)[0], rel=0.01)


def test_without_inputs_a_model_of_ones_own_has_no_activations() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    memory = plait.memory(model, Plan(), device="cpu")
    assert not memory.has_activations
    assert activations(memory) == [0]
    assert "give inputs" in str(memory)
    given = plait.memory(model, Plan(), torch.empty(5, 8), device="cpu")
    assert given.has_activations
    assert activations(given)[0] > 0
    assert given.peak > memory.peak


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    """1F1B: as many micro-batches as ranks from here to the end; GPipe: all."""

    def middle(schedule: str, microbatches: int) -> list[int]:
        model = gpt2(layers=4, hidden=64)
        plan = Plan(pp=4, schedule=schedule, microbatches=microbatches, layers_per_stage=(3, 2, 2, 3))
        return activations(plait.memory(model, plan, rows=4 * microbatches, device="cpu"))[1:3]

    one, two = middle("1f1b", 8)
    assert one / two == pytest.approx(3 / 2, rel=0.15)
    assert middle("1f1b", 16) == [one, two]
    assert middle("gpipe", 16)[0] / middle("gpipe", 8)[0] == pytest.approx(2, rel=0.1)


def test_the_printed_saving_is_against_strategy_none() -> None:
    none, full = foretold(Plan(dp=4)), foretold(Plan(dp=4, strategy="full", reduce="each"))
    assert none.saving == 0
    assert none.unsharded == full.unsharded == none.peak
    assert full.saving == pytest.approx(1 - full.peak / none.peak)
    assert 0 < full.saving < 1


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_moments_count_the_tensors_that_the_optimizer_keeps(moments: int) -> None:
    elements = sum(parameter.numel() for parameter in gpt2().parameters())
    ranks = foretold(Plan(precision="fp32"), moments=moments).ranks
    assert ranks[0].at_peak[Category.STATE] == moments * elements * 4
    assert ranks[0].at_rest == pytest.approx((2 + moments) * elements * 4, rel=0.005)


def test_a_rank_of_tp_2_is_predicted_about_half_of_each_category() -> None:
    whole, half = foretold(Plan()), foretold(Plan(tp=2))
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.STATE, Category.ACTIVATIONS):
        assert 0.45 < half.ranks[0].at_peak[category] / whole.ranks[0].at_peak[category] < 0.75


def test_offload_frees_a_device_but_not_a_cpu() -> None:
    plain = Plan(dp=2, strategy="full")
    away = Plan(dp=2, strategy="full", offload="full")
    on_device = [foretold(plan, device="cuda") for plan in (plain, away)]
    state = plain.world * on_device[1].ranks[0].host
    elements = sum(parameter.numel() for parameter in gpt2().parameters())
    assert state == pytest.approx(4 * elements * 4, rel=0.005)
    assert on_device[0].ranks[0].host == 0
    assert on_device[0].peak - on_device[1].peak == pytest.approx(on_device[1].ranks[0].host, rel=0.01)
    on_cpu = [foretold(plan, device="cpu") for plan in (plain, away)]
    assert on_cpu[0].peak == pytest.approx(on_cpu[1].peak, rel=0.01)
    assert on_cpu[1].ranks[0].host == 0


def test_the_peak_within_operations_is_at_least_the_peak_between_them() -> None:
    for rank in foretold(Plan(pp=2, microbatches=4)).ranks:
        assert rank.most >= rank.peak == sum(rank.at_peak.values())
        assert rank.at_rest < rank.peak


def test_nothing_is_allocated_for_a_large_model() -> None:
    model = plait.models.gpt2(layers=2, hidden=8192, heads=64, vocab=50257, context=2048)
    memory = plait.memory(model, Plan(dp=8, strategy="full"), rows=8, device="cuda")
    assert memory.peak > 10**10


def test_memory_does_not_alter_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    before = model[0].weight.clone()
    plait.memory(model, Plan(dp=2, strategy="full"), torch.empty(4, 8), device="cpu")
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    assert "forward" not in vars(model[0])


def test_memory_refuses_what_parallelize_refuses() -> None:
    with pytest.raises(PlanError, match="6 rows, which do not divide into 4 micro-batches"):
        foretold(Plan(microbatches=4), rows=6)
    with pytest.raises(PlanError, match="does not cut 6 layers"):
        foretold(Plan(pp=2, layers_per_stage=(1, 1)))
    with pytest.raises(ModelError, match="does not run on"):
        plait.memory(nn.Sequential(nn.Linear(8, 8)), Plan(), torch.empty(4, 9), device="cpu")


class Counting(nn.Module):
    """Writes to a buffer, which no graph may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.tanh(self.linear(x)) * 2


def test_a_layer_without_graphs_counts_as_an_eager_one() -> None:
    model, batch = nn.Sequential(Counting(), Counting()), torch.zeros(4, 4)

    def ranks(**options: Any) -> Any:
        plan = Plan(microbatches=2, **options)
        return plait.memory(model, plan, batch, batch, loss=nn.functional.mse_loss, device="cpu").ranks

    assert ranks(compile="where possible") == ranks()


def test_the_memory_table_fits_a_terminal() -> None:
    sizes = {"layers": 4, "hidden": 8192, "heads": 64, "vocab": 50257, "context": 2048}
    for factor, model in ((1, gpt2()), (64, plait.models.gpt2(**sizes))):
        plan = Plan(pp=2, dp=8, strategy="full", offload="parameters", microbatches=4)
        text = str(plait.memory(model, plan, rows=4 * factor, device="cuda"))
        assert max(map(len, text.splitlines())) <= 80, text
        assert "saves" in text
        assert "Offloaded to the CPU" in text


def test_the_memory_table_names_the_action_of_the_peak() -> None:
    memory = foretold(Plan(microbatches=2))
    rank, *rows = str(memory).splitlines()
    assert rank.split() == [
        *("rank", "parameters", "gathered", "gradients", "optimizer"),
        *("activations", "other", "peak", "at", "rest"),
    ]
    assert rows[0].split()[0] == "0"
    assert float(rows[0].split()[-2]) == pytest.approx(memory.peak / 1e6, abs=1e-3)
    assert f"Rank 0 has the largest peak, after {memory.ranks[0].at}." in rows


def test_plans_share_the_traces_of_layers() -> None:
    estimator = MemoryEstimator(gpt2(), rows=4, device="cpu")
    for strategy in ("none", "optimizer", "full"):
        estimator.estimate(Plan(dp=2, microbatches=2, strategy=strategy))
    assert len(estimator.traces) == 1
    estimator.estimate(Plan(dp=2, microbatches=4))
    assert len(estimator.traces) == 2


def test_plans_share_the_order_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[dict[str, Any]] = []

    def search(policy: str, *arguments: Any, **options: Any) -> Any:
        assert policy == "auto"
        searches.append(options)
        return schedule_and_cut("1f1b", *arguments, **options)  # no search: that takes its time

    monkeypatch.setattr(forecast, "schedule_and_cut", search)
    plan, estimator = (
        Plan(pp=2, dp=2, schedule="auto", microbatches=2),
        MemoryEstimator(gpt2(), rows=4, device="cpu"),
    )
    for other in ({}, {"strategy": "full"}, {"strategy": "full", "reduce": "each"}, {"precision": "fp64"}):
        estimator.estimate(replace(plan, **other))
    assert len(searches) == 1
    for other in ({"microbatches": 4}, {"memory_limit": 2}, {"layers_per_stage": (3, 3)}, {"chunks": 1}):
        estimator.estimate(replace(plan, **other))
        estimator.estimate(replace(plan, strategy="optimizer", **other))
    assert len(searches) == 5
    MemoryEstimator(gpt2(), rows=4, device="cpu").estimate(plan)
    assert len(searches) == 6


def test_logits_in_chunks_take_half_of_the_last_stage() -> None:
    """Vocabulary 131,072, 4,096 rows, hidden 1,024; in 16 bits four fifths, with parameters in both."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.Linear(1024, 131072, bias=False))
    inputs = torch.empty(4096, 1024, device="meta")
    for plan, most in (
        (Plan(), 0.52),
        (Plan(precision="bf16", master_precision="fp32"), 0.81),
    ):
        whole, chunks = (
            plait.memory(model, one, inputs, moments=0, device="cpu").ranks[0].most
            for one in (plan, replace(plan, loss_rows=1024))
        )
        assert chunks <= most * whole
