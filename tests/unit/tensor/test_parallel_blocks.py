"""Tensor-parallel MLP and attention for one's own loop, against full linears; what they send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from parallel_cases import assert_close, draw, whole
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import PlanError
from plait.plan.layout import Layout, assemble
from plait.ranks import Count, GridMesh, Group, Mesh
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor import TensorParallelAttention, TensorParallelMLP

HIDDEN, INNER, HEADS = 12, 24, 4
Made = Callable[[], nn.Module]


class FullMLP(nn.Module):
    def __init__(self, gated: bool, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias)
        self.gate = nn.Linear(HIDDEN, INNER, bias) if gated else None
        self.down = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(functional.gelu(up) if self.gate is None else functional.gelu(self.gate(x)) * up)


class FullAttention(nn.Module):
    def __init__(self, kv_heads: int, bias: bool, causal: bool) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.query, self.key, self.value = (
            nn.Linear(HIDDEN, n * size, bias) for n in (HEADS, kv_heads, kv_heads)
        )
        self.output = nn.Linear(HIDDEN, HIDDEN, bias)
        self.kv_heads, self.causal = kv_heads, causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (n, HIDDEN // HEADS)).transpose(1, 2)
            for linear, n in ((self.query, HEADS), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        key, value = (tensor.repeat_interleave(HEADS // self.kv_heads, dim=1) for tensor in (key, value))
        query, key = turned(query, key)
        scores = query @ key.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        return self.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def turned(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Depends on the position, as rotary angles do."""
    angles = torch.arange(query.shape[2], dtype=query.dtype)[:, None]
    return query * angles.cos(), key * angles.sin()


def cut_mlp(group: Group, mesh: GridMesh, gated: bool, bias: bool) -> nn.Module:
    return TensorParallelMLP(HIDDEN, INNER, group, gated=gated, bias=bias, dtype=torch.float64)


def cut_attention(group: Group, mesh: GridMesh, kv_heads: int, bias: bool, causal: bool) -> nn.Module:
    copies = mesh.neighbours("columns", group.size // kv_heads) if kv_heads < group.size else None
    return TensorParallelAttention(
        HIDDEN,
        HEADS,
        group,
        kv_heads=kv_heads,
        causal=causal,
        rotate=turned,
        copies=copies,
        bias=bias,
        dtype=torch.float64,
    )


CASES: list[tuple[Made, Callable[..., nn.Module]]] = [
    *(
        (partial(FullMLP, gated, bias), partial(cut_mlp, gated=gated, bias=bias))
        for gated in (False, True)
        for bias in (False, True)
    ),
    *(
        (
            partial(FullAttention, kv, bias, causal),
            partial(cut_attention, kv_heads=kv, bias=bias, causal=causal),
        )
        for kv, bias, causal in ((4, True, True), (2, True, False), (2, False, True), (1, True, True))
    ),
]


def seeded(make: Made) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def full(make: Made) -> nn.Module:
    """Made in float64, as the cut ones are."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return seeded(make)
    finally:
        torch.set_default_dtype(default)


def run(layer: nn.Module) -> tuple[Tensor, Tensor]:
    x = draw(2, 5, HIDDEN).requires_grad_()
    output = layer(x)
    output.backward(draw(2, 5, HIDDEN, seed=4))
    assert x.grad is not None
    return output.detach(), x.grad


def found_in_a_rank(ranks: int) -> list[Any]:
    mesh = GridMesh(rows=1, columns=ranks)
    group, found = mesh.group("columns"), []
    for _, cut in CASES:
        layer = seeded(partial(cut, group, mesh))
        before = mesh.traffic.snapshot()
        output, gradient = run(layer)
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        layouts = {
            f"{name}.{kind}": layout
            for name, module in layer.named_children()
            for kind, layout in module.layouts.items()
        }
        found.append((output, gradient, gradients, layouts, mesh.traffic.since(before)))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parallel_attention_and_mlp_equal_those_of_full_linears(thread_ranks: RankPool, ranks: int) -> None:
    answers = thread_ranks.run(found_in_a_rank, ranks, ranks=ranks)
    for number, (make, _) in enumerate(CASES):
        mine = [answer[number] for answer in answers]
        layer = full(make)
        output, gradient = run(layer)
        assert_close(whole([one[0] for one in mine], False), output, "output")
        assert_close(whole([one[1] for one in mine], False), gradient, "gradient of the input")
        largest = max(p.grad.abs().max() for p in layer.parameters() if p.grad is not None)
        for name, parameter in layer.named_parameters():
            layout: Layout = mine[0][3][name]
            got = assemble([one[2][name] for one in mine], layout)
            assert parameter.grad is not None
            # The gradient of the key's bias is noise around zero.
            bound = 1e-12 * max(float(parameter.grad.abs().max()), 1e-3 * float(largest))
            assert (got - parameter.grad).abs().max() <= bound, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_parallel_block_makes_one_all_reduce_forward_and_one_backward(
    thread_ranks: RankPool, ranks: int
) -> None:
    one = 2 * 5 * HIDDEN * 8
    for answers in thread_ranks.run(found_in_a_rank, ranks, ranks=ranks):
        for (make, _), (*_, sent) in zip(CASES, answers, strict=True):
            assert sent["columns"] == {"all_reduce": Count(2, 2 * one)}
            kv_heads = getattr(full(make), "kv_heads", ranks)
            assert sent.keys() == ({"columns", "copies"} if kv_heads < ranks else {"columns"})


def refused_in_a_rank() -> list[str]:
    mesh, told = Mesh(tp=4), []
    group, pair = mesh.group("tp"), mesh.neighbours("tp", 2)
    for make in (
        lambda: TensorParallelAttention(HIDDEN, HEADS, group, kv_heads=2),
        lambda: TensorParallelAttention(HIDDEN, HEADS, group, kv_heads=1, copies=pair),
        lambda: TensorParallelAttention(HIDDEN, HEADS, group, copies=pair),
        lambda: TensorParallelAttention(HIDDEN, HEADS, group, kv_heads=3),
        lambda: TensorParallelAttention(24, 6, group, kv_heads=3, copies=pair),
        lambda: TensorParallelMLP(HIDDEN, 6, group),
    ):
        with pytest.raises(PlanError) as caught:
            make()
        told.append(str(caught.value))
    return told


def test_parallel_blocks_refuse_heads_and_sizes_that_cannot_be_sharded(thread_ranks: RankPool) -> None:
    told = thread_ranks.run(refused_in_a_rank, ranks=4)[3]
    assert "ranks 2, 3 hold the same, but none are given: give copies=mesh.neighbours('tp', 2)" in told[0]
    assert "ranks 0, 1, 2, 3 hold the same, but copies are ranks 2, 3" in told[1]
    assert "each of 4 ranks of tp holds key and value heads of its own: leave copies out" in told[2]
    assert "4 heads and 3 of keys and values" in told[3]
    assert "each of 4 ranks" in told[4]
    assert "up with a weight of shape [6, 12] cannot be partitioned" in told[5]
