"""Micro-batches of different shapes: every number equals that of one process which runs them in turn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import plait
from parity import packed
from parity.case import Batch
from parity.norm import TOLERANCE, assert_close, assert_equal
from parity.outcome import Outcome
from parity.packed import LOSS, RULES, Lengths, Single, microbatches
from parity.parity import merged
from parity.woven import gradients_of
from plait.engine import Engine
from plait.errors import CommunicationError, DataError, PlaitError, PlanError
from plait.plan.plan import Plan
from plait.ranks.handle import Handle
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.microbatches import Microbatches

TIGHT = TOLERANCE[torch.float64]
STEPS: Sequence[Lengths] = (
    ((3, 4), (5,), (1, 1, 2), (2, 9), (5,), (1,), (4,), (2, 2)),
    ((5,), (12,), (1,), (1,), (3, 2, 6), (5,), (12,), (1,)),
)
"""Of the global batch of each step."""


def make(**options: Any) -> Plan:
    return Plan(microbatches=8 // options.get("dp", 1), precision="fp64", **options)


POLICIES = ("1f1b", "zb-h1", "zb-v", "interleaved")
FEW = {"1f1b-pp4", "zb-h1-pp4", "interleaved-pp4"}
"""Left to the full run: their ranks run what others run too."""
PLANS = {f"{policy}-pp{pp}": make(pp=pp, schedule=policy) for policy in POLICIES for pp in (2, 4)} | {
    "one rank": make(),
    "tp": make(pp=2, tp=2, schedule="zb-h1"),
    "full": make(pp=2, dp=2, strategy="full", schedule="1f1b"),
    "full-each": make(dp=2, strategy="full", reduce="each"),
}
NAMES = [pytest.param(name, marks=[pytest.mark.full] if name in FEW else []) for name in PLANS]


def weave(plan: Plan) -> Engine:
    rules = RULES if plan.tp > 1 else None
    mesh = plait.Mesh(plan, timeout=20.0)
    return plait.parallelize(packed.build(), plan, mesh, loss=LOSS, rules=rules)


def share(engine: Engine, lengths: Lengths, seed: int) -> tuple[Microbatches, Microbatches]:
    """This data-parallel rank's micro-batches of a global batch."""
    count = engine.plan.microbatches
    first = engine.mesh.index("dp") * count
    inputs, targets = zip(*microbatches(lengths, seed)[first : first + count], strict=True)
    return Microbatches(inputs), Microbatches(targets)


def train_in_a_rank(plan: Plan) -> list[tuple[Outcome, float | None, list[float], Any]]:
    engine = weave(plan)
    results = []
    for seed, lengths in enumerate(STEPS):
        batch = share(engine, lengths, seed)
        outcome = Outcome(coordinate=engine.mesh.coordinate, layouts=dict(engine.layouts))
        evaluated = engine.evaluate(*batch).item() if seed else None
        outcome.losses.append(engine.forward_backward(*batch, input_gradients=True).item())
        outcome.gradients = gradients_of(engine)
        results.append((outcome, evaluated, engine.microbatch_losses().tolist(), engine.input_gradients()))
        for parameter in engine.parameters():
            parameter.grad.zero_()
    return results


@pytest.mark.parametrize("name", NAMES)
def test_steps_on_many_shapes_equal_one_process(thread_ranks: RankPool, name: str) -> None:
    plan, single = PLANS[name], Single()
    ranks = thread_ranks.run(train_in_a_rank, plan, ranks=plan.world)
    for step, lengths in enumerate(STEPS):
        batch = microbatches(lengths, step)
        loss, gradients, of_inputs = single.step(batch)
        each = [ranks[rank][step] for rank in range(plan.world)]
        found = merged([outcome for outcome, *_ in each], "gradients")
        assert_equal(found, gradients, TIGHT, f"step {step}: the gradient")
        for outcome, evaluated, losses, given in each:
            assert_close(outcome.losses[0], loss, TIGHT, f"the loss of step {step}")
            if evaluated is not None:
                assert_close(evaluated, loss, TIGHT, f"the evaluated loss of step {step}")
            first = outcome.coordinate["shard"] * plan.microbatches
            own = slice(first, first + plan.microbatches)
            check_losses(single, batch[own], losses)
            assert (given is None) == (outcome.coordinate["pp"] > 0)
            if given is not None:
                check_input_gradients(given, of_inputs[own])


def check_losses(single: Single, batch: Sequence[Batch], losses: Sequence[float]) -> None:
    for (inputs, targets), loss in zip(batch, losses, strict=True):
        if weight := LOSS.weight(targets):
            expected = (LOSS.total(single.model(inputs), targets) / weight).item()
            assert_close(loss, expected, TIGHT, "the loss of a micro-batch")


def check_input_gradients(given: Microbatches, expected: Sequence[Tensor]) -> None:
    assert len(given.values) == len(expected)
    of_weights = {}
    for number, (tokens, positions, mask, weights) in enumerate(given.values):
        assert tokens is positions is mask is None
        of_weights[str(number)] = weights
    wanted = {str(number): gradient for number, gradient in enumerate(expected)}
    assert_equal(of_weights, wanted, TIGHT, "the gradient of the weights of micro-batch")


# ── what it costs ──


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Every operation that this rank starts; of agreements those of each step, not of the 1st, 2nd, 4th …"""
    original = Handle.__init__

    def start(self: Handle[Any], begin: Any, finish: Any, awaited: str, group: Any, *peer: int) -> None:
        if group.transport is not None and "check of forward_backward" not in awaited:
            calls[f"{awaited.removeprefix('the ').split()[0]} over {group.name}"] += 1
        original(self, begin, finish, awaited, group, *peer)

    with patch.object(Handle, "__init__", start):
        yield


ALIKE: Lengths = [(7,)] * 4
TWO_KINDS: Lengths = [(7,), (3,), (7,), (3,)]
ALL_DIFFERENT: Lengths = [(2, 9), (3,), (7,), (1,)]


def count_in_a_rank(plan: Plan) -> tuple[list[Counter[str]], list[int], list[int]]:
    engine = weave(plan)
    counted, sent, buffers = [], [], []
    for lengths in (ALIKE, TWO_KINDS, ALL_DIFFERENT, ALL_DIFFERENT):
        calls: Counter[str] = Counter()
        with counting(calls):
            engine.forward_backward(*share(engine, lengths, seed=0))
        counted.append(calls)
        sent.append(engine.traffic().get("pp", {})["send"].bytes if plan.pp > 1 else 0)
        buffers.append(len(engine._runner.pipeline.exchange.pool.buffers))
    return counted, sent, buffers


@pytest.mark.parametrize(
    "options", [{"pp": 2}, {"pp": 2, "tp": 2, "schedule": "zb-v"}, {"dp": 2, "strategy": "full"}], ids=str
)
def test_the_number_of_collectives_does_not_depend_on_the_shapes(
    rank_pool: RankPool, options: dict[str, Any]
) -> None:
    plan = Plan(microbatches=4 // options.get("dp", 1), precision="fp64", **options)
    for counted, _, buffers in rank_pool.run(count_in_a_rank, plan, ranks=plan.world):
        first, *others = counted
        assert all(calls == first for calls in others), counted
        assert sum(first.values()) > 0
        assert len(set(buffers)) == 1, "there are as many buffers, whatever the shapes"
        if plan.pp > 1:
            assert first["consistency over pp"] == 1, "one consistency check"


def test_messages_of_packed_micro_batches_have_only_their_own_tokens(thread_ranks: RankPool) -> None:
    plan = Plan(pp=2, microbatches=4, precision="fp64")
    ranks = thread_ranks.run(count_in_a_rank, plan, ranks=2)
    hidden = packed.HIDDEN * 8
    for number, lengths in enumerate((ALIKE, TWO_KINDS, ALL_DIFFERENT)):
        tokens, pairs = sum(map(sum, lengths)), sum(sum(one) ** 2 for one in lengths)
        assert ranks[0][1][number] == tokens * (hidden + 8) + pairs, "hidden, positions and the mask"
        assert ranks[1][1][number] == tokens * hidden, "the gradient of hidden"


def remember_in_a_rank(plan: Plan) -> tuple[list[int], int]:
    """How many shapes each step infers, of steps with more shapes than are remembered beside its own."""
    engine, inferred = weave(plan), []
    with patch("plait.engine.runner.REMEMBERED_SHAPES", 3):
        for lengths in (STEPS[0], STEPS[0], STEPS[1], [(7,)] * 8, STEPS[0]):
            with patch.object(engine._runner, "_infer", wraps=engine._runner._infer) as infer:
                engine.forward_backward(*share(engine, lengths, seed=0))
            inferred.append(infer.call_count)
    return inferred, len(engine._runner._infos)


def test_shapes_are_inferred_once_however_many_a_step_has(rank_pool: RankPool) -> None:
    for inferred, remembered in rank_pool.run(remember_in_a_rank, make(pp=2), ranks=2):
        assert inferred == [5, 0, 1, 0, 2], "five lengths, none, a new one, none, what was forgotten"
        assert remembered == 5 + 1, "those of the step, and another that was not forgotten"


# ── what is refused ──


def refusals_in_a_rank() -> list[str]:
    engine = weave(Plan(microbatches=2, precision="fp64"))
    (x0, y0), (x1, y1) = microbatches(((3,), (4,)))
    some, one = Microbatches([x0, x1]), Microbatches([y0])
    both, whole = Microbatches([y0, y1]), torch.zeros(2, 3, dtype=torch.int64)
    messages = []
    for inputs, targets, kind in ((some, one, PlanError), (some, whole, DataError), (whole, both, DataError)):
        for call in (engine.forward_backward, engine.evaluate):
            with pytest.raises(kind) as caught:
                call(inputs, targets)
            messages.append(str(caught.value))
    engine.forward_backward(some, both)
    return messages


def test_targets_and_inputs_with_different_micro_batches_are_refused(thread_ranks: RankPool) -> None:
    told = refusals_in_a_rank()
    assert "the targets are 1 micro-batches, but the plan runs 2 a step" in told[0]
    assert "the targets are not Microbatches, but the others are" in told[2]
    assert "the inputs are not Microbatches, but the others are" in told[4]
    assert told[::2] == told[1::2]


def test_verify_and_memory_say_that_they_want_a_whole_batch() -> None:
    given = Microbatches([torch.zeros(1, 3, dtype=torch.int64)])
    model = plait.models.gpt2(layers=1, hidden=8, heads=1, vocab=5, context=4)
    told = r"the inputs are Microbatches, which only forward_backward, evaluate and output"
    with pytest.raises(DataError, match=told):
        plait.memory(model, Plan(), given)
    with pytest.raises(DataError, match=told):
        plait.verify(model, Plan(), given, given)
    with pytest.raises(DataError, match=r"the targets are Microbatches"):
        plait.memory(model, Plan(), torch.zeros(1, 3, dtype=torch.int64), given)
    with pytest.raises(DataError, match=r"the targets are Microbatches"):
        plait.verify(model, Plan(), torch.zeros(1, 3, dtype=torch.int64), given)


def disagree_in_a_rank(plan: Plan) -> str:
    """The last of many micro-batches is longer on rank 1."""
    engine = weave(plan)
    lengths = [(length,) for length in (3, 4, 5, 6, 7, 8, 9, 10 + engine.mesh.rank)]
    try:
        engine.forward_backward(*share(engine, lengths, seed=0))
    except CommunicationError as error:
        return str(error)
    return "nothing"


def test_ranks_that_pass_micro_batches_of_different_shapes_get_an_error(thread_ranks: RankPool) -> None:
    with pytest.raises(PlaitError) as caught:
        thread_ranks.run(raise_in_a_rank, make(pp=2), ranks=2)
    told = str(caught.value)
    assert re.search(r"the ranks of pp do not agree \(rank 0: a step on micro-batches of 8 shapes", told)


def raise_in_a_rank(plan: Plan) -> None:
    raise CommunicationError(disagree_in_a_rank(plan))


def empty_in_a_rank(plan: Plan) -> tuple[Outcome, float]:
    engine = weave(plan)
    outcome = Outcome(coordinate=engine.mesh.coordinate, layouts=dict(engine.layouts))
    outcome.losses.append(engine.forward_backward(*share(engine, EMPTY, seed=0)).item())
    outcome.gradients = gradients_of(engine)
    return outcome, 0.0


EMPTY: Lengths = ((3,), (0,), (5,), (0,))


def test_a_micro_batch_may_be_empty(thread_ranks: RankPool) -> None:
    plan = Plan(pp=2, microbatches=4, precision="fp64")
    outcomes = [outcome for outcome, _ in thread_ranks.run(empty_in_a_rank, plan, ranks=2)]
    loss, gradients, _ = Single().step(microbatches(EMPTY, 0))
    assert_equal(merged(outcomes, "gradients"), gradients, TIGHT, "the gradient")
    assert_close(outcomes[0].losses[0], loss, TIGHT, "the loss")
