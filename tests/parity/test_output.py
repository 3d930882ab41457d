"""`engine.output` against the plain model in evaluation mode: every value, layout and option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import data, woven
from parity.case import ROWS, SEED, Case, rows_of
from parity.cases import GPT2_CONTEXT, GPT2_VOCAB, USER_CASES, case, gpt2, llama
from parity.layers import HIDDEN
from parity.norm import TOLERANCE, assert_equal
from parity.reference import materialise
from plait.errors import CommunicationError, DataError, PlaitError
from plait.plan.layout import divide
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.microbatches import Microbatches
from plait.tensor.nested_values import Value, tensors_of

TIGHT = TOLERANCE[torch.float64]
BY_NAME = {one.name: one for one in USER_CASES}


class PassesOn(nn.Module):
    """Gives what it received: a buffer that the next micro-batch is received into."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class WithMask(nn.Module):
    """A tensor of rows, and one whose dim 0 is something else."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.ones(5, device=x.device)


def passes_on() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), PassesOn(), PassesOn())


def with_mask() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), WithMask())


PASSES_ON, WITH_MASK = (case(build, data.draw_vectors) for build in (passes_on, with_mask))
ANY = [BY_NAME[name] for name in ("moody", "dictionary_to_the_end", "frozen_first", "buffers")]
LLAMA = llama(kv_heads=1)
RUNS: list[tuple[Plan, list[Case]]] = [
    (Plan(pp=2, dp=2, microbatches=3, strategy="full"), [*ANY, PASSES_ON]),
    (Plan(pp=4, microbatches=3, schedule="zb-h1"), [*ANY, PASSES_ON]),
    (Plan(pp=2, tp=2, microbatches=2, schedule="zb-v", sequence_parallel="keep"), [gpt2(), LLAMA]),
    (Plan(tp=2, dp=2, strategy="gradients", reduce="each"), [gpt2(tied=False), LLAMA]),
]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "auto")
STRATEGIES = ("none", "optimizer", "gradients", "full")


def outputs_in_a_rank(cases: list[Case], plan: Plan) -> list[dict[str, Any]]:
    """For each case the output in each way that it can be asked for, between two training steps."""
    found = []
    for one in cases:
        engine = woven.weave(one, plan)
        inputs, targets = woven.shares(one, engine, 1)[0]
        engine.forward_backward(inputs, targets)
        gradients = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
        answers = {
            "whole": engine.output(inputs),
            "parts": engine.output(inputs, whole=False),
            "at the end": engine.output(inputs, everywhere=False),
            "parts at the end": engine.output(inputs, whole=False, everywhere=False),
        }
        now = [p.grad for p in engine.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(gradients, now, strict=True))
        assert not any(t.requires_grad for value in answers.values() for t in tensors_of(value))
        is_last = engine.mesh.index("pp") == engine._runner.steps.schedule.rank_of[-1]
        found.append(
            {**answers, "dp": engine.mesh.index("dp"), "tp": engine.mesh.index("tp"), "last": is_last}
        )
    return found


def check(pool: RankPool, plan: Plan, cases: list[Case]) -> None:
    plan = replace(plan, precision="fp64")
    ranks = pool.run(outputs_in_a_rank, cases, plan, ranks=plan.world)
    for number, one in enumerate(cases):
        (batch,) = one.batches(woven.global_rows(plan), 1, torch.float64)
        model = materialise(one.build(), torch.float64).eval()
        rows = ROWS * plan.microbatches
        for rank in (answers[number] for answers in ranks):
            with torch.no_grad():
                expected = model(rows_of(batch[0], rank["dp"] * rows, (rank["dp"] + 1) * rows))
            what = f"the output of {one.name}"
            same(rank["whole"], expected, what)
            part = expected
            if plan.tp > 1:
                own = divide(GPT2_VOCAB, plan.tp)[rank["tp"]]
                part = expected[..., own.start : own.stop]
            same(rank["parts"], part, f"{what}, in parts")
            if rank["last"]:
                same(rank["at the end"], expected, f"{what}, at the end")
                same(rank["parts at the end"], part, f"{what}, in parts, at the end")
            else:
                assert rank["at the end"] is None
                assert rank["parts at the end"] is None


def same(actual: Value, expected: Value, what: str) -> None:
    assert type(actual) is type(expected), what
    assert not isinstance(actual, dict) or actual.keys() == expected.keys()
    pairs = [dict(enumerate(map(Tensor.double, tensors_of(value)))) for value in (actual, expected)]
    assert_equal(pairs[0], pairs[1], TIGHT, what)  # type: ignore[arg-type]


@pytest.mark.parametrize(("plan", "cases"), RUNS, ids=lambda value: "")
def test_the_engines_output_is_that_of_one_rank(
    thread_ranks: RankPool, plan: Plan, cases: list[Case]
) -> None:
    check(thread_ranks, plan, cases)


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engines_output_is_that_of_one_rank_for_every_schedule_and_strategy(
    thread_ranks: RankPool, schedule: Any, strategy: Any
) -> None:
    plan = Plan(pp=2, dp=2, tp=2, microbatches=4, schedule=schedule, strategy=strategy)
    check(thread_ranks, plan, [gpt2(), LLAMA])


# ── micro-batches of their own shapes ──

LENGTHS = ((2, 5), (1, 8), (3, 2))


def uneven_batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(GPT2_VOCAB, shape, generator=generator) for shape in LENGTHS]


def uneven_in_a_rank(plan: Plan) -> tuple[Any, Any]:
    engine = woven.weave(LLAMA, plan)
    output = engine.output(Microbatches(uneven_batch()))
    assert isinstance(output, Microbatches)
    prompt = uneven_batch()[0]
    # What `generate` takes for the likeliest token is the largest logit of the output.
    single = replace(plan, microbatches=1)
    again = plait.parallelize(LLAMA.build(), single, engine.mesh, LLAMA.loss, seed=SEED)
    logits = again.output(prompt)
    return output.values, (logits[:, -1].argmax(-1), again.generate(prompt, 1, temperature=0)[:, -1])


def test_output_of_micro_batches_is_a_tuple_and_agrees_with_generate(thread_ranks: RankPool) -> None:
    plan = Plan(pp=2, tp=2, microbatches=3, precision="fp64")
    model = materialise(LLAMA.build(), torch.float64).eval()
    with torch.no_grad():
        expected = [model(tokens) for tokens in uneven_batch()]
    for outputs, (likeliest, generated) in thread_ranks.run(uneven_in_a_rank, plan, ranks=4):
        for actual, wanted in zip(outputs, expected, strict=True):
            same(actual, wanted, "the output")
        assert torch.equal(likeliest, generated)


# ── what is refused, and what is sent ──


def refusals_in_a_rank() -> list[str]:
    told = []
    engine = woven.weave(WITH_MASK, Plan(pp=2, microbatches=2, precision="fp64"))
    inputs = torch.zeros(4, HIDDEN, dtype=torch.float64)
    cases: list[tuple[type[PlaitError], Value]] = [
        (DataError, inputs),
        (PlaitError, inputs[:3]),
        (PlaitError, Microbatches([inputs])),
        (CommunicationError, inputs[: 2 + 2 * engine.mesh.rank]),
    ]
    for kind, given in cases:
        with pytest.raises(kind) as caught:
            engine.output(given)
        told.append(str(caught.value))
    (x, mask), other = engine.output(Microbatches([inputs[:1], inputs[1:]])).values
    assert (x.shape, mask.shape, other[0].shape) == ((1, HIDDEN), (5,), (3, HIDDEN))
    return told


def test_outputs_without_a_row_for_each_input_are_refused(thread_ranks: RankPool) -> None:
    first, second = thread_ranks.run(refusals_in_a_rank, ranks=2)
    assert first == second
    assert "gives a tensor of shape [5] for a micro-batch of 2 rows" in first[0]
    assert "give the inputs as Microbatches" in first[0]
    assert "gives a tensor of shape [5] for a micro-batch of 1 rows" in first[1], "of three rows"
    assert "the inputs are 1 micro-batches, but the plan runs 2" in first[2]
    assert "do not agree" in first[3]


def traffic_in_a_rank() -> list[Any]:
    engine = woven.weave(gpt2(vocab=36), Plan(pp=2, tp=2, precision="fp64"))
    tokens = torch.zeros(ROWS, GPT2_CONTEXT, dtype=torch.int64)
    counted = []
    for whole in (True, False):
        before = engine.mesh.traffic.snapshot()
        engine.output(tokens, whole=whole)
        sent = engine.mesh.traffic.since(before)
        counted.append((sent["pp"]["broadcast"].bytes, sent["tp"].get("all_gather")))
    return counted


def test_sequence_parallel_outputs_are_gathered_after_the_last_stage(thread_ranks: RankPool) -> None:
    part = ROWS * GPT2_CONTEXT * 36 // 2 * 8
    for whole, parts in thread_ranks.run(traffic_in_a_rank, ranks=4):
        assert (whole[0], whole[1].calls, whole[1].bytes) == (part, 1, part)
        assert parts == (part, None)
