"""Inputs of tensor-parallel regions that are gathered in float8, and reductions of scales that are one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import woven
from parity.case import Case
from parity.cases import GPT2_CONTEXT, GPT2_VOCAB, draw_contexts
from parity.pairs import covering_rows, in_quick
from parity.rows import name_of
from plait.plan import rules
from plait.plan.plan import Plan
from plait.proof import layer_runs_on_meta
from plait.tensor.float8.recipes import RECIPES

HIDDEN, ROWS = 64, 2
ELEMENTS = ROWS * GPT2_CONTEXT * HIDDEN // 2
"""Of a rank's part of what is between layers, in a micro-batch."""
MODES: tuple[Any, ...] = ("keep", "regather")


def llama(*adapted: str) -> Case:
    """A Llama of one block, with adapters at the linears `adapted`."""

    def build() -> nn.Module:
        sizes = {"hidden": HIDDEN, "heads": 4, "kv_heads": 2, "inner": 128}
        model = plait.models.llama(layers=1, vocab=GPT2_VOCAB, context=GPT2_CONTEXT, **sizes)
        return plait.lora(model, rank=4, targets=list(adapted)) if adapted else model

    return Case("llama", build, draw_contexts(GPT2_VOCAB))


def numbers(plan: Plan) -> dict[str, Tensor]:
    """The loss and gradients of a batch, its loss in an evaluation."""
    engine = woven.weave(llama(), plan)
    ((inputs, targets),) = llama().batches(ROWS * plan.microbatches, 1, torch.float32)
    found = {"loss": engine.forward_backward(inputs, targets).clone()}
    found |= {name: one.clone() for name, one in engine.named_gradients()}
    return found | {"evaluated": engine.evaluate(inputs, targets)}


FACTORS = {
    "recipe": tuple(RECIPES),
    "mode": MODES,
    "recompute": ("none", "selective", "full"),
    "compiled": (False, "graphs"),
}


ROWS_FIRST = (
    {"recipe": "float8", "mode": "keep", "recompute": "none", "compiled": False},
    # Of graphs in bf16 that sum outputs in fp32, and whose weight gradients are products in bf16.
    {"recipe": "float8-rowwise-gw", "mode": "regather", "recompute": "none", "compiled": "graphs"},
)


@pytest.mark.parametrize(
    "row", in_quick(covering_rows(FACTORS, beginnings=ROWS_FIRST), ROWS_FIRST[0]), ids=name_of
)
def test_inputs_gathered_in_float8_have_the_bits_of_those_cast_after_the_gather(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    fields = {"sequence_parallel": row["mode"], "recompute": row["recompute"], "compile": row["compiled"]}
    plan = Plan(tp=2, linears=row["recipe"], precision="bf16", microbatches=2, **fields)
    found = thread_ranks.run(numbers, plan, ranks=2)
    monkeypatch.setattr(layer_runs_on_meta, "read_by_float8_only", lambda *given: ())
    for one, other in zip(found, thread_ranks.run(numbers, plan, ranks=2), strict=True):
        assert not one["loss"].isnan()
        assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def traffic(case: Case, plan: Plan, axis: str = "tp") -> dict[str, tuple[int, int]]:
    """Calls and bytes over an axis in a step of this rank, by kind."""
    engine = woven.weave(case, plan)
    engine.forward_backward(*case.batches(ROWS * plan.microbatches, 1, torch.float32)[0])
    return {kind: (one.calls, one.bytes) for kind, one in engine.traffic()[axis].items()}


def gathered(thread_ranks: Any, case: Case, plan: Plan) -> int:
    nbytes: int = thread_ranks.run(traffic, case, plan, ranks=2)[0]["all_gather"][1]
    return nbytes


@pytest.mark.parametrize(
    ("recipe", "mode", "compiled"),
    in_quick(product(RECIPES, MODES, (False, "graphs")), ("float8", "keep", False)),
)
def test_float8_regions_gather_half_the_bytes_of_16_bits(
    thread_ranks: Any, recipe: Any, mode: Any, compiled: Any
) -> None:
    """Of two regions, and their output gradients with one scale; of rows a scale travels for each token."""
    plan = Plan(tp=2, sequence_parallel=mode, precision="bf16", overlap=False, compile=compiled)
    saved = gathered(thread_ranks, llama(), plan)
    saved -= gathered(thread_ranks, llama(), replace(plan, linears=recipe))
    scales = 2 * 4 * ELEMENTS // HIDDEN
    expected = {
        ("float8", "keep"): 4 * ELEMENTS,
        ("float8", "regather"): 8 * ELEMENTS,
        ("float8-rowwise", "regather"): 6 * ELEMENTS - scales,
        ("float8-rowwise-gw", "regather"): 2 * ELEMENTS - scales,
    }
    if compiled and (recipe, mode) == ("float8-rowwise", "regather"):
        saved -= 2 * ELEMENTS  # graphs keep the casts of output gradients, which eager layers gather again
    assert saved == expected.get((recipe, mode), 0)


@pytest.mark.full
def test_compiled_layers_sum_as_many_bytes_over_tp_as_eager_ones(thread_ranks: Any) -> None:
    """So the gradients of a region's input are in fp32, also where regions are entered whole."""
    plan = Plan(tp=2, precision="bf16", linears="float8")
    eager, compiled = (
        thread_ranks.run(traffic, llama(), replace(plan, compile=how), ranks=2) for how in (False, "graphs")
    )
    assert compiled == eager


def test_a_region_input_that_an_adapter_reads_is_gathered_in_the_precision(thread_ranks: Any) -> None:
    plan = Plan(tp=2, sequence_parallel="keep", precision="bf16", linears="float8")
    both, one = (gathered(thread_ranks, llama(*names), plan) for names in (("*.query", "*.up"), ("*.query",)))
    assert both - one == ELEMENTS


REDUCTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"tp": 2}, 4),  # inputs of both row-parallel linears; gradients of q, k, v, and of gate, up
    "sequence": ({"tp": 2, "sequence_parallel": "keep"}, 8),  # both regions and their output gradients, too
    "cp": ({"cp": 2}, 8),  # four inputs; gradients of q, k, v, of the output, of gate, up, and of down
}


def calls(plan: Plan) -> int:
    """The all-reduces over `tp` or `cp` in a step of this rank."""
    return traffic(llama(), plan, "cp" if plan.cp > 1 else "tp").get("all_reduce", (0, 0))[0]


@pytest.mark.parametrize(
    ("name", "recipe", "compiled"),
    in_quick(
        [*product(REDUCTIONS, ("float8", "float8-rowwise"), (False,)), ("tp", "float8-rowwise", "graphs")],
        ("tp", "float8", False),
    ),
)
def test_a_block_reduces_scales_of_gradients_of_one_input_together_and_of_weights_once_a_step(
    thread_ranks: Any, name: str, recipe: Any, compiled: Any
) -> None:
    """What a second micro-batch adds, beside the sums that it has without float8."""
    fields, expected = REDUCTIONS[name]
    if (name, recipe) == ("sequence", "float8-rowwise"):  # whose parts have all features of a token
        expected = 4
    without = Plan(**fields, precision="bf16")
    plans = replace(without, linears=recipe, compile=compiled), without
    counts = [
        [thread_ranks.run(calls, replace(plan, microbatches=count), ranks=2)[0] for count in (1, 2)]
        for plan in plans
    ]
    (one, two), (first, second) = counts
    assert (two - one) - (second - first) == expected


class ReadsShort(nn.Module):
    """x + down(gelu(up(n))), n = norm(x); where n is short, something else reads it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        h = self.up(n)
        if n.shape[1] <= 5:
            h = h + n.mean()
        result: Tensor = x + self.down(nn.functional.gelu(h))
        return result


def losses_of_lengths(plan: Plan) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(37, 32), ReadsShort(), nn.Linear(32, 37)).double()
    given = {
        "*.norm": rules.entrance,
        "*.up": rules.column,
        "*.down": rules.row,
        "1": rules.sequence.along(1),
    }
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy, rules=given)
    found = []
    for length in (8, 5, 7):
        tokens = torch.randint(37, (2, length + 1), generator=torch.Generator().manual_seed(length))
        found.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:].contiguous()).item())
    return found


@pytest.mark.parametrize("compiled", in_quick((False, "graphs"), False))
def test_which_regions_are_gathered_in_float8_depends_on_the_shape(thread_ranks: Any, compiled: Any) -> None:
    (expected,) = thread_ranks.run(losses_of_lengths, Plan(linears="float8", precision="fp64"), ranks=1)
    plan = Plan(tp=2, sequence_parallel="keep", linears="float8", precision="fp64", compile=compiled)
    for found in thread_ranks.run(losses_of_lengths, plan, ranks=2):
        assert found == pytest.approx(expected, rel=1e-12)
