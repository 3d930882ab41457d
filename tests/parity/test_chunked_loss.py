"""The loss in chunks of rows of logits (`Plan.loss_rows`): the numbers of whole logits on one rank."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import plait
from parity import data, lora_cases, woven
from parity.case import Case
from parity.cases import GPT2_VOCAB, SMOOTHED, case, draw_contexts, gpt2, llama
from parity.norm import TOLERANCE, assert_equal
from parity.pairs import covering_rows
from parity.parity import check_parity
from plait.engine.blueprint import build_blueprint
from plait.errors import DataError, PlanError
from plait.plan.plan import Plan
from plait.rules import column, sequence, vocabulary
from plait.tensor.losses import CrossEntropy
from plait.tensor.microbatches import Microbatches


def ignoring(case: Case, **loss) -> Case:
    """The case with some targets that do not count, and another loss."""

    def draw(rows, generator):
        inputs, targets = case.draw(rows, generator)
        return inputs, targets.masked_fill(targets % 5 == 0, 0)

    return replace(case, draw=draw, **loss)


FAMILIES = {"gpt2": partial(gpt2, hidden=24, heads=12), "llama": partial(llama, heads=12, kv_heads=12)}
LOSSES = {
    "plain": lambda one: one,
    "smoothed": partial(ignoring, loss=SMOOTHED, mean=data.mean_smoothed),
    "z": partial(ignoring, loss=CrossEntropy(ignore_index=0, z_loss=0.1), mean=data.mean_with_z_loss),
}
FACTORS = {
    "family": tuple(FAMILIES),
    "loss": tuple(LOSSES),
    "loss_rows": (1, 5, 16, 1024),
    "tied": (True, False),
    "pp": (1, 2),
    "tp": (1, 2),
    "dp": (1, 2),
    "schedule": ("1f1b", "zb-h1"),
    "strategy": ("none", "full"),
    "reduce": ("last", "each"),
    "sequence_parallel": ("none", "regather"),
    "recompute": ("none", "selective", "full"),
}
"""A micro-batch has 2 rows of 8 tokens; chunks of 5 leave one token over."""
OF_PLAN = tuple(FACTORS)[2:]


def allowed(row):
    """Sequences are cut between ranks of tp."""
    return row.get("tp", 2) > 1 or row.get("sequence_parallel", "none") == "none"


def identify(row):
    return "-".join(value if isinstance(value, str) else f"{name}{value}" for name, value in row.items())


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=identify)
def test_loss_in_chunks_trains_as_one_rank_for_every_pair_of_factors(thread_ranks, row):
    one = LOSSES[row["loss"]](FAMILIES[row["family"]](tied=row["tied"]))
    fields = {name: row[name] for name in OF_PLAN if name != "tied"}
    check_parity(thread_ranks, one, Plan(**fields, microbatches=3, precision="fp64"))


def freezing(prefixes: str) -> nn.Module:
    """Tokens to logits, by layers without parameters and with; those with these names do not learn."""
    model = nn.Sequential(
        nn.Embedding(GPT2_VOCAB, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, GPT2_VOCAB)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes.split())))
    return model


@pytest.mark.parametrize("frozen", ["", "3.weight", "3", "0 1 2"], ids=["none", "weight", "last", "others"])
def test_loss_in_chunks_takes_a_plain_linear_with_bias_as_the_last_layer(thread_ranks, frozen):
    """Its input is what the layer before it gave; nothing is computed for what is frozen."""
    one = case(partial(freezing, frozen or "none"), draw_contexts(GPT2_VOCAB), name="freezing")
    plan = Plan(pp=2, microbatches=2, loss_rows=5, schedule="zb-h1", precision="fp64")
    check_parity(thread_ranks, one, plan)


def test_loss_in_chunks_trains_lora_adapters_as_one_rank(thread_ranks):
    plan = Plan(pp=2, tp=2, microbatches=2, loss_rows=5, precision="fp64")
    check_parity(thread_ranks, lora_cases.GPT2, plan)


PLANS = {"stages": {"pp": 2, "dp": 2, "strategy": "full"}, "parts": {"pp": 2, "tp": 2}, "cp": {"cp": 2}}


def alike_in_a_rank(plan: Plan) -> None:
    """What an engine gives besides gradients is that of one with whole logits."""
    one = gpt2(layers=1, heads=4)
    engines = [woven.weave(one, replace(plan, loss_rows=rows)) for rows in (None, 5)]
    inputs, targets = woven.shares(one, engines[0], 1)[0]
    found = []
    for engine in engines:
        kinds = {
            "losses of micro-batches": (engine.forward_backward(inputs, targets), engine.microbatch_losses()),
            "evaluation": (engine.evaluate(inputs, targets),),
            "output": (engine.output(inputs), engine.output(inputs, whole=False)),
            "tokens": (engine.generate(inputs[:, :3], 3),),
        }
        kinds["gradients"] = tuple(tensor for _, tensor in engine.named_gradients())
        found.append({f"{kind} {i}": each for kind, all_ in kinds.items() for i, each in enumerate(all_)})
    assert_equal(found[1], found[0], TOLERANCE[torch.float64], "a result")


@pytest.mark.parametrize("name", PLANS)
def test_loss_in_chunks_gives_the_losses_outputs_and_tokens_of_whole_logits(thread_ranks, name):
    plan = Plan(**PLANS[name], microbatches=3, precision="fp64")
    thread_ranks.run(alike_in_a_rank, plan, ranks=plan.world)


def batch():
    """Inputs and targets of two rows."""
    return gpt2().batches(2, 1, torch.float64)[0]


def small(loss_rows, **fields):
    plan = Plan(loss_rows=loss_rows, **fields)
    return woven.weave(gpt2(), plan)


def test_loss_in_chunks_of_micro_batches_of_different_shapes_equals_whole_logits():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(GPT2_VOCAB, (rows, 9), generator=generator) for rows in (1, 3)]
    inputs, targets = (Microbatches(one[:, cut] for one in tokens) for cut in (slice(8), slice(1, 9)))
    engines = [small(rows, microbatches=2, precision="fp64") for rows in (None, 7)]
    losses = [engine.forward_backward(inputs, targets) for engine in engines]
    torch.testing.assert_close(*losses, rtol=1e-14, atol=0)
    assert_equal(*(dict(engine.named_gradients()) for engine in engines[::-1]), 1e-12, "the gradient")


def test_loss_in_chunks_in_bf16_is_as_precise_as_whole_logits():
    """The gradients are those of whole logits, up to what 16 bits round."""
    engines = [small(rows, precision="bf16", master_precision="fp32") for rows in (None, 5)]
    inputs, targets = batch()
    whole, chunks = (engine.forward_backward(inputs, targets) for engine in engines)
    torch.testing.assert_close(chunks, whole, rtol=1e-6, atol=0)  # both sums are in float32
    for one, other in zip(*(engine.parameters() for engine in engines), strict=True):
        assert one.grad.dtype == torch.float32
        assert (one.grad - other.grad).norm() <= 2.0**-8 * one.grad.norm()


def test_loss_in_chunks_refuses_targets_that_are_no_class():
    engine = small(5)
    inputs, targets = batch()
    for call in (engine.forward_backward, engine.evaluate):
        with pytest.raises(DataError, match=f"the target {GPT2_VOCAB} is no class"):
            call(inputs, targets.fill_(GPT2_VOCAB))


class Scaled(nn.Linear):
    """Logits that are not those of a linear."""

    def forward(self, x):
        return 2 * super().forward(x)


class Twice(nn.Module):
    """One linear called twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.linear(x))


class Doubled(Twice):
    """A linear, and what is made of its output."""

    def forward(self, x):
        return 2 * self.linear(x)


@pytest.mark.parametrize(
    ("last", "loss", "why"),
    [
        (
            nn.Linear(4, 4),
            nn.CrossEntropyLoss(),
            "the loss is total is cross_entropy.* give plait.cross_entropy",
        ),
        (Scaled(4, 4), plait.cross_entropy, "last layer '1' .Scaled. has no nn.Linear"),
        (Twice(), plait.cross_entropy, "1.linear is called 2 times"),
        (Doubled(), plait.cross_entropy, "output of the last layer '1' is not that of .* 1.linear"),
    ],
    ids=["loss", "subclass", "twice", "not the last operation"],
)
def test_a_last_layer_or_loss_that_cannot_be_computed_in_chunks_is_refused(last, loss, why):
    with pytest.raises(PlanError, match=f"plan.loss_rows is .*{why}"):
        one_step(last, loss)


def test_an_adapter_of_the_output_linear_is_refused_when_the_engine_is_made():
    model = plait.lora(gpt2(tied=False).build(), targets=["head.output"])
    with pytest.raises(PlanError, match=r"plan.loss_rows is 5, but head.output has a LoRA adapter"):
        build_blueprint(model, Plan(loss_rows=5))


def one_step(last, loss):
    plan = Plan(loss_rows=2)
    engine = plait.parallelize(nn.Sequential(nn.Linear(4, 4), last), plan, plait.Mesh(plan), loss)
    engine.forward_backward(torch.ones(3, 4), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (column, "the rule of 1 is column: give it the rule vocabulary"),
        (replace(vocabulary, gather_output=True), "the rule of 1 is vocabulary, gathered"),
        (sequence, "the last layer '1' runs on parts of the sequence to its end"),
    ],
    ids=["column", "gathered", "sequence"],
)
def test_a_linear_with_another_rule_is_refused(rule, why):
    plan = Plan(tp=2, loss_rows=2, sequence_parallel="keep")
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=why):
        build_blueprint(model, plan, {"0": sequence, "1": rule})


def calls_in_a_rank(plan: Plan) -> int:
    engine = woven.weave(gpt2(), plan)
    engine.forward_backward(*woven.shares(gpt2(), engine, 1)[0])
    return engine.traffic()["tp"]["all_reduce"].calls


def test_each_chunk_of_the_loss_makes_two_all_reduces_over_tp(thread_ranks):
    """Two, as a micro-batch of whole logits has; there are four chunks in each."""
    plan = Plan(tp=2, microbatches=3, precision="fp64")
    whole, chunks = (
        thread_ranks.run(calls_in_a_rank, replace(plan, loss_rows=rows), ranks=2)[0] for rows in (None, 5)
    )
    assert chunks - whole == 3 * 2 * (4 - 1)
