"""What else a step gives: losses per micro-batch, input gradients, evaluation, generated tokens."""

import pytest
import torch

from parity import woven
from parity.case import ROWS, rows_of
from parity.cases import GPT2_CONTEXT, USER_CASES, gpt2
from parity.norm import TOLERANCE, assert_close, assert_equal
from parity.reference import materialise
from plait.plan.plan import Plan
from plait.tensor.nested_values import map_tensors, tensors_of

BY_NAME = {case.name: case for case in USER_CASES}
TIGHT = TOLERANCE[torch.float64]
LAYOUTS = [
    Plan(pp=2, dp=2, microbatches=3, precision="fp64"),
    Plan(pp=4, microbatches=2, schedule="gpipe", precision="fp64"),
    Plan(dp=2, microbatches=2, precision="fp64"),
]


def identify(value):
    return f"pp{value.pp}-dp{value.dp}" if isinstance(value, Plan) else str(value)


def single_device(case, plan):
    """The plain model, and the first global batch of a plan."""
    (batch,) = case.batches(woven.global_rows(plan), 1, torch.float64)
    return materialise(case.build(), torch.float64), *batch


# ── losses per micro-batch ──


def losses_in_a_rank(case, plan):
    engine = woven.weave(case, plan)
    engine.forward_backward(*woven.shares(case, engine, 1)[0])
    return engine.mesh.index("dp"), engine.microbatch_losses().tolist()


@pytest.mark.parametrize("plan", LAYOUTS, ids=identify)
def test_losses_of_micro_batches_are_those_of_their_rows_on_one_rank(thread_ranks, plan):
    case = BY_NAME["weighted"]
    model, inputs, targets = single_device(case, plan)
    for dp, losses in thread_ranks.run(losses_in_a_rank, case, plan, ranks=plan.world):
        assert len(losses) == plan.microbatches
        for number, loss in enumerate(losses, dp * plan.microbatches):
            rows = number * ROWS, (number + 1) * ROWS
            expected = case.mean(model(rows_of(inputs, *rows)), rows_of(targets, *rows)).item()
            assert_close(loss, expected, TIGHT, f"the loss of micro-batch {number}")


# ── input gradients ──


def input_gradients_in_a_rank(case, plan):
    engine = woven.weave(case, plan)
    (batch,) = woven.shares(case, engine, 1)
    engine.forward_backward(*batch)
    assert engine.input_gradients() is None, "nobody asked for them"
    engine.forward_backward(*batch, input_gradients=True)
    return engine.mesh.index("pp"), engine.mesh.index("dp"), engine.input_gradients()


@pytest.mark.parametrize("plan", LAYOUTS, ids=identify)
@pytest.mark.parametrize("name", ["dictionary", "skips", "convolution", "frozen_first_vectors"])
def test_gradients_of_inputs_are_those_of_one_rank(thread_ranks, name, plan):
    case = BY_NAME[name]
    model, inputs, targets = single_device(case, plan)
    for tensor in tensors_of(inputs):
        tensor.requires_grad_(tensor.is_floating_point())
    case.mean(model(map_tensors(torch.clone, inputs)), targets).backward()
    expected = map_tensors(lambda tensor: tensor.grad, inputs)
    for pp, dp, gradients in thread_ranks.run(input_gradients_in_a_rank, case, plan, ranks=plan.world):
        if pp > 0:
            assert gradients is None
            continue
        rows = ROWS * plan.microbatches
        share = rows_of(expected, dp * rows, (dp + 1) * rows)
        assert_equal(named(gradients), named(share), TIGHT, f"on dp {dp}, the gradient of input")


def named(value):
    """The gradients of a tensor or a dictionary by name; what has none is left out."""
    items = value if isinstance(value, dict) else {"input": value}
    return {name: gradient for name, gradient in items.items() if isinstance(gradient, torch.Tensor)}


# ── evaluation ──


def evaluation_in_a_rank(case, plan):
    engine = woven.weave(case, plan)
    first, second = woven.shares(case, engine, 2)
    alone = engine.evaluate(*second).item()
    engine.forward_backward(*first)
    for module in engine._runner.modules[:1]:
        module.eval()
    before = woven.gradients_of(engine), modes(engine)
    after_step = engine.evaluate(*second).item()
    after = woven.gradients_of(engine), modes(engine)
    assert before[1] == after[1], "the modes changed"
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0]), "gradients changed"
    return alone, after_step


def modes(engine):
    return [child.training for module in engine._runner.modules for child in module.modules()]


@pytest.mark.parametrize("plan", LAYOUTS, ids=identify)
@pytest.mark.parametrize("name", ["moody", "attention", "ignored_targets"])
def test_evaluate_gives_the_loss_of_one_rank_before_and_after_a_step(thread_ranks, name, plan):
    case = BY_NAME[name]
    _, (inputs, targets) = case.batches(woven.global_rows(plan), 2, torch.float64)
    model = materialise(case.build(), torch.float64).eval()
    with torch.no_grad():
        expected = case.mean(model(inputs), targets).item()
    for alone, after_step in thread_ranks.run(evaluation_in_a_rank, case, plan, ranks=plan.world):
        assert_close(alone, expected, TIGHT, "the loss")
        assert after_step == alone


# ── generation ──


def generation_in_a_rank(case, plan, prompt, tokens, options):
    return woven.weave(case, plan).generate(prompt, tokens, **options)


def generated(thread_ranks, plan, prompt, **options):
    """What every rank generates, longer than the context; the same everywhere."""
    ranks = thread_ranks.run(
        generation_in_a_rank, gpt2(), plan, prompt, GPT2_CONTEXT, options, ranks=plan.world
    )
    assert all(torch.equal(ranks[0], tokens) for tokens in ranks)
    return ranks[0]


PROMPT = torch.tensor([[3, 1, 4], [1, 5, 36]])


@pytest.mark.parametrize("plan", LAYOUTS, ids=identify)
def test_greedy_generation_gives_the_tokens_of_one_rank(thread_ranks, plan):
    model = materialise(gpt2().build(), torch.float64)
    expected = PROMPT
    with torch.no_grad():
        for _ in range(GPT2_CONTEXT):
            logits = model(expected[:, -GPT2_CONTEXT:])[:, -1]
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generated(thread_ranks, plan, PROMPT, temperature=0), expected)
    first, second = expected[:, PROMPT.shape[1] :].tolist()
    ended = generated(thread_ranks, plan, PROMPT, temperature=0, stop=(first[0], second[2]))
    length = max(until(first, first[0], second[2]), until(second, first[0], second[2]))
    assert ended.shape[1] == PROMPT.shape[1] + length
    assert ended[0, PROMPT.shape[1] :].tolist() == [first[0]] * length


def generation_by_own_seed(case, plan, stop):
    engine = woven.weave(case, plan)
    dp = engine.mesh.index("dp")
    tokens = engine.generate(PROMPT[dp : dp + 1], GPT2_CONTEXT, seed=dp, stop=stop)
    return tokens[0, PROMPT.shape[1] :].tolist()


def test_ranks_that_gather_parameters_end_together(thread_ranks):
    """Each draws tokens of its own, and one's rows end first: the other still gathers its shards."""
    case, plan = gpt2(), Plan(dp=2, strategy="full", precision="fp64")
    first, second = thread_ranks.run(generation_by_own_seed, case, plan, (), ranks=2)
    stop = first[0], second[2]
    length = until(second, *stop)
    assert length > 1
    ended = thread_ranks.run(generation_by_own_seed, case, plan, stop, ranks=2)
    assert ended == [[first[0]] * length, second[:length]]


def until(tokens: list[int], *stop: int) -> int:
    """How many tokens there are until one of `stop`, with it."""
    return next(number for number, token in enumerate(tokens, 1) if token in stop)


@pytest.mark.parametrize("top_k", [None, 4], ids=str)
def test_drawn_tokens_are_the_same_in_every_layout(thread_ranks, top_k):
    options = {"temperature": 1.0, "top_k": top_k, "seed": 5}
    woven_tokens = generated(thread_ranks, LAYOUTS[0], PROMPT, **options)
    alone = generated(thread_ranks, Plan(precision="fp64"), PROMPT, **options)
    assert torch.equal(woven_tokens, alone)
    assert torch.equal(woven_tokens[:, :3], PROMPT)
    other = generated(thread_ranks, Plan(precision="fp64"), PROMPT, **{**options, "seed": 6})
    assert not torch.equal(alone, other)


# ── the optimizer's step ──


def stepped_in_a_rank(case, plan, at_once):
    engine = woven.weave(case, plan)
    optimizer = torch.optim.AdamW(engine.parameters())
    engine.forward_backward(*woven.shares(case, engine, 1)[0])
    if at_once:
        norm = engine.step(optimizer, 0.01)
    else:
        norm = engine.clip_grad_norm_(0.01)
        optimizer.step()
    return norm.item(), {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}


@pytest.mark.parametrize("plan", LAYOUTS, ids=identify)
def test_engine_step_gives_the_bits_of_clipping_then_stepping(thread_ranks, plan):
    runs = [
        thread_ranks.run(stepped_in_a_rank, gpt2(), plan, once, ranks=plan.world) for once in (True, False)
    ]
    for (norm, ours), (other, theirs) in zip(*runs, strict=True):
        assert norm == other
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
