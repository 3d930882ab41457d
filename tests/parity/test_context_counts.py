"""How often, and how many bytes, context parallelism sends; which bits come out, in which order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity import woven
from parity.case import Recipe
from parity.cases import gpt2, llama
from parity.contexts import documents, mixing, packed
from parity.pairs import in_quick
from parity.sequence_parts import of_length
from plait.plan.plan import Plan
from plait.ranks import Count
from plait.tensor.attention.block_attention import block_forward, empty_result, merge
from plait.tensor.attention.key_exchange_plan import Mask, exchange_plan, remembered_plan
from plait.tensor.running_sequence import ContextParallelism, running

LENGTH, ROWS, WIDTH = 24, 4, 4
"""Of a sequence; sequences of a step; features of a head. 24 positions divide by 2 · cp."""


def cp_traffic(heads: int, kv_heads: int, fields: dict[str, Any]) -> Count:
    """Of one step of two attention layers on one rank of `cp`, in a model without dropout."""
    plan = Plan(precision="fp64", microbatches=2, **fields)
    case = of_length(llama(layers=2, heads=heads, kv_heads=kv_heads), LENGTH)
    engine = plait.parallelize(of_context(case), plan, plait.Mesh(plan), case.loss)
    engine.forward_backward(*woven.shares(case, engine, 1)[0])
    found = engine.traffic()["cp"]["all_to_all"]
    assert isinstance(found, Count)
    return found


def of_context(case: Any) -> Any:
    model = case.build()
    model[0].context = LENGTH
    return model


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize(("mode", "units", "calls"), [("keep", 4, 2), ("none", 6, 3)])
def test_a_ring_makes_the_computed_number_of_bytes_and_calls(
    thread_ranks: Any, cp: int, mode: str, units: int, calls: int
) -> None:
    """Kept: 4 · kv_heads · width · n · (cp - 1) elements a layer, of which zigzag needs three quarters."""
    fields = {"cp": cp, "context_parallel": "ring", "sequence_parallel": mode}
    found = thread_ranks.run(cp_traffic, 12, 6, fields, ranks=cp)
    kept_by_all = units * 6 * WIDTH * (LENGTH // cp) * (cp - 1) * 8 * ROWS
    assert {count.calls for count in found} == {2 * 2 * calls}, "two micro-batches of two layers"
    assert sum(count.bytes for count in found) == 2 * 0.75 * kept_by_all * cp


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("recompute", "compile", "ring", "ulysses"),
    [
        ("selective", False, 3, 8),
        ("full", False, 4, 9),
        pytest.param("none", "graphs", 3, 6, marks=pytest.mark.full),
        pytest.param("selective", "graphs", 3, 6, marks=pytest.mark.full),
        ("full", "graphs", 4, 9),
    ],
)
def test_recomputed_attention_repeats_only_the_exchanges_that_it_did_not_keep(
    thread_ranks: Any, recompute: str, compile: Any, ring: int, ulysses: int
) -> None:
    """Selective recomputation keeps what attention gave, so that a ring sends nothing again for it.

    Graphs keep what it was given, too.
    """
    for method, calls in (("ring", ring), ("ulysses", ulysses)):
        fields = {"cp": 2, "context_parallel": method, "recompute": recompute, "compile": compile}
        assert thread_ranks.run(cp_traffic, 12, 12, fields, ranks=2)[0].calls == 4 * calls


@pytest.mark.parametrize(("cp", "kv_heads"), [(2, 6), (3, 6), (4, 3)])
def test_ulysses_makes_the_computed_number_of_bytes_and_calls(
    thread_ranks: Any, cp: int, kv_heads: int
) -> None:
    """Queries, keys with values, and outputs, each forward and backward; keys and values as heads ask.

    Outputs go once more in the backward, as they are not kept by heads.
    """
    found = thread_ranks.run(cp_traffic, 12, kv_heads, {"cp": cp, "context_parallel": "ulysses"}, ranks=cp)
    copies = 6 if kv_heads == 3 else kv_heads  # of 3 heads, 4 ranks read 1, 2, 2 and 1
    elements = (4 * (12 + copies) + 12) * WIDTH * (LENGTH // cp) * (cp - 1) / cp
    assert {count.calls for count in found} == {2 * 2 * 6}
    assert sum(count.bytes for count in found) == 2 * elements * 8 * ROWS * cp


def test_auto_takes_the_one_of_ring_and_ulysses_that_sends_less(thread_ranks: Any) -> None:
    """Kept, Ulysses sends less from cp > heads / kv_heads + 1 on."""
    for heads, kv_heads, cp, ulysses in ((12, 12, 2, False), (12, 12, 3, True), (12, 3, 4, False)):
        fields = {"cp": cp, "sequence_parallel": "keep"}
        calls = thread_ranks.run(cp_traffic, heads, kv_heads, fields, ranks=cp)[0].calls
        assert calls == 4 * (6 if ulysses else 2)


# ── bits ──


def attention_of_a_rank(kind: Any, length: int) -> tuple[Tensor, Tensor]:
    """This rank's attention; and the same by hand: its own block, then the other ranks' in their order."""
    mesh = plait.Mesh(cp=3)
    sequence = ContextParallelism(mesh.group("cp"), kind, "ring").sequence(length)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, length, 8, dtype=torch.float64, generator=generator)
    mine = mesh.index("cp")
    with running(sequence):
        found = plait.attention(*(sequence.layout.cut(one, mine, 2) for one in (query, key, value)))
    plan = exchange_plan(sequence, Mask(), query.device)
    own_query, out = sequence.layout.cut(query, mine, 2), None
    out, lse = empty_result(own_query, value)
    for rank in (mine, *(rank for rank in range(3) if rank != mine)):
        block = plan.peers[rank]
        calls, count = (plan.own, None) if block is None else (block.calls, block.received_count)
        keys, values = (sequence.layout.cut(one, rank, 2)[:, :, :count].contiguous() for one in (key, value))
        for call in calls:
            at = call.rows, slice(None), call.query
            parts = (one[call.rows, :, call.key] for one in (keys, values))
            merge(out[at], lse[at], *block_forward(own_query[at], *parts, call.mask, 1 / math.sqrt(8)))
    return found, out


@pytest.mark.parametrize("kind", ["striped", "contiguous"])
def test_blocks_are_merged_in_the_order_of_the_ranks(thread_ranks: Any, kind: str) -> None:
    """Own block first. Of striped and contiguous sequences a rank receives the first keys of its peers."""
    for found, expected in thread_ranks.run(attention_of_a_rank, kind, 20, ranks=3):
        assert torch.equal(found, expected)


def gradient_of_shared_values(method: Any, heads: int) -> Tensor:
    """Of values that all queries of four ranks weigh alike, one position each: 256, 1, 1 and 1 from them."""
    mesh = plait.Mesh(cp=4)
    sequence = ContextParallelism(mesh.group("cp"), "contiguous", method).sequence(4)
    query, key = (torch.zeros(1, count, 1, 8, dtype=torch.bfloat16) for count in (heads, 1))
    value = torch.zeros_like(key).requires_grad_()
    with running(sequence):
        output = plait.attention(query, key, value, causal=False)
    # With four heads each is on one rank of Ulysses.
    given = torch.zeros_like(output)
    given[:, :, 0] = torch.tensor([256.0, 1.0, 1.0, 1.0])[mesh.index("cp")] * 4 if method == "ring" else 0
    if method == "ulysses":
        given[0, :, 0] = torch.tensor([256.0, 1.0, 1.0, 1.0])[:, None]
    output.backward(given)
    assert value.grad is not None
    return value.grad


@pytest.mark.parametrize(("method", "heads"), [("ring", 1), ("ulysses", 4)])
def test_gradients_of_16_bits_are_summed_over_ranks_in_more(
    thread_ranks: Any, method: str, heads: int
) -> None:
    """In bfloat16 256 + 1 is 256; the sum of all four rounds to 260."""
    for found in thread_ranks.run(gradient_of_shared_values, method, heads, ranks=4):
        assert found.unique().tolist() == [260.0]


@pytest.mark.parametrize("method", in_quick(("ring", "ulysses"), "ring"))
def test_schedules_under_context_parallelism_give_the_same_bits(thread_ranks: Any, method: Any) -> None:
    case, runs = of_length(gpt2(heads=4), 7), []
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        plan = Plan(
            pp=2,
            cp=2,
            context_parallel=method,
            schedule=schedule,
            layers_per_stage=(3, 3),
            microbatches=3,
            precision="fp64",
        )
        runs.append(thread_ranks.run(woven.train, case, plan, Recipe(steps=2), ranks=4))
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert (other.losses, other.norms) == (first.losses, first.norms)
            assert all(
                torch.equal(other.parameters[name], first.parameters[name]) for name in first.parameters
            )


def outputs(plan: Plan, ids: Tensor, batches: list[Tensor]) -> list[Tensor]:
    case = packed(mixing(len(ids[0]), window=5), len(ids[0]))
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss)
    return [engine.output({"tokens": tokens, "document_ids": ids}) for tokens in batches]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cp": 2, "context_layout": "striped"},
        {"cp": 3, "context_parallel": "ring"},
        {"cp": 3, "context_parallel": "ulysses"},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_document_changes_no_bit_of_another(thread_ranks: Any, fields: Any, precision: Any) -> None:
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3], [4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5]])
    tokens = torch.randint(37, ids.shape, generator=torch.Generator().manual_seed(0))
    plan = Plan(precision=precision, **fields)
    for changed in (0, 2, 3, 4):
        other = torch.where(ids == changed, (tokens + 1) % 37, tokens)
        for before, after in thread_ranks.run(outputs, plan, ids, [tokens, other], ranks=plan.world):
            same = (before == after).all(-1)
            assert bool(same[ids != changed].all())
            assert not bool(same[ids == changed].any())


def test_positions_begin_anew_in_each_document(thread_ranks: Any) -> None:
    """As those of each document alone, on every rank."""
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3, 4]])

    def body() -> tuple[Tensor, Tensor]:
        from plait.engine.local_batch import cut, local_inputs

        mesh = plait.Mesh(cp=2)
        parallelism = ContextParallelism(mesh.group("cp"), "zigzag")
        local = local_inputs([{"tokens": ids, "document_ids": ids}], parallelism)
        with running(local.sequences[0]):
            found = plait.positions(local.values[0])
        alone = torch.stack(
            [torch.cat([torch.arange(len(one)) for one in documents(row, row)]) for row in ids]
        )
        expected: Tensor = cut(alone, local.sequences[0], "positions")
        return found, expected

    for found, expected in thread_ranks.run(body, ranks=2):
        assert torch.equal(found, expected)


# ── plans of exchanges ──


def builds_of_steps(plan: Plan, steps: list[list[list[int]]]) -> list[int]:
    """How many plans each step builds, with a micro-batch for each row of ids, in two layers of attention."""
    case, found = mixing(6, window=3), []
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss)
    remembered_plan.cache_clear()
    for rows in steps:
        before, ids = remembered_plan.cache_info().misses, torch.tensor(rows)
        engine.forward_backward({"tokens": ids, "document_ids": ids}, ids)
        found.append(remembered_plan.cache_info().misses - before)
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_plan_is_built_once_for_a_micro_batch(thread_ranks: Any, recompute: Any) -> None:
    """For all its layers, forward and backward; and not again for documents of equal lengths."""
    packed_rows = [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
    again = [[8, 9, 9, 9, 9, 9], [4, 4, 0, 0, 0, 0]]
    others = [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
    whole = [[0] * 6, [1] * 6]
    plan = Plan(microbatches=2, precision="fp64", recompute=recompute)
    steps = [packed_rows, again, others, whole, whole]
    assert thread_ranks.run(builds_of_steps, plan, steps, ranks=1) == [[2, 0, 1, 1, 0]]


# ── batches that a data loader has cut ──


def losses_and_outputs(plan: Plan, with_ids: bool) -> list[Tensor]:
    case = packed(mixing(11), 11)
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss)
    inputs, targets = woven.shares(case, engine, 1)[0]
    inputs = inputs if with_ids else inputs["tokens"]
    parts = [plait.sequence_part(one, plan, engine.mesh.index("cp")) for one in (inputs, targets)]
    found = []
    for batch in ((inputs, targets), parts):
        found += [engine.forward_backward(*batch), engine.evaluate(*batch), engine.output(batch[0])]
    return found


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_step_on_sequence_parts_gives_the_losses_of_a_step_on_whole_sequences(
    thread_ranks: Any, with_ids: bool
) -> None:
    plan = Plan(cp=2, microbatches=2, precision="fp64")
    for found in thread_ranks.run(losses_and_outputs, plan, with_ids, ranks=2):
        assert all(torch.equal(whole, part) for whole, part in zip(found[:3], found[3:], strict=True))
