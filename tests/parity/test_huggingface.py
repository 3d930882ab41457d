"""Models of transformers: the adapter against their own forward, and woven runs against one rank."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from torch.nn import functional

import plait
from parity import huggingface_cases as cases
from parity.norm import assert_close, assert_equal
from parity.parity import check_parity
from plait.comm.pool import RankPool
from plait.plan import Plan


def step(model: nn.Module, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token, with gradients in `model`, all in float64."""
    model.zero_grad()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", cases.MODELS)
def test_the_layers_compute_what_the_model_computes(name: str) -> None:
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


@pytest.mark.parametrize("plan", WOVEN)
@pytest.mark.parametrize("name", FAMILIES)
def test_woven_runs_equal_one_rank(rank_pool: RankPool, name: str, plan: str) -> None:
    check_parity(rank_pool, cases.case(name), WOVEN[plan])


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_heads_of_keys_and_values_are_repeated(rank_pool: RankPool, name: str) -> None:
    check_parity(rank_pool, cases.case(name), Plan(tp=4, microbatches=2, precision="fp64"))


@pytest.mark.parametrize("name", sorted(set(cases.MODELS) - set(FAMILIES)))
def test_what_configurations_change_is_woven_too(rank_pool: RankPool, name: str) -> None:
    check_parity(rank_pool, cases.case(name), Plan(pp=2, tp=2, microbatches=2, precision="fp64"))
