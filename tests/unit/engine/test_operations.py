"""How many operations a step runs: on a GPU each is a kernel that the host starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity.kernels import Kernels
from parity.pairs import in_quick
from plait.models import gpt2, llama

BLOCKS, MICROBATCHES = 2, 3
SIZES: dict[str, Any] = {"layers": BLOCKS, "hidden": 64, "heads": 4, "vocab": 64, "context": 16}
MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "gpt2": lambda: gpt2(**SIZES),
    "llama": lambda: llama(kv_heads=2, **SIZES),
}
MASTERS = {"precision": "bf16", "master_precision": "fp32"}


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (MICROBATCHES, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def filled(model: nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model


def of_plain_torch(name: str, dtype: torch.dtype) -> Counter[str]:
    model = filled(MODELS[name]().to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with Kernels() as kernels:
            for rows, targets in zip(*(one.split(1) for one in batch()), strict=True):
                logits = model(rows).flatten(0, 1).float()
                (functional.cross_entropy(logits, targets.flatten()) / MICROBATCHES).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return kernels.names


def of_a_rank(name: str, options: dict[str, Any]) -> Counter[str]:
    plan = plait.Plan(microbatches=MICROBATCHES, **options)
    engine = plait.parallelize(filled(MODELS[name]()), plan, plait.Mesh(plan), plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
    for _ in range(2):
        with Kernels() as kernels:
            engine.forward_backward(*batch())
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()
    return kernels.names


def of_plait(name: str, ranks: int = 1, **options: Any) -> Counter[str]:
    """The operations of the first rank's second step."""
    return plait.launch(of_a_rank, name, options, ranks=ranks, ranks_as="threads")[0]


@pytest.mark.parametrize("name", in_quick(MODELS, "gpt2"))
def test_a_step_runs_fewer_operations_than_plain_torch(name: str) -> None:
    """In bf16 plain PyTorch has no fp32 masters; and what adds a bf16 product to fp32 on a CPU are two."""
    plain = of_plain_torch(name, torch.float32).total(), of_plain_torch(name, torch.bfloat16).total()
    assert of_plait(name).total() <= 0.95 * plain[0]
    assert of_plait(name, **MASTERS).total() <= 1.10 * plain[1]


@pytest.mark.parametrize("options", [{}, MASTERS])
def test_gradient_buffers_are_set_to_zero_once_and_none_is_copied_onto_itself(
    options: dict[str, Any],
) -> None:
    """Masters are copied to what layers use: a buffer for each layer, and one of the tied parameter.

    A CPU copies the first bf16 product of each weight to its fp32 gradient, and adds the others. The gradient
    of bf16 logits is copied to their place.
    """
    buffers, weights = 2 * BLOCKS + 2, 4 * BLOCKS + 1
    names = of_plait("gpt2", **options)
    assert (names["zero_"], names["_foreach_zero_"]) == (0, 1)
    assert names["copy_"] == (buffers + weights + MICROBATCHES if options else 0)
    assert names["add_"] == (weights * (MICROBATCHES - 1) if options else 0)


def test_biases_and_norms_of_a_microbatch_are_added_in_one_operation() -> None:
    names = of_plait("gpt2", **MASTERS)
    assert names["_foreach_add_"] == 2 * MICROBATCHES + 2, "the head runs apart; AdamW counts its steps"
    layers = 2 * BLOCKS + 1  # with biases or norms, the last norm's included: compiled ones run one by one
    compiled = of_plait("gpt2", compile="graphs")
    assert compiled["_foreach_add_"] == layers * MICROBATCHES + 1
    assert (compiled["zero_"], compiled["add_"]) == (0, 0), (
        "first products are written, others added by addmm_"
    )


FORWARD = 4 * BLOCKS * MICROBATCHES
"""Products with a bias in GPT-2: of query, key and value together, output, up, down."""


@pytest.mark.parametrize(
    ("options", "ranks", "products"),
    [
        ({}, 1, FORWARD),
        # Row-parallel linears add their bias after the sum.
        ({"tp": 2, "sequence_parallel": "regather"}, 2, FORWARD // 2),
        pytest.param({"dp": 2, "strategy": "full", "reduce": "each"}, 2, FORWARD, marks=pytest.mark.full),
        ({"cp": 2}, 2, 6 * FORWARD // 4),  # keys are sent while the query is computed
    ],
    ids=str,
)
def test_query_key_and_value_are_one_product(options: dict[str, Any], ranks: int, products: int) -> None:
    names = of_plait("gpt2", ranks, **options)
    assert names["addmm"] == products
