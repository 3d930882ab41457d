"""Parameters and buffers without dims: trained, verified, saved, converted, shown, however they are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import plait
from parity.checkpoints import tensors_of
from parity.test_checkpoints import check_close
from plait.checkpoint.dcp import export_dcp, import_dcp
from plait.checkpoint.inspecting import summary
from plait.checkpoint.rewriting import convert
from plait.plan.layout import assemble
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.rules import column, row
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report


class Scaled(nn.Module):
    """A trained, a frozen and a buffered number; on meta their values come by name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        self.register_buffer("power", torch.tensor(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale**2 * self.power + self.shift


class Block(nn.Module):
    """Two linears that `tp` cuts, and a number behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gate = nn.Parameter(torch.tensor(1.1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.down(torch.tanh(self.up(hidden)))


RULES = {"3.up": column, "3.down": row}
LOSS = plait.cross_entropy


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Scaled(), nn.Tanh(), Block(), Scaled(), nn.Linear(6, 5))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randint(5, (8,), generator=generator)


class Counting(Optimizer):
    """Keeps a number that plait does not know by its name."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    state["turns"] = state.get("turns", torch.zeros(())) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(one)) + one.grad
                    one -= group["lr"] * state["sum"] / state["turns"]


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "counting": Counting,
}


def link(plan: Plan, kind: str, source: Path | None, target: Path, steps: tuple[int, int]) -> None:
    """Load, train on, save; on the way the DTensors and the replicas are looked at."""
    engine = plait.parallelize(model().double(), plan, plait.Mesh(plan), LOSS, rules=RULES)
    optimizer = OPTIMIZERS[kind](engine.parameter_groups(weight_decay=0.0), lr=0.05)
    if source is not None:
        assert plait.load(engine, optimizer, source) == {"step": steps[0]}
    for step in range(*steps):
        inputs, targets = batch(step)
        dp = engine.mesh.index("dp")
        engine.forward_backward(inputs.double().chunk(plan.dp)[dp], targets.chunk(plan.dp)[dp])
        engine.step(optimizer, 0.5)
        optimizer.zero_grad()
    engine.check_replicas(optimizer)
    shapes = {name: tuple(shown.full_tensor().shape) for name, shown in engine.named_dtensors()}
    assert all(shape == engine.layouts[name].shape for name, shape in shapes.items())
    plait.save(engine, optimizer, target, {"step": steps[1]})


CHAIN = {
    "full": Plan(dp=2, strategy="full"),
    "pp": Plan(pp=2),
    "optimizer": Plan(dp=2, strategy="optimizer"),
    "tp": Plan(tp=2),
    "offload": Plan(dp=2, strategy="full", offload="full"),
    "gradients": Plan(dp=2, strategy="gradients", reduce="each", microbatches=2),
}


@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("asgd", "nadam", "counting"))]
)
def test_scalar_parameters_survive_checkpoints_through_every_way_to_shard(
    rank_pool: RankPool, tmp_path: Path, kind: str
) -> None:
    source = None
    for number, (name, plan) in enumerate(CHAIN.items()):
        steps = (number, number + 1)
        rank_pool.run(link, plan, kind, source, tmp_path / name, steps, ranks=2)
        source = tmp_path / name
        assert not summary(source, check=True).flaws
    rank_pool.run(link, Plan(), kind, None, tmp_path / "never", (0, len(CHAIN)), ranks=1)
    assert source is not None
    check_close(tensors_of(source), tensors_of(tmp_path / "never"), 1e-12)
    convert(source, tmp_path / "converted")
    export_dcp(source, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    for folder in ("converted", "back"):
        check_close(tensors_of(tmp_path / folder), tensors_of(source), 0.0)


PLANS = {
    **{name: replace(plan, microbatches=2) for name, plan in CHAIN.items()},
    "hybrid": Plan(dp=4, replicate=2, strategy="full"),
    "pp and full": Plan(pp=2, dp=2, strategy="full"),
}
RUNS = [(name, "float64") for name in PLANS] + [("full", "native"), ("full", "exact"), ("tp", "exact")]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_verify_finds_a_model_with_scalar_parameters_equal(
    thread_ranks: RankPool, name: str, mode: Any
) -> None:
    plan, options = PLANS[name], VerifyOptions(mode=mode, steps=1 if mode == "exact" else 2)
    case = Case(
        model(), LOSS, [batch(0), batch(1)][: options.steps], options, RULES, device="cpu", timeout=60.0
    )
    report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=plan.world), plan, case.options)
    assert report, str(report)


def test_shards_of_scalar_parameters_are_those_of_the_engines_layouts(thread_ranks: RankPool) -> None:
    plan = Plan(dp=2, strategy="full")

    def body() -> dict[str, Any]:
        engine = plait.parallelize(model(), plan, plait.Mesh(plan), LOSS, rules=RULES)
        return {
            name: (shard.detach().clone(), engine.layouts[name]) for name, shard in engine.named_parameters()
        }

    first, second = thread_ranks.run(body, ranks=2)
    for name, value in model().state_dict().items():
        if name in first:
            shards = {(0, 0, 0, 0): first[name][0], (0, 1, 0, 0): second[name][0]}
            assert torch.equal(assemble(shards, first[name][1]), value), name
