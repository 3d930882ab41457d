"""Models of transformers under context parallelism and on packed documents, against their own forward."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import plait
from parity import huggingface_cases as cases
from parity import woven
from parity.case import Case
from parity.dropping import by_hand
from parity.huggingface_contexts import DROPPING, HEADS, MODELS, MORE, case, dropping_by_hand
from parity.norm import assert_equal
from parity.pairs import a_third_compiled, covering_rows, in_quick
from parity.parity import TWO_STEPS, check_parity, compare
from parity.rows import name_of
from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.verification.case import Case as VerifyCase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.verify import build_report

pytestmark = pytest.mark.transformers

FACTORS = {
    "name": tuple(MODELS),
    "cp": (2, 3),
    "method": ("ring", "ulysses"),
    "layout": ("zigzag", "striped", "contiguous"),
    "in_documents": (False, True),
    "drops": (False, True),
    "length": (8, 7),
    "tensor": ((1, "keep"), (2, "none"), (2, "regather")),
    "pp": (1, 2),
    "recompute": ("none", "full"),
}
"""`tensor`: tp and sequence_parallel."""


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks, with heads that Ulysses can divide."""
    cp, tp = row.get("cp", 2), row.get("tensor", (1,))[0]
    divides = row.get("method") != "ulysses" or HEADS % (cp * tp) == 0
    return divides and cp * tp * row.get("pp", 1) <= 8


COVERING = covering_rows(FACTORS, fits)
REST = [row for row in covering_rows(FACTORS, fits, strength=3) if row not in COVERING]
"""All other triples."""


def check_row(thread_ranks: Any, row: dict[str, Any]) -> None:
    fields = dict(row)
    which = {name: fields.pop(name) for name in ("name", "length", "in_documents", "drops")}
    (tp, mode), fields["context_parallel"] = fields.pop("tensor"), fields.pop("method")
    fields |= {"context_layout": fields.pop("layout"), "tp": tp, "sequence_parallel": mode}
    plan = Plan(**fields, microbatches=2, precision="fp64")
    check(thread_ranks, case(**which), plan, drops=which["drops"])


def check(thread_ranks: Any, model: Case, plan: Plan, *, drops: bool) -> None:
    if not drops:
        check_parity(thread_ranks, model, plan)
        return
    expected = by_hand(model, plan, TWO_STEPS, dropping_by_hand)
    ranks = thread_ranks.run(woven.train, model, plan, TWO_STEPS, ranks=plan.world)
    compare(ranks, expected, torch.float64)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("row", a_third_compiled(COVERING), ids=name_of)
def test_models_of_transformers_under_cp_equal_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check_row(thread_ranks, row)


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(REST), ids=name_of)
def test_models_of_transformers_under_cp_equal_one_rank_for_every_triple_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check_row(thread_ranks, row)


MORE_PLANS = {
    "ring": Plan(cp=2, microbatches=2, precision="fp64"),
    "ulysses": Plan(cp=3, microbatches=2, context_parallel="ulysses", recompute="full", precision="fp64"),
    "shards": Plan(
        cp=2, tp=2, pp=2, microbatches=2, sequence_parallel="keep", recompute="full", precision="fp64"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), [*product(MORE, MORE_PLANS)])
def test_declared_families_on_packed_documents(thread_ranks: Any, name: str, plan: str) -> None:
    with cases.norms_in_float64():
        check_parity(thread_ranks, case(name, 8, in_documents=True), MORE_PLANS[plan])


@pytest.mark.full
@pytest.mark.parametrize("plan", MORE_PLANS)
@pytest.mark.parametrize("name", ["deepseek-dense", "deepseek-v3"])
def test_latent_attention_in_graphs(thread_ranks: Any, name: str, plan: str) -> None:
    with cases.norms_in_float64():
        check_parity(thread_ranks, case(name, 8), replace(MORE_PLANS[plan], compile="graphs"))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_on_packed_documents_equal_one_rank(
    thread_ranks: Any, name: str, drops: bool
) -> None:
    plan = Plan(microbatches=2, precision="fp64")
    check(thread_ranks, case(name, 7, in_documents=True, drops=drops), plan, drops=drops)


VERIFIED = {
    "ring": Plan(cp=2, microbatches=2),
    "shards": Plan(cp=2, tp=2, microbatches=2, sequence_parallel="keep", context_layout="striped"),
    "ulysses": Plan(
        cp=2, pp=2, microbatches=2, recompute="full", context_parallel="ulysses", schedule="zb-h1"
    ),
    "uneven": Plan(cp=3, microbatches=1, context_layout="contiguous", context_parallel="ulysses"),
    "regather": Plan(cp=2, tp=2, microbatches=2, sequence_parallel="regather"),
    "compiled": Plan(cp=2, pp=2, microbatches=2, schedule="zb-h1", compile="graphs"),
}


@pytest.mark.parametrize(("name", "fields"), in_quick(product(DROPPING, VERIFIED), ("llama", "ring")))
def test_verify_finds_models_of_transformers_with_dropout_under_cp_equal(
    thread_ranks: Any, name: str, fields: str
) -> None:
    plan = VERIFIED[fields]
    inputs, targets = cases.draw_contexts(cases.GPT2_VOCAB)(8, torch.Generator().manual_seed(3))
    model = plait.models.from_huggingface(DROPPING[name]())
    given = VerifyCase(model, plait.cross_entropy, [(inputs, targets)] * 2, VerifyOptions())
    report = build_report(thread_ranks.run(verify_rank, given, plan, ranks=plan.world), plan, given.options)
    assert report, report


LENGTHS = (5, 8, 1, 3)
"""Of the documents in a row: none is longer than the context of 8."""


def output_of(name: str, plan: Plan, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """On a rank: the logits of packed documents."""
    model = plait.models.from_huggingface(cases.drawn(MODELS[name]))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    output: torch.Tensor = engine.output({"tokens": tokens, "document_ids": ids})
    return output


@pytest.mark.parametrize("name", MODELS)
def test_only_documents_have_to_fit_the_context(thread_ranks: Any, name: str) -> None:
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    tokens = torch.randint(cases.GPT2_VOCAB, ids.shape, generator=torch.Generator().manual_seed(1))
    plan = Plan(cp=2, precision="fp64")
    found = thread_ranks.run(output_of, name, plan, ids, tokens, ranks=2)
    model = cases.drawn(MODELS[name]).eval()
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in tokens.split(LENGTHS, 1)], 1)
    for logits in found:
        assert_equal({"logits": logits}, {"logits": expected}, 1e-12, "the value")
    with pytest.raises(ModelError, match="a sequence of 13 tokens is longer than the model's context of 8"):
        thread_ranks.run(output_of, name, plan, ids // 2, tokens, ranks=2)
