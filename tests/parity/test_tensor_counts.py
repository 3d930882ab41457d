"""What tensor parallelism sends, counted exactly, in float64."""

from collections import defaultdict
from functools import partial
from unittest.mock import patch

import pytest

from parity import woven
from parity.case import ROWS
from parity.cases import GPT2_CONTEXT, gpt2, llama
from parity.pairs import covering_rows, every_row
from plait.plan.plan import Plan
from plait.ranks.group import Count
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue

ITEM = 8
TOKENS = ROWS * GPT2_CONTEXT
"""Of one micro-batch."""
BLOCKS = 2
FAMILIES = {"gpt2": (partial(gpt2, layers=BLOCKS), 16), "llama": (partial(llama, layers=BLOCKS), 16)}
"""Each with its hidden size."""
FACTORS = {
    "family": tuple(FAMILIES),
    "tied": (True, False),
    "microbatches": (1, 3),
    "overlap": (True, False),
}


def traffic_in_a_rank(case, plan):
    engine = woven.weave(case, plan)
    (batch,) = woven.shares(case, engine, 1)
    engine.forward_backward(*batch)
    trained = engine.traffic()
    engine.forward_backward(*batch)
    assert engine.traffic() == trained, "every step sends the same"
    before = engine.mesh.traffic.snapshot()
    engine.evaluate(*batch)
    return trained["tp"], engine.mesh.traffic.since(before)["tp"]


COVERING = covering_rows(FACTORS)
REST = [row for row in every_row(FACTORS) if row not in COVERING]


def identify(row):
    tied, overlap = "tied" if row["tied"] else "untied", "overlap" if row["overlap"] else "defer"
    return f"{row['family']}-m{row['microbatches']}-{tied}-{overlap}"


@pytest.mark.parametrize(
    "row", [*COVERING, *(pytest.param(row, marks=pytest.mark.full) for row in REST)], ids=identify
)
def test_four_all_reduces_a_block_and_one_for_the_loss_after_the_maximum(thread_ranks, row):
    (build, hidden), microbatches, tied = FAMILIES[row["family"]], row["microbatches"], row["tied"]
    plan = Plan(tp=2, microbatches=microbatches, overlap=row["overlap"], precision="fp64")
    activation, number = Count(1, TOKENS * hidden * ITEM), Count(1, TOKENS * ITEM)

    def times(count, n):
        return Count(count.calls * n, count.bytes * n)

    forward = times(activation, 2 * BLOCKS) + activation  # attention and MLP; the embedding
    backward = times(activation, 2 * BLOCKS) + activation  # likewise; the head's input
    loss = number + Count(1, 2 * number.bytes)  # the maximum; sum and target's logit in one
    for trained, evaluated in thread_ranks.run(traffic_in_a_rank, build(tied=tied), plan, ranks=2):
        assert trained == {"all_reduce": times(forward + backward + loss, microbatches)}
        assert evaluated == {"all_reduce": times(forward + loss, microbatches)}


def test_each_stage_all_reduces_for_its_own_layers_only(thread_ranks):
    plan = Plan(pp=2, tp=2, microbatches=3, layers_per_stage=(3, 3), precision="fp64")
    activation = TOKENS * 16 * ITEM
    ranks = thread_ranks.run(traffic_in_a_rank, gpt2(layers=BLOCKS), plan, ranks=4)
    first, last = ranks[0][0]["all_reduce"], ranks[2][0]["all_reduce"]
    assert first == Count(3 * 5, 3 * 5 * activation)  # embedding, attention and MLP both ways
    assert last == Count(3 * 7, 3 * (5 * activation + 3 * TOKENS * ITEM))  # both ways, the head, the loss
    assert ranks[1] == ranks[0]
    assert ranks[3] == ranks[2]


def waiting_at_each_sum(thread_ranks, **options):
    """Per rank, how many weight gradients each sum over `tp` in a backward finds, to compute meanwhile."""
    waiting, overlap = defaultdict(list), WeightGradientQueue.overlap

    def products(entry):  # those of compiled linears that read one tensor wait together
        return len(entry.func.__self__.terms) if hasattr(entry.func, "__self__") else 1

    def note(queue):
        if queue.mode.overlaps:
            waiting[id(queue)].append(sum(map(products, queue.pending)))
        overlap(queue)

    plan = Plan(tp=2, microbatches=2, precision="fp64", **options)
    with patch.object(WeightGradientQueue, "overlap", note):
        thread_ranks.run(traffic_in_a_rank, gpt2(layers=BLOCKS), plan, ranks=2)
    return list(waiting.values())


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "keep"])
def test_the_same_products_overlap_a_sum_in_compiled_layers(thread_ranks, mode):
    options = {"sequence_parallel": mode}
    eager = waiting_at_each_sum(thread_ranks, **options)
    assert waiting_at_each_sum(thread_ranks, compile="graphs", **options) == eager
    assert len(eager) == 2
    assert sum(eager[0]) > 0
