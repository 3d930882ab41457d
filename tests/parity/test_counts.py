"""How much is communicated and kept: counted exactly, in float64."""

import pytest

from parity import woven
from parity.case import ROWS
from parity.cases import GPT2_CONTEXT, GPT2_VOCAB, USER_CASES, gpt2
from plait.plan.plan import Plan
from plait.ranks.group import Count

ITEM = 8
HIDDEN = 16
BY_NAME = {case.name: case for case in USER_CASES}
WEIGHT_OF_LOSS = Count(1, ITEM)
"""Over `dp`, once a step."""


def traffic_in_a_rank(case, plan):
    """The second step's traffic by axis and kind, and the gradients of this rank's parameters by name."""
    engine = woven.weave(case, plan)
    (batch,) = woven.shares(case, engine, 1)
    engine.forward_backward(*batch)
    engine.forward_backward(*batch)
    return engine.traffic(), woven.gradients_of(engine)


def steps(thread_ranks, case, plan):
    """Per rank: its coordinate along `pp`, the traffic of one step, its gradients."""
    ranks = thread_ranks.run(traffic_in_a_rank, case, plan, ranks=plan.world)
    return [(rank // plan.dp, *result) for rank, result in enumerate(ranks)]


def padded_bytes(gradients):
    """Parameters start at multiples of 16 elements."""
    return sum(-(-gradient.numel() // 16) * 16 for gradient in gradients) * ITEM


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_are_reduced_once(thread_ranks, schedule, tied):
    plan = Plan(pp=2, dp=2, schedule=schedule, microbatches=3, precision="fp64")
    table = "embedding.token.weight"
    for _, traffic, gradients in steps(thread_ranks, gpt2(tied=tied), plan):
        assert table in gradients or not tied
        alone = {name: gradient for name, gradient in gradients.items() if not (tied and name == table)}
        units = {name.rsplit(".", 2)[0] for name in alone}  # the layers: two more names follow
        expected = WEIGHT_OF_LOSS + Count(len(units), padded_bytes(alone.values()))
        assert traffic["dp"] == {"all_reduce": expected}
        if tied:
            assert traffic["tie"] == {"all_reduce": Count(1, padded_bytes([gradients[table]]))}
            assert gradients[table].shape == (GPT2_VOCAB, HIDDEN)
        else:
            assert "tie" not in traffic


def test_a_tie_within_a_stage_is_reduced_over_dp_once(thread_ranks):
    plan = Plan(dp=2, microbatches=2, precision="fp64")
    for _, traffic, gradients in steps(thread_ranks, gpt2(tied=True), plan):
        units = 7  # embedding, 2 × (attention, mlp), head, and the table
        assert traffic["dp"]["all_reduce"] == WEIGHT_OF_LOSS + Count(units, padded_bytes(gradients.values()))
        assert "tie" not in traffic


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "dp", "microbatches"), [(2, 1, 3), (4, 1, 5), (2, 2, 4)], ids=str)
def test_boundaries_carry_tokens_times_hidden_each_way(thread_ranks, pp, dp, microbatches, schedule):
    plan = Plan(pp=pp, dp=dp, schedule=schedule, microbatches=microbatches, precision="fp64")
    tokens = ROWS * microbatches * GPT2_CONTEXT
    one_way = Count(microbatches, tokens * HIDDEN * ITEM)
    for stage, traffic, _ in steps(thread_ranks, gpt2(tied=False), plan):
        neighbours = (stage > 0) + (stage < pp - 1)
        both_ways = one_way if neighbours == 1 else one_way + one_way
        assert traffic["pp"] == {"send": both_ways, "receive": both_ways}


def test_no_gradient_is_sent_to_a_frozen_first_stage(thread_ranks):
    case = BY_NAME["frozen_first"]
    plan = Plan(pp=2, layers_per_stage=(2, 3), microbatches=3, precision="fp64")
    (_, first, nothing), (_, last, gradients) = steps(thread_ranks, case, plan)
    assert not nothing
    assert gradients
    assert set(first["pp"]) == {"send"}
    assert set(last["pp"]) == {"receive"}
    assert first["pp"]["send"] == last["pp"]["receive"]


def test_one_rank_sends_nothing(thread_ranks):
    ((_, traffic, _),) = steps(thread_ranks, gpt2(), Plan(microbatches=3, precision="fp64"))
    assert traffic == {}


def buffers_in_a_rank(case, plan):
    engine = woven.weave(case, plan)
    for inputs, targets in woven.shares(case, engine, 2):
        engine.forward_backward(inputs, targets)
    return len(engine._runner.pipeline.exchange.pool.buffers)


def buffers(thread_ranks, schedule, microbatches):
    plan = Plan(pp=4, schedule=schedule, microbatches=microbatches, precision="fp64")
    return thread_ranks.run(buffers_in_a_rank, gpt2(), plan, ranks=plan.world)


def test_receive_buffers_do_not_grow_with_the_microbatches(thread_ranks):
    few, more, many = (buffers(thread_ranks, "1f1b", microbatches) for microbatches in (4, 8, 16))
    assert few == more == many
    assert max(few) <= 4 + 2  # as many as micro-batches in flight, and one ahead on each of two channels
    assert max(buffers(thread_ranks, "gpipe", 16)) > max(many)
