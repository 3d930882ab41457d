"""What sequence parallelism sends, counted exactly, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from parity import woven
from parity.case import ROWS, Case
from parity.cases import GPT2_CONTEXT, gpt2, llama
from parity.sequence_parts import of_length
from plait.plan.plan import Plan
from plait.ranks.group import Count, Counts

ITEM, HIDDEN, TP = 8, 16, 2
WHOLE = ROWS * GPT2_CONTEXT * HIDDEN * ITEM
"""Bytes of what flows between layers, of one micro-batch."""
PART = WHOLE // TP
FAMILIES = {"gpt2": gpt2, "llama": llama}


def traffic_in_a_rank(case: Case, plan: Plan) -> Counts:
    engine = woven.weave(case, plan)
    (batch,) = woven.shares(case, engine, 1)
    engine.forward_backward(*batch)
    counted = engine.traffic()
    engine.forward_backward(*batch)
    assert engine.traffic() == counted, "every step sends the same"
    return counted


def a_block(thread_ranks: Any, family: str, microbatches: int = 1, **settings: Any) -> dict[str, Count]:
    """What one more transformer block sends over `tp`, forward and backward."""
    plan = Plan(tp=TP, microbatches=microbatches, precision="fp64", **settings)
    few, many = (
        thread_ranks.run(traffic_in_a_rank, FAMILIES[family](layers=layers), plan, ranks=TP)
        for layers in (1, 2)
    )
    assert few[0]["tp"].keys() == many[0]["tp"].keys()
    assert few[0] == few[1]
    assert many[0] == many[1]
    return {kind: many[0]["tp"][kind] - few[0]["tp"][kind] for kind in few[0]["tp"]}


def sent(gathers: int, scatters: int, microbatches: int = 1) -> dict[str, Count]:
    gathers, scatters = gathers * microbatches, scatters * microbatches
    return {
        "all_gather": Count(gathers, gathers * PART),
        "reduce_scatter": Count(scatters, scatters * WHOLE),
    }


BLOCKS = {
    ("none", "none"): {"all_reduce": Count(4, 4 * WHOLE)},
    ("keep", "none"): sent(4, 4),  # into and out of two regions, there and back
    ("regather", "none"): sent(6, 4),  # once more for the weights of each region
    # A layer that runs again stops where all that its backward needs is there, which is before its last
    # reduce-scatter; so it only gathers again what enters.
    ("keep", "full"): sent(6, 4),
    ("regather", "full"): sent(8, 4),
    ("none", "full"): {"all_reduce": Count(4, 4 * WHOLE)},
}
"""By `sequence_parallel` and `recompute`."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compile", [False, "graphs"])
@pytest.mark.parametrize(("mode", "recompute"), BLOCKS)
def test_a_sequence_parallel_block_makes_the_listed_collectives(
    thread_ranks: Any, family: str, compile: Any, mode: Any, recompute: Any
) -> None:
    found = a_block(thread_ranks, family, sequence_parallel=mode, recompute=recompute, compile=compile)
    loss_and_head = found.pop("all_reduce", Count()) if mode != "none" else Count()
    assert loss_and_head == Count(), "a block has no all-reduce then"
    assert found == BLOCKS[mode, recompute]


@pytest.mark.parametrize("mode", ["keep", "regather"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_deferred_weight_gradients_gather_sequence_parallel_inputs_again(
    thread_ranks: Any, mode: str, overlap: bool, schedule: str
) -> None:
    """Where it waits, what row linears were given as a gradient is gathered again for it, too."""
    waits = schedule != "1f1b" or not overlap
    found = a_block(thread_ranks, "gpt2", 2, sequence_parallel=mode, overlap=overlap, schedule=schedule)
    found.pop("all_reduce")
    assert found == sent(4 if mode == "keep" else 8 if waits else 6, 4, microbatches=2)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", ["none", "full"])
def test_gradients_of_what_is_whole_are_summed_once_a_step(
    thread_ranks: Any, microbatches: int, strategy: Any
) -> None:
    """Of each unit, norms and biases in one; that the embedding's are whole, and summed by nobody."""
    plan = Plan(
        tp=TP, microbatches=microbatches, sequence_parallel="keep", precision="fp64", strategy=strategy
    )
    case = gpt2(layers=1, tied=False)
    summed = {"blocks.0.attention": 3 * HIDDEN, "blocks.0.mlp": 3 * HIDDEN, "head": 2 * HIDDEN}
    numbers = sum(summed.values()) * ITEM
    for counted in thread_ranks.run(traffic_in_a_rank, case, plan, ranks=TP):
        assert counted["copies"] == {"all_reduce": Count(len(summed), numbers)}
    (plain, _) = thread_ranks.run(
        traffic_in_a_rank, case, Plan(tp=TP, microbatches=microbatches, precision="fp64"), ranks=TP
    )
    assert "copies" not in plain


@pytest.mark.parametrize("length", [GPT2_CONTEXT, 7])
def test_stages_send_each_tp_ranks_part_of_the_sequence(thread_ranks: Any, length: int) -> None:
    sums = {}
    for mode in ("none", "keep"):
        plan = Plan(
            pp=2, tp=TP, microbatches=3, layers_per_stage=(2, 2), sequence_parallel=mode, precision="fp64"
        )
        case = of_length(gpt2(layers=1), length)
        ranks = thread_ranks.run(traffic_in_a_rank, case, plan, ranks=4)
        sums[mode] = [rank["pp"]["send"] for rank in ranks]
    position = ROWS * HIDDEN * ITEM
    assert sums["none"] == [Count(3, 3 * length * position)] * 4
    own = (length + 1) // 2, length // 2
    assert sums["keep"] == [Count(3, 3 * own[index % 2] * position) for index in range(4)]
