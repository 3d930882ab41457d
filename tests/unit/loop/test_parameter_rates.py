"""Parameters by pattern of their names: their groups on each rank, what freezes, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.comm.rank_pool import RankPool
from plait.errors import ConfigError
from plait.loop import History, ParameterRate, freeze, parameter_groups
from plait.loop.parameter_rates import fits_name
from plait.plan import Plan

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


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("embedding", "embedding.token.weight", True),
        ("blocks.*.mlp", "blocks.10.mlp.up.weight", True),
        ("bias", "blocks.0.mlp.up.bias", True),
        ("mlp.up", "blocks.0.mlp.up.bias", True),
        ("blocks.1", "blocks.10.mlp.up.weight", False),
        ("embed", "embedding.token.weight", False),
        ("*", "weight", True),
    ],
)
def test_a_pattern_fits_whole_parts_of_a_name(pattern: str, name: str, *, fits: bool) -> None:
    assert fits_name(pattern, name) is fits


def test_frozen_parameters_do_not_train() -> None:
    made = model()
    freeze(made, ["0.weight", "bias"])
    assert [name for name, one in made.named_parameters() if one.requires_grad] == ["2.weight"]
    with pytest.raises(
        ConfigError, match=r"'wieght' of freeze fits .* the nearest are 2\.weight, 0\.weight\."
    ):
        freeze(made, ["wieght"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parameter_groups": partial(parameter_groups, rates=[ParameterRate("wieght", 2.0)])},
            r"'wieght' of rates fits the name of no parameter: the nearest are 2\.weight",
        ),
        ({"learning_rate": None}, "parameter groups have lr_scale, a factor of learning_rate, which is not"),
        ({"weight_decay": 0.1}, r"weight_decay is 0\.1, and parameter_groups sets it for each group"),
        ({"parameter_groups": [1]}, "parameter_groups is an object of list: give a function of the engine"),
        ({"notes": "a try"}, r"notes are given, but no callback shows them: add plait\.loop\.Report"),
        ({"notes": 3}, "notes is an object of int: give a text"),
    ],
)
def test_what_is_not_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses(PLANS[0], **options)
