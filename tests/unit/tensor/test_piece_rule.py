"""The rule `piece`: what it says, what it is for, and the proof that a dropout stands where it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.parallelize import parallelize
from plait.errors import ModelError, PlanError
from plait.estimate.memory.predict_memory import memory
from plait.plan.layout import Layout
from plait.plan.plan import Plan
from plait.plan.rules import match
from plait.ranks import Group, Mesh, Traffic
from plait.rules import Rule, Rules, column, entrance, piece, row
from plait.tensor.dropout import Dropout
from plait.tensor.dropout_mask import DimPart
from plait.tensor.losses import cross_entropy
from plait.tensor.parallel.apply_rules import apply_rules, layouts_of, match_modules
from plait.tensor.parallel.linear import RegionBoundary

WIDTH = 8


class Block(nn.Module):
    def __init__(self, kind: Any = nn.Dropout) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.after = kind(0.5), kind(0.5)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = value + self.after(self.down(self.drop(torch.tanh(self.up(self.norm(value))))))
        return result


REGION: Rules = {"*.norm": entrance, "*.up": column, "*.down": row}
RULES: Rules = {**REGION, "*.drop": piece}


def test_the_rule_part_names_the_sharded_dim() -> None:
    assert (piece.dim, piece.along(1)) == (-1, Rule("piece", dim=1))
    assert match({"drop": piece.along(2)}, ["drop"]) == {"drop": piece.along(2)}


@pytest.mark.parametrize("dim", [0, 1.5, None])
def test_the_rule_part_refuses_dim_0(dim: Any) -> None:
    with pytest.raises(PlanError, match="give a dim of the tensor, but not 0, its rows"):
        piece.along(dim)


def test_other_rules_than_part_have_no_dim() -> None:
    with pytest.raises(PlanError, match="a rule column has dim = 1, which does not apply to it"):
        column.along(1)


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Dropout1d()])
def test_the_rule_part_is_for_dropout_only(layer: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"the rule piece is for plait\.Dropout or nn\.Dropout, but 0 is a"):
        match_modules({"0": piece}, [("0", layer)])
    with pytest.raises(PlanError, match=r"the rule row is for nn\.Linear, but 0 is a Dropout"):
        match_modules({"0": row}, [("0", nn.Dropout())])


def test_parameters_beside_it_stay_as_they_are() -> None:
    linear, axes = nn.Linear(2, 2), {"replicate": 1, "shard": 1, "tp": 2}
    matched = match_modules({"1": piece}, [("0", linear), ("1", nn.Dropout())])
    layouts = layouts_of([("0", linear), ("1", nn.Dropout())], matched, axes)
    assert layouts[id(linear.weight)] == Layout((2, 2), axes)


def test_the_rule_part_gives_a_dropout_this_ranks_part_of_its_mask() -> None:
    inner, outer = Dropout(), Dropout()
    layers = [("0", nn.ModuleDict({"inner": inner, "outer": outer}))]
    group = Group("tp", (0, 1, 2), 1, None, Traffic(), 1.0)
    apply_rules(layers, {"0.inner": piece.along(2)}, group, [RegionBoundary(group)])
    assert (inner.in_region, inner.parts[2](5)) == (True, DimPart(5, 15))
    assert (outer.in_region, outer.parts) == (False, {})


def refused(rules: Rules, kind: Any = nn.Dropout) -> str:
    """What a rank of two says to the first step."""
    plan = Plan(tp=2)
    with torch.device("meta"):
        model = nn.Sequential(Block(kind), nn.Linear(WIDTH, 3))
    engine = parallelize(model, plan, Mesh(plan), cross_entropy, rules=rules)
    with pytest.raises(ModelError) as caught:
        engine.forward_backward(torch.ones(2, WIDTH), torch.zeros(2, dtype=torch.int64))
    return str(caught.value)


MISSING = (
    "0: the dropout drop is inside a region, where each rank has another part, but its mask would be the "
    "same on every rank: give it the rule piece.along(d), d being the partitioned dim (-1 for features, 1 "
    "for heads in [rows, heads, ...])."
)
TOO_MUCH = (
    "0: the dropout after has the rule piece, but its input is whole on every rank, of which each rank would "
    "drop other elements: remove the rule."
)


@pytest.mark.parametrize(
    ("rules", "told"),
    [(REGION, MISSING), ({**RULES, "*.after": piece}, TOO_MUCH), ({"0.after": piece}, TOO_MUCH)],
    ids=["missing", "outside", "no region at all"],
)
def test_a_dropout_on_a_sharded_value_without_the_rule_part_is_refused(
    thread_ranks: Any, rules: Rules, told: str
) -> None:
    for kind in (nn.Dropout, Dropout):
        assert thread_ranks.run(refused, rules, kind, ranks=2) == [told, told]


class WindowAttention(nn.Module):
    """Attention whose weights are dropped block by block, as a window needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, value: Tensor) -> Tensor:
        entered = self.norm(value)
        query, key, values = (
            linear(entered).unflatten(-1, (-1, 2)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = plait.attention(query, key, values, window=2, dropout=self.drop)
        result: Tensor = value + self.output(mixed.transpose(1, 2).flatten(2))
        return result


def refused_attention(rules: Rules) -> str:
    plan = Plan(tp=2)
    with torch.device("meta"):
        model = nn.Sequential(WindowAttention(), nn.Linear(WIDTH, 3))
    engine = parallelize(model, plan, Mesh(plan), cross_entropy, rules=rules)
    with pytest.raises(ModelError) as caught:
        engine.forward_backward(torch.ones(2, 4, WIDTH), torch.zeros(2, 4, dtype=torch.int64))
    return str(caught.value)


def test_a_dropout_of_attention_weights_without_or_with_a_wrong_rule_part_is_refused(
    thread_ranks: Any,
) -> None:
    heads: Rules = {f"*.{name}": column for name in ("query", "key", "value")}
    region: Rules = {"*.norm": entrance, **heads, "*.output": row}
    assert thread_ranks.run(refused_attention, region, ranks=2) == [MISSING, MISSING]
    told = TOO_MUCH.replace("dropout after", "dropout drop")
    assert thread_ranks.run(refused_attention, {"0.drop": piece.along(1)}, ranks=2) == [told, told]


def test_a_dropout_with_p_zero_needs_no_rule_part(thread_ranks: Any) -> None:
    assert thread_ranks.run(runs_in_evaluation_mode, ranks=2) == [True, True]


def runs_in_evaluation_mode() -> bool:
    plan = Plan(tp=2)
    with torch.device("meta"):
        model = nn.Sequential(Block(), nn.Linear(WIDTH, 3)).eval()
    engine = parallelize(model, plan, Mesh(plan), cross_entropy, rules=REGION)
    return bool(engine.forward_backward(torch.ones(2, WIDTH), torch.zeros(2, dtype=torch.int64)) > 0)


def test_predicted_memory_counts_dropout_masks_of_shards() -> None:
    """Four rows: a byte for each of 16 features, or 8 of them, and of 8 outside."""
    given, targets = torch.empty(4, WIDTH), torch.empty(4, dtype=torch.int64)
    peaks = {}
    for tp in (1, 2):
        for p in (0.5, 0.0):
            model = nn.Sequential(Block(lambda _, p=p: nn.Dropout(p)), nn.Linear(WIDTH, 3))
            peaks[tp, p] = memory(model, Plan(tp=tp), given, targets, rules=RULES, device="cpu").peak
    assert peaks[1, 0.5] - peaks[1, 0.0] >= 4 * 16 + 4 * 8
    assert peaks[2, 0.5] - peaks[2, 0.0] >= 4 * 8 + 4 * 8
