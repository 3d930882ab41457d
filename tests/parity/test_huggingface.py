"""Models of transformers: the adapter against their own forward, and woven runs against one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import plait
from parity import huggingface_cases as cases
from parity.norm import assert_close, assert_equal
from parity.pairs import in_quick
from parity.parity import check_parity
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report

pytestmark = pytest.mark.transformers


@pytest.fixture
def norms_in_float64() -> Iterator[None]:
    with cases.norms_in_float64():
        yield


def step(model: nn.Module, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token, with gradients in `model`, all in float64."""
    model.zero_grad()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", cases.MODELS)
def test_the_layers_compute_what_the_model_computes(name: str, request: pytest.FixtureRequest) -> None:
    if name in (*("gemma2", "olmo2"), *cases.SPARSE):  # here in float64: scores, norms of all heads, routers
        request.getfixturevalue("norms_in_float64")
    model = cases.drawn(cases.MODELS[name])
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(cases.GPT2_VOCAB, (3, cases.GPT2_CONTEXT), generator=generator)
    theirs = model(input_ids=tokens, labels=tokens)
    step(model, theirs.logits, tokens)
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    sequence = plait.models.from_huggingface(model)
    logits = sequence(tokens)
    loss = step(model, logits, tokens)
    names = sequence.huggingface_names
    gradients = {names[key]: parameter.grad for key, parameter in sequence.named_parameters()}
    assert_equal({"logits": logits.detach()}, {"logits": theirs.logits.detach()}, 1e-12, "the value")
    # Their loss is computed in single precision.
    assert_close(float(loss), float(theirs.loss.detach()), 1e-6, "the loss")
    assert_equal(gradients, expected, 1e-12, "the gradient")


WOVEN = {
    "one": Plan(microbatches=2, precision="fp64"),
    "tp": Plan(tp=2, microbatches=2, precision="fp64"),
    "zb-v with tp": Plan(pp=2, tp=2, schedule="zb-v", microbatches=4, precision="fp64"),
    "full shards": Plan(dp=2, strategy="full", microbatches=2, precision="fp64"),
    "everything": Plan(
        pp=2, tp=2, dp=2, strategy="full", reduce="each", recompute="full", microbatches=3, precision="fp64"
    ),
}
FAMILIES = ("gpt2", "llama", "qwen2", "mistral", "gpt-neox")
NEW = ("qwen3", "gemma2", "gemma3", "phi3", "olmo2", "smollm3")
"""Families that the layers of Llama serve, with what they declare."""


QUICK = (
    *(("gpt2", "zb-v with tp"), ("llama", "full shards"), ("qwen2", "tp"), ("mistral", "one")),
    *(("gpt-neox", "everything"), ("llama", "everything")),
)
"""Each family and each plan once, and Llama with everything; the full run has all."""


@pytest.mark.parametrize(("name", "plan"), in_quick(product(FAMILIES, WOVEN), *QUICK))
def test_models_of_transformers_train_as_one_rank_on_every_plan(
    thread_ranks: RankPool, name: str, plan: str
) -> None:
    check_parity(thread_ranks, cases.case(name), WOVEN[plan])


MORE_WOVEN = WOVEN | {
    "shards": Plan(tp=2, microbatches=2, sequence_parallel="regather", precision="fp64"),
    "repeated": Plan(tp=4, microbatches=2, precision="fp64"),
}
MORE_QUICK = (("qwen3", "shards"), ("phi3", "everything"), ("olmo2", "tp"))
"""Each kind of rule once."""


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(*row, marks=[] if row in MORE_QUICK else pytest.mark.full)
        for row in product(NEW, MORE_WOVEN)
        if row != ("phi3", "repeated")
    ],
)
def test_families_without_code_of_their_own_train_as_one_rank(
    thread_ranks: RankPool, name: str, plan: str
) -> None:
    check_parity(thread_ranks, cases.case(name), MORE_WOVEN[plan])


SPARSE_WOVEN = MORE_WOVEN | {
    "pipeline": Plan(pp=2, schedule="zb-h1", microbatches=4, precision="fp64"),
    "copies": Plan(dp=2, microbatches=2, precision="fp64"),
    "experts": Plan(dp=2, ep=2, microbatches=2, strategy="full", precision="fp64"),
    "experts over tp": Plan(tp=2, ep=2, microbatches=2, precision="fp64"),
    "parts of experts": Plan(dp=2, tp=2, ep=2, etp=2, microbatches=2, precision="fp64"),
}
SPARSE_QUICK = (
    *(("mixtral", "pipeline"), ("mixtral", "full shards"), ("qwen2-moe", "shards")),
    *(("qwen2-moe-partly-dense", "everything"), ("qwen3-moe-partly-dense", "experts over tp")),
    *(("qwen3-moe", "experts"), ("olmoe", "copies"), ("olmoe", "parts of experts")),
)


@pytest.mark.quick_cases(3)
@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize(("name", "plan"), in_quick(product(cases.SPARSE, SPARSE_WOVEN), *SPARSE_QUICK))
def test_mixtures_of_experts_of_transformers_train_as_one_rank(
    thread_ranks: RankPool, name: str, plan: str
) -> None:
    check_parity(thread_ranks, cases.case(name), SPARSE_WOVEN[plan])


def test_heads_in_one_linear_are_not_repeated(thread_ranks: RankPool) -> None:
    with pytest.raises(PlanError, match=r"blocks of 4, 2, 2 parts \(heads\) do not divide into 4; set tp"):
        check_parity(thread_ranks, cases.case("phi3"), MORE_WOVEN["repeated"])


@pytest.mark.parametrize("name", in_quick(("llama", "qwen2"), "qwen2"))
def test_heads_of_keys_and_values_are_repeated(thread_ranks: RankPool, name: str) -> None:
    check_parity(thread_ranks, cases.case(name), Plan(tp=4, microbatches=2, precision="fp64"))


SEEN_ELSEWHERE = (*NEW, "llama-scaled", "gpt-neox-in-turn")
"""What does not change how layers are cut, or in quick rows of another test."""


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name.startswith(SEEN_ELSEWHERE) else [])
        for name in sorted(set(cases.MODELS) - set(FAMILIES) - set(NEW) - set(cases.SPARSE))
    ],
)
def test_variants_of_transformers_configurations_train_as_one_rank(thread_ranks: RankPool, name: str) -> None:
    check_parity(thread_ranks, cases.case(name), Plan(pp=2, tp=2, microbatches=2, precision="fp64"))


VERIFIED = Plan(pp=2, tp=2, schedule="zb-h1", microbatches=2)


@pytest.mark.full
@pytest.mark.parametrize("name", [*FAMILIES, *NEW, *cases.SPARSE])
def test_verify_finds_models_of_transformers_equal(thread_ranks: RankPool, name: str) -> None:
    verify(thread_ranks, cases.MODELS[name](), VERIFIED)


@pytest.mark.full  # `test_huggingface_contexts.py` verifies one with dropout in the quick run
@pytest.mark.parametrize(("name", "mode"), [*product(cases.DROPPING, ("none", "keep", "regather"))])
def test_verify_finds_models_of_transformers_with_dropout_equal(
    thread_ranks: RankPool, name: str, mode: Any
) -> None:
    model = cases.DROPPING[name]()
    assert model.training
    verify(thread_ranks, model, replace(VERIFIED, schedule="zb-v", recompute="full", sequence_parallel=mode))


def verify(thread_ranks: RankPool, theirs: nn.Module, plan: Plan) -> None:
    inputs, targets = cases.draw_contexts(cases.GPT2_VOCAB)(8, torch.Generator().manual_seed(3))
    model = plait.models.from_huggingface(theirs)
    case = Case(model, plait.cross_entropy, [(inputs, targets)] * 2, VerifyOptions())
    report = build_report(thread_ranks.run(verify_rank, case, plan, ranks=plan.world), plan, case.options)
    assert report, report


def evaluated(
    name: str, plan: Plan, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """On a rank: the mean loss, and how a prompt goes on."""
    model = plait.models.from_huggingface(cases.drawn(cases.MODELS[name]))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    loss = engine.evaluate(inputs, targets)
    return float(loss), engine.generate(inputs[:, :3], 5, temperature=0.0)


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("name", in_quick(("gpt2", "mistral", *NEW, *cases.SPARSE), "mistral", "qwen2-moe"))
def test_losses_and_likeliest_tokens_are_those_of_the_model(thread_ranks: RankPool, name: str) -> None:
    inputs, targets = cases.draw_contexts(cases.GPT2_VOCAB)(2, torch.Generator().manual_seed(3))
    plan = Plan(pp=2, tp=2, microbatches=2, precision="fp64")
    answers = thread_ranks.run(evaluated, name, plan, inputs, targets, ranks=4)
    model = cases.drawn(cases.MODELS[name]).eval()
    with torch.no_grad():
        loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        tokens = inputs[:, :3]
        for _ in range(5):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    for found, continued in answers:
        assert_close(found, float(loss), 1e-12, "the loss")
        assert torch.equal(continued, tokens)
