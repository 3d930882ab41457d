"""What a layer's backward runs again under recomputation: in plait, and to the end as other frameworks do."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.framework import PLAIT
from plait.prediction.layer_operations import LayerWork, StepShape, layer_work
from plait.prediction.operations import Elementwise, Product

DECODER = Decoder(
    layers=2, hidden=512, heads=8, vocab=1000, context=1024, kv_heads=4, gated=True, rotary=True
)


def works(framework: Any = PLAIT, **fields: Any) -> dict[str, LayerWork]:
    shape = StepShape(DECODER, Plan(precision="bf16", **fields), framework, rows=1)
    return {kind: layer_work(kind, shape) for kind in ("embedding", "attention", "mlp", "head")}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_full_repeats_neither_the_last_product_nor_the_sum_after_it(kind: str) -> None:
    fields = {"tp": 4, "sequence_parallel": "keep"}
    work = works(**fields)[kind]
    products = [one for one in work.forward if isinstance(one, Product)]
    assert [one for one in work.full.operations if isinstance(one, Product)] == products[:-1]
    assert [one.collective for one in work.full.transfers] == ["all-gather"]
    other = works(replace(PLAIT, recomputes_to_end=True), **fields)[kind]
    assert other.full.operations == other.forward == work.forward
    assert other.full.transfers == other.forward_transfers


def test_the_embedding_does_not_run_again_and_the_head_up_to_its_linear() -> None:
    """Where blocks are recomputed, the head is none."""
    fields = {"tp": 4, "sequence_parallel": "keep"}
    for again in (works(**fields)["embedding"].full, works(**fields)["embedding"].selective):
        assert not [*chain(again.operations, again.transfers, again.exchanges)]
    for again in (works(**fields)["head"].full, works(**fields)["head"].selective):
        assert [one.collective for one in again.transfers] == ["all-gather"]
        assert not [one for one in again.operations if isinstance(one, Product)]
    assert not works(replace(PLAIT, recomputes_blocks=True), **fields)["head"].full.transfers


@pytest.mark.parametrize(("method", "selective", "full"), [("ring", 0, 1), ("ulysses", 2, 3)])
def test_exchanges_of_contexts_that_run_again(method: str, selective: int, full: int) -> None:
    """Selective recomputation keeps attention's result, but not what Ulysses gave to it."""
    work = works(cp=2, context_parallel=method)["attention"]
    assert len(work.selective.exchanges) == selective
    assert len(work.full.exchanges) == full == len(work.forward_exchanges)


def test_norms_and_rotations_of_a_llama_are_several_operations_on_a_cpu() -> None:
    composing = replace(PLAIT, composes_operations=True)
    for kind, extra in (("attention", 5 + 12), ("mlp", 5 + 1)):  # of a norm, and of rotations or the gate
        counts = [_kernels(works(one)[kind]) for one in (PLAIT, composing)]
        assert counts[1] - counts[0] == extra
    gpt = replace(DECODER, biases=True, gated=False, rotary=False)
    shapes = [StepShape(gpt, Plan(), one, rows=1) for one in (PLAIT, composing)]
    assert layer_work("mlp", shapes[0]) == layer_work("mlp", shapes[1])


def _kernels(work: LayerWork) -> float:
    return sum(one.kernels for one in work.forward if isinstance(one, Elementwise))
