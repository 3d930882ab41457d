"""What went wrong with tensor parallelism once, or could: each of it through the whole engine."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import plait
from parity.case import SEED, Case
from parity.cases import gpt2, with_values
from parity.parity import check_parity
from plait.engine import Engine
from plait.errors import CommunicationError, ModelError, PlanError
from plait.plan.plan import Plan
from plait.rules import Rule, column, entrance, row, vocabulary
from plait.tensor.losses import CrossEntropy

HIDDEN, CLASSES = 8, 13


def weave(model, rules, loss=plait.cross_entropy, **degrees) -> Engine:
    plan = Plan(precision="fp64", **degrees)
    return plait.parallelize(model, plan, plait.Mesh(plan), loss, rules=rules, seed=SEED)


def batch(rows=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, HIDDEN, generator=generator), torch.randint(
        CLASSES, (rows, 3), generator=generator
    )


class Inner(nn.Module):
    """A pair of linears behind a norm; `end` is applied to the sum."""

    def __init__(self, outputs=HIDDEN, end=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, outputs)
        self.end = end

    def forward(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))


class Softcap(nn.Module):
    """Logits that are bounded after the head."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return 5 * torch.tanh(self.output(x) / 5)


@with_values
def softcapped():
    model = nn.Sequential(Inner(), Softcap())
    model.rules = {"0.norm": entrance, "0.up": column, "0.down": row, "1.output": vocabulary}
    return model


@with_values
def frozen_region():
    model = nn.Sequential(Inner(), nn.Linear(HIDDEN, CLASSES))
    model[0].requires_grad_(False)
    model.rules = {"0.norm": entrance, "0.up": column, "0.down": row, "1": vocabulary}
    return model


@with_values
def biased_head():
    model = nn.Sequential(Inner(), nn.Linear(HIDDEN, CLASSES))
    model.rules = {"0.norm": entrance, "0.up": column, "0.down": row, "1": vocabulary}
    return model


def draw(rows, generator):
    inputs = torch.randn(rows, 3, HIDDEN, generator=generator)
    return inputs, torch.randint(CLASSES, (rows, 3), generator=generator)


@pytest.mark.parametrize("build", [softcapped, frozen_region, biased_head], ids=lambda build: build.__name__)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_users_models_with_rules_over_tp_equal_one_rank(thread_ranks, build, degrees):
    check_parity(
        thread_ranks, Case(build.__name__, build, draw), Plan(microbatches=2, precision="fp64", **degrees)
    )


class Doubled(CrossEntropy):
    """Knows nothing of parts, though its base does."""

    def total(self, output, targets):
        return 2 * super().total(output, targets)


def test_a_loss_that_overrides_only_total_equals_one_rank(thread_ranks):
    def mean(output, targets):
        return 2 * functional.cross_entropy(output.flatten(0, -2), targets.flatten())

    plain = gpt2()
    case = Case("doubled", plain.build, plain.draw, Doubled(), mean)
    check_parity(thread_ranks, case, Plan(tp=2, microbatches=2, precision="fp64"))


def losses_of_microbatches(degrees):
    engine = weave(biased_head(), biased_head().rules, microbatches=2, **degrees)
    loss = engine.forward_backward(*batch())
    return loss.item(), engine.microbatch_losses().tolist()


def test_losses_of_micro_batches_are_available_on_every_rank(thread_ranks):
    ((loss, losses),) = thread_ranks.run(losses_of_microbatches, {}, ranks=1)
    for degrees in ({"tp": 2}, {"pp": 2, "tp": 2}):
        ranks = thread_ranks.run(losses_of_microbatches, degrees, ranks=Plan(**degrees).world)
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0][0] == pytest.approx(loss, rel=1e-12)
        assert ranks[0][1] == pytest.approx(losses, rel=1e-12)


def other_tokens_on_each_rank(call):
    plan = Plan(tp=2)
    engine = plait.parallelize(gpt2().build(), plan, plait.Mesh(plan), plait.cross_entropy)
    tokens = torch.arange(8).view(2, 4) + engine.mesh.rank
    if call == "train":
        engine.forward_backward(tokens, tokens)
    else:
        engine.generate(tokens, 2)


@pytest.mark.parametrize(
    ("call", "told"), [("train", "a step on .* tokens"), ("generate", r"a prompt \(2, 4\) of tokens")]
)
def test_ranks_of_tp_with_other_tokens_are_refused(thread_ranks, call, told):
    with pytest.raises(CommunicationError, match=f"do not agree .*{told}"):
        thread_ranks.run(other_tokens_on_each_rank, call, ranks=2)


class Pool(Inner):
    """Never sums what it mixes over its cut features."""

    def forward(self, x):
        return x + self.up(self.norm(x)).mean(-1, keepdim=True)


def refused_in_a_rank(model, rules):
    weave(model, rules, tp=2).forward_backward(*batch())


def last_is_a_pair():
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Inner(outputs=16)).double()


def frozen_pool():
    return nn.Sequential(Pool().requires_grad_(False), nn.Linear(HIDDEN, CLASSES)).double()


@pytest.mark.parametrize(
    ("build", "rules", "told"),
    [
        (last_is_a_pair, {"1.norm": entrance, "1.up": vocabulary, "1.down": row}, "1: its output is whole"),
        (
            frozen_pool,
            {"0.norm": entrance, "0.up": column},
            "0: a value computed with up.weight, which is sharded over tp, is one",
        ),
    ],
    ids=["a pair cut by vocabulary", "a frozen region that is not summed"],
)
def test_rules_that_do_not_fit_are_refused(thread_ranks, build, rules, told):
    with pytest.raises(ModelError, match=told):
        thread_ranks.run(refused_in_a_rank, with_values(build)(), rules, ranks=2)


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("colum", {}, "a rule is of kind 'colum': choose one of entrance, column, row, vocabulary"),
        ("row", {"gather_output": True}, "a rule row has gather_output = True, which does not apply to it"),
        (
            "vocabulary",
            {"parts": "heads"},
            "a rule vocabulary has parts = 'heads', which does not apply to it",
        ),
        (
            "entrance",
            {"repeated": True},
            "a rule entrance has repeated = True, which does not apply to it: leave",
        ),
    ],
)
def test_a_rule_with_an_unknown_kind_or_option_is_refused(kind, options, told):
    with pytest.raises(PlanError, match=told):
        Rule(kind, **options)


def test_without_tensor_parallelism_nothing_is_asked_of_the_modules():
    model = gpt2().build()
    model.blocks[0].attention.query.register_forward_hook(lambda module, given, output: output)
    engine = plait.parallelize(model, Plan(), plait.Mesh(), plait.cross_entropy)
    engine.forward_backward(torch.arange(8).view(2, 4), torch.arange(8).view(2, 4))
