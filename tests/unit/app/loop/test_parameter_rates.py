"""Parameters by pattern of their names: their groups on each rank, what freezes, what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.app.loop.parameter_rates import fits_name
from plait.errors import ConfigError
from plait.loop import History, ParameterRate, freeze, parameter_groups
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

RATES = [ParameterRate("0", 0.5), ParameterRate("bias", 2.0, weight_decay=0.3)]
PLANS = [
    Plan(precision="fp64"),
    Plan(pp=2, precision="fp64"),
    Plan(tp=1, dp=2, strategy="full", precision="fp64"),
]


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for one in made.parameters():
        with torch.no_grad():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64))
    return made


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.arange(8) % 3)


def losses(plan: Plan, **options: Any) -> list[float]:
    history = History()
    given: dict[str, Any] = {
        "parameter_groups": partial(parameter_groups, rates=RATES, weight_decay=0.1),
        "learning_rate": lambda step: 0.1 / (step + 1),
    }
    plait.fit(
        model(),
        plan,
        plait.Loader(data(), batch=8),
        steps=4,
        optimizer=torch.optim.AdamW,
        callbacks=[history],
        **(given | options),
    )
    return [row["loss"] for row in history.rows]


def of_torch() -> list[float]:
    """The same in plain PyTorch: groups by name, a schedule as a factor of each group's rate."""
    made = model()
    named = dict(made.named_parameters())
    groups = [
        {"params": [named["0.weight"]], "lr": 0.05, "weight_decay": 0.1},
        {"params": [named["0.bias"]], "lr": 0.05, "weight_decay": 0.0},
        {"params": [named["2.bias"]], "lr": 0.2, "weight_decay": 0.3},
        {"params": [named["2.weight"]], "lr": 0.1, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    found = []
    inputs, targets = data().tensors
    for _ in range(4):
        loss = nn.functional.cross_entropy(made(inputs), targets)
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("plan", PLANS, ids=["one", "pp", "dp"])
def test_rates_by_pattern_are_those_of_groups_of_torch(thread_ranks: RankPool, plan: Plan) -> None:
    found = thread_ranks.run(losses, plan, ranks=plan.world)
    assert found[0] == pytest.approx(of_torch(), rel=1e-12)


def test_a_rate_pattern_matches_whole_components_of_a_name() -> None:
    for pattern, name, fits in [
        ("embedding", "embedding.token.weight", True),
        ("blocks.*.mlp", "blocks.10.mlp.up.weight", True),
        ("bias", "blocks.0.mlp.up.bias", True),
        ("mlp.up", "blocks.0.mlp.up.bias", True),
        ("blocks.1", "blocks.10.mlp.up.weight", False),
        ("embed", "embedding.token.weight", False),
        ("*", "weight", True),
    ]:
        assert fits_name(pattern, name) is fits


def test_freeze_turns_off_requires_grad_of_matching_parameters() -> None:
    made = model()
    freeze(made, ["0.weight", "bias"])
    assert [name for name, one in made.named_parameters() if one.requires_grad] == ["2.weight"]
    with pytest.raises(
        ConfigError, match=r"'wieght' of freeze fits .* the nearest are 2\.weight, 0\.weight\."
    ):
        freeze(made, ["wieght"])


def test_learning_rates_and_patterns_that_nothing_uses_are_refused() -> None:
    for options, message in [
        (
            {"parameter_groups": partial(parameter_groups, rates=[ParameterRate("wieght", 2.0)])},
            r"'wieght' of rates fits the name of no parameter: the nearest are 2\.weight",
        ),
        ({"learning_rate": None}, "parameter groups have lr_scale, a factor of learning_rate, which is not"),
        ({"weight_decay": 0.1}, r"weight_decay is 0\.1, and parameter_groups sets it for each group"),
        ({"parameter_groups": [1]}, "parameter_groups is an object of list: give a function of the engine"),
        ({"notes": "a try"}, r"notes are given, but no callback shows them: add plait\.loop\.Report"),
        ({"notes": 3}, "notes is an object of int: give a text"),
    ]:
        with pytest.raises(ConfigError, match=message):
            losses(PLANS[0], **options)


def of_own_groups(plan: Plan, folder: Path, steps: int, *, resumes: bool) -> tuple[float, list[float]]:
    """Train in a loop of one's own; a rank has groups only of the parameters that it holds."""
    engine = plait.parallelize(model(), plan, plait.Mesh(plan), nn.CrossEntropyLoss())
    named = dict(engine.named_parameters())
    of_first = [one for name, one in named.items() if name.startswith("0.")]
    of_last = [one for name, one in named.items() if name.startswith("2.")]
    groups = [{"params": held, "lr": rate} for held, rate in ((of_first, 0.1), (of_last, 0.01)) if held]
    optimizer = torch.optim.Adam(groups)
    done = plait.load(engine, optimizer, folder)["step"] if resumes else 0
    inputs, targets = (one.chunk(plan.dp)[engine.mesh.index("dp")] for one in data().tensors)
    for _ in range(done, steps):
        optimizer.zero_grad()
        loss = engine.forward_backward(inputs, targets)
        optimizer.step()
    plait.save(engine, optimizer, folder / f"step-{steps:08d}", {"step": steps})
    return loss.item(), [group["lr"] for group in optimizer.param_groups]


def test_a_users_parameter_groups_continue_on_another_layout(thread_ranks: RankPool, tmp_path: Path) -> None:
    one, pipeline, sharded = PLANS
    whole = partial(of_own_groups, one, tmp_path / "whole", 4, resumes=False)
    ((expected, rates),) = thread_ranks.run(whole, ranks=1)
    first = partial(of_own_groups, pipeline, tmp_path / "cut", 2, resumes=False)
    assert [lrs for _, lrs in thread_ranks.run(first, ranks=2)] == [[0.1], [0.01]]
    rest = partial(of_own_groups, sharded, tmp_path / "cut", 4, resumes=True)
    for loss, lrs in thread_ranks.run(rest, ranks=2):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert lrs == rates == [0.1, 0.01]
