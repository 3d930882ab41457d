"""Muon under every plan: the same parameters as by `torch.optim.Muon` on one rank, both in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity import data, huggingface_cases, lora_cases, models
from parity.case import Case
from parity.cases import case, sparse_llama
from parity.norm import assert_equal
from parity.parity import merged
from parity.rows import name_of
from parity.whole_matrices import (
    BOUND,
    CASES,
    MUON,
    OTHERS,
    ROWS,
    Divide,
    MuonOnOneRank,
    Trained,
    plan_and_case,
    train,
    train_on_one_rank,
    whole_weights,
)
from parity.woven import global_rows
from plait.engine import Engine
from plait.plan.layout import shard
from plait.plan.plan import Plan


def muon(engine: Engine, **options: Any) -> torch.optim.Optimizer:
    return plait.Muon(engine, **{**MUON, "dtype": torch.float64, "others": OTHERS, **options})


def check(
    pool: Any,
    case: Case,
    plan: Plan,
    divide: Divide = whole_weights,
    options: Mapping[str, Any] = MappingProxyType({}),
    choices: Mapping[str, Any] = MappingProxyType({}),
) -> Sequence[Trained]:
    """Compare with one rank; `options` are those of torch's, too, `choices` those of `plait.Muon` only."""
    make = partial(MuonOnOneRank, divide=divide, options={**MUON, **options})
    expected = train_on_one_rank(case, make, global_rows(plan))
    ranks = pool.run(train, case, plan, partial(muon, **options, **choices), ranks=plan.world)
    assert_equal(merged(ranks, "parameters"), expected, BOUND, "the value")
    return ranks


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_muon_equals_torchs_on_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    plan, case = plan_and_case(row)
    check_traffic(check(thread_ranks, case, plan), itemsize=8)


def experts(name: str, values: Tensor) -> Sequence[Tensor]:
    """Gate and up, and down, of each expert and of the shared one; routers are AdamW's."""
    if name.endswith("router.weight"):
        return []
    if "experts" in name or "shared" in name:
        each = values if values.dim() == 3 else values[None]
        return [one for expert in each for one in (expert.chunk(2) if "gate_up" in name else [expert])]
    return whole_weights(name, values)


def torchs_attention(name: str, values: Tensor) -> Sequence[Tensor]:
    """Query, key and value, which `nn.MultiheadAttention` joins in one weight."""
    if name.endswith("in_proj_weight"):
        return values.chunk(3)
    return [values] if name.endswith("out_proj.weight") else []


def columns_of_gpt2(name: str, values: Tensor) -> Sequence[Tensor]:
    """The weights of transformers' `Conv1D`, `[in, out]`, of which the first joins query, key and value."""
    if values.dim() < 2 or (".h." not in f".{name}" and "blocks" not in name):
        return []
    return [one.T for one in (values.chunk(3, dim=1) if "c_attn" in name else [values])]


def heads_apart(name: str, values: Tensor) -> Sequence[Tensor]:
    """Each head of a query, key or value by itself, in a Llama whose heads have 4 features."""
    joined = any(one in name for one in ("query.weight", "key.weight", "value.weight"))
    return values.split(4) if joined else whole_weights(name, values)


def nothing(name: str, values: Tensor) -> Sequence[Tensor]:
    return []


COEFFICIENTS = [(4.0, -6.0, 2.5), (3.5, -5.0, 2.0), (3.0, -3.2, 1.2)]
VARIANTS: dict[str, Any] = {
    "experts": (
        sparse_llama(layers=1, experts=3),
        {"dp": 4, "ep": 2, "strategy": "full"},
        experts,
        {"adjust_lr_fn": "match_rms_adamw"},
        {},
    ),
    "heads": (
        CASES["llama"],
        {"dp": 2, "tp": 2, "strategy": "full"},
        heads_apart,
        {"nesterov": False},
        {"per_head": True},
    ),
    "etp": (sparse_llama(), {"tp": 2, "dp": 2, "ep": 2, "etp": 2}, experts, {"momentum": 0.5}, {}),
    "in_proj": (
        case(models.attention, data.draw_tokens),
        {"dp": 2, "strategy": "full"},
        torchs_attention,
        {},
        {},
    ),
    "offload": (
        CASES["gpt2"],
        {"dp": 2, "strategy": "full", "offload": "full"},
        whole_weights,
        {"ns_steps": 3},
        {},
    ),
    "lora": (lora_cases.LLAMA, {"tp": 2, "pp": 2}, nothing, {}, {}),
    "zb-v": (
        CASES["gpt2"],
        {"pp": 2, "schedule": "zb-v", "microbatches": 4},
        whole_weights,
        {"ns_coefficients": COEFFICIENTS, "ns_steps": 3},
        {},
    ),
}
"""Case, plan, matrices, options that torch's has too, and options that it has not."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_muon_equals_torchs_for_joined_matrices_experts_and_other_options(
    thread_ranks: Any, name: str
) -> None:
    case, fields, *others = VARIANTS[name]
    check(thread_ranks, case, Plan(precision="fp64", **fields), *others)


@pytest.mark.full
@pytest.mark.transformers
def test_muon_equals_torchs_for_transposed_and_joined_weights_of_transformers(rank_pool: Any) -> None:
    check(
        rank_pool,
        huggingface_cases.case("gpt2"),
        Plan(tp=2, dp=2, strategy="full", precision="fp64"),
        columns_of_gpt2,
    )


def check_traffic(ranks: Sequence[Trained], itemsize: int) -> None:
    """Steps sent owners what they miss of their parts, and each rank what it holds of them."""
    held = {
        rank: {
            name: shard(indices_of(layout.shape), layout, one.coordinate)
            for name, layout in one.layouts.items()
            if name in one.parameters
        }
        for rank, one in enumerate(ranks)
    }
    sent = 0
    for part in ranks[0].parts:
        indices = indices_of(ranks[0].layouts[part.parameter].shape)[part.box.slices]
        counts = {
            rank: int(torch.isin(indices, of_rank[part.parameter]).sum())
            for rank, of_rank in held.items()
            if part.parameter in of_rank
        }
        sent += indices.numel() - counts[part.owner]  # each element once
        sent += sum(counts.values()) - counts[part.owner]  # to each copy
    for step in range(len(ranks[0].traffic)):
        kinds = [count for one in ranks for kinds in one.traffic[step].values() for count in kinds.items()]
        assert {kind for kind, _ in kinds} <= {"all_to_all"}
        assert sum(count.bytes for _, count in kinds) == sent * itemsize
        assert all(
            sum(count.calls for kinds in one.traffic[step].values() for count in kinds.values()) == 2
            for one in ranks
        )


def indices_of(shape: Sequence[int]) -> Tensor:
    """A number for each element."""
    return torch.arange(prod(shape)).view(*shape)
