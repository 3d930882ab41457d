"""What blocks keep of a micro-batch with sequence parallelism: a share of what one rank keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

import plait
from parity.case import Case
from parity.cases import gpt2, llama
from parity.live_bytes import LiveBytes
from parity.pairs import in_quick
from parity.parity import check_parity
from plait.plan.plan import Plan
from plait.schedules.action import Kind
from plait.schedules.lowering.program import RunLayer

BLOCKS, ROWS, LENGTH, HIDDEN, VOCAB, ITEM = 2, 2, 32, 16, 64, 4
SIZES = {"layers": BLOCKS, "hidden": HIDDEN, "heads": 4, "vocab": VOCAB, "context": LENGTH}
WHOLE = ROWS * LENGTH * HIDDEN * ITEM
"""Bytes of a tensor that has all positions and features."""
LAYERS = 2 * BLOCKS
"""Attention and MLP."""


REPLICATED = {"gpt2": 0, "llama": BLOCKS * 2 * LENGTH * (HIDDEN // 4 // 2) * ITEM}
"""Sines and cosines: half a head's features a position, in each attention."""
BUILT = {"gpt2": gpt2, "llama": llama}
"""Of the cases that parity is tried on."""


def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


FAMILIES = {
    "gpt2": Case("gpt2", partial(plait.models.gpt2, **SIZES), draw),
    "llama": Case("llama", partial(plait.models.llama, **SIZES, kv_heads=4), draw),
}


def kept_in_a_rank(case: Case, plan: Plan) -> tuple[int, int]:
    """The bytes that the blocks hold after their forward, and between their `I` and `W`."""
    live = LiveBytes()
    with live:
        engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss)
        ((inputs, targets),) = case.batches(ROWS, 1, torch.float32)
        engine.forward_backward(inputs, targets)
        counts: dict[tuple[Kind, int], int] = {}

        def count(instruction: Any, _: Any) -> None:
            if isinstance(instruction, RunLayer):
                counts[instruction.action.kind, instruction.layer] = live.count()

        engine.observe(count)
        engine.forward_backward(inputs, targets)
    # Layer 0 is the embedding, the last one the head, whose weight work is done first.
    return counts[Kind.F, LAYERS] - counts[Kind.F, 0], counts[Kind.W, LAYERS + 1] - counts[Kind.W, 1]


Kept = Callable[..., tuple[int, int]]


@pytest.fixture(scope="module")
def kept(rank_pool: Any) -> Kept:
    """The most of any rank; what one rank keeps is measured once."""

    @cache
    def most(family: str, tp: int, **choices: Any) -> tuple[int, int]:
        plan = Plan(tp=tp, schedule="zb-h1", precision="fp32", **choices)
        ranks = rank_pool.run(kept_in_a_rank, FAMILIES[family], plan, ranks=tp)
        return max(forward for forward, _ in ranks), max(waiting for _, waiting in ranks)

    return most


@pytest.mark.full
@pytest.mark.parametrize(("family", "tp"), in_quick(product(FAMILIES, (2, 4)), ("gpt2", 2)))
def test_with_regather_a_rank_keeps_its_share_of_a_blocks_activations(
    kept: Kept, family: str, tp: int
) -> None:
    """Of Llama besides what is the same on every rank: sines and cosines of the positions."""
    forward, waiting = kept(family, 1)
    forward_part, waiting_part = kept(family, tp, sequence_parallel="regather")
    assert forward_part <= (forward - REPLICATED[family]) / tp + REPLICATED[family]
    assert waiting_part <= waiting / tp


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_with_keep_a_rank_also_holds_the_gathered_inputs_of_regions(kept: Kept, tp: int) -> None:
    """Of each layer what enters its region, and between `I` and `W` the gradient of what leaves it, too."""
    forward, waiting = kept("gpt2", 1)
    rest = WHOLE - WHOLE // tp
    expected = forward // tp + LAYERS * rest, waiting // tp + 2 * LAYERS * rest
    assert kept("gpt2", tp, sequence_parallel="keep") == expected


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_without_sequence_parallelism_norms_and_residuals_are_kept_whole(kept: Kept, tp: int) -> None:
    """Norms and residual connections: else the bound would say nothing."""
    forward, waiting = kept("gpt2", 1)
    forward_none, waiting_none = kept("gpt2", tp)
    assert forward_none > forward / tp + LAYERS * (WHOLE - WHOLE // tp)
    assert waiting_none > waiting / tp


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
def test_gradients_with_regathered_inputs_equal_those_of_one_rank(
    thread_ranks: Any, family: str, pp: int, tp: int
) -> None:
    """Also where weight work waits, and where rows of a micro-batch are few or its positions uneven."""
    plan = Plan(
        pp=pp, tp=tp, schedule="zb-h1", microbatches=2, precision="fp64", sequence_parallel="regather"
    )
    check_parity(thread_ranks, BUILT[family](heads=4), plan)
