"""Compiled layers: the gradients, losses and updates of one rank in plain PyTorch, whatever the layout."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from parity import huggingface_cases, woven
from parity.cases import USER_CASES, gpt2, llama, sparse_llama
from parity.dropping import DROPPING, IN_CONTEXTS, TWICE, by_hand
from parity.pairs import covering_rows, in_quick
from parity.parity import TWO_STEPS, check_parity, compare
from plait.engine.compilation.compiled_layer import CompiledRun
from plait.plan.plan import Plan

BY_NAME = {case.name: case for case in USER_CASES}
MODELS = {"gpt2": gpt2, "llama": llama}
FACTORS = {
    "model": ("gpt2", "llama"),
    "degrees": ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 2), (1, 2, 2)),
    "schedule": ("1f1b", "zb-h1", "zb-v"),
    "strategy": ("none", "gradients", "full"),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": ("none", "keep", "regather"),
}


def possible(row):
    pp, dp, tp = row.get("degrees", (2, 2, 2))
    if row.get("schedule", "1f1b") != "1f1b" and pp == 1:
        return False
    if row.get("strategy", "none") != "none" and dp == 1:
        return False
    return row.get("sequence_parallel", "none") == "none" or tp == 2


ROWS = covering_rows(FACTORS, possible)
QUICK = (0,)


def identify(row):
    degrees = "x".join(map(str, row["degrees"]))
    return "-".join([row["model"], degrees, *(str(row[name]) for name in list(FACTORS)[2:])])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=identify(row), marks=[] if number in QUICK else pytest.mark.full)
        for number, row in enumerate(ROWS)
    ],
)
def test_compiled_graphs_train_as_one_rank_in_every_layout(thread_ranks, row):
    check_row(thread_ranks, row, "graphs")


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS[::3], ids=identify)
def test_generated_code_trains_as_one_rank_in_every_layout(thread_ranks, row):
    check_row(thread_ranks, row, True)


def check_row(thread_ranks, row, compile):
    pp, dp, tp = row["degrees"]
    options = {name: row[name] for name in ("schedule", "strategy", "recompute", "sequence_parallel")}
    plan = Plan(pp=pp, dp=dp, tp=tp, microbatches=3, precision="fp64", compile=compile, **options)
    check_parity(thread_ranks, MODELS[row["model"]](), plan)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_generated_code_saves_the_bytes_that_graphs_save(thread_ranks, name, recompute):
    case, found = MODELS[name](), []
    for compile in ("graphs", True):
        plan = Plan(precision="fp64", compile=compile, recompute=recompute)
        found += thread_ranks.run(saved_bytes, case, plan, ranks=1)
    graphs, generated = found
    assert sum(graphs) > 0
    assert generated == graphs


def saved_bytes(case, plan):
    """Return the bytes that each layer's backward reads, in the order of the backwards."""
    found, backward = [], CompiledRun.backward

    def noting(run, gradients):
        storages = [tensor.untyped_storage() for tensor in run.saved]
        found.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
        return backward(run, gradients)

    with patch.object(CompiledRun, "backward", noting):
        woven.train(case, plan, TWO_STEPS)
    return found


@pytest.mark.parametrize("name", in_quick(BY_NAME, "skips", "frozen_first"))
def test_compiled_models_of_users_train_as_one_rank(thread_ranks, name):
    plan = Plan(pp=2, schedule="zb-h1", microbatches=3, precision="fp64", compile="graphs")
    check_parity(thread_ranks, BY_NAME[name], plan)


@pytest.mark.full  # the next test has other masks in each step, too
@pytest.mark.parametrize("case", [DROPPING, TWICE], ids=lambda one: one.name)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_draws_other_masks_in_each_step(thread_ranks, case, recompute):
    plan = Plan(pp=2, tp=2, microbatches=2, precision="fp64", compile="graphs", recompute=recompute)
    plan = replace(plan, tp=1) if case is TWICE else plan
    ranks = thread_ranks.run(woven.train, case, plan, TWO_STEPS, ranks=plan.world)
    compare(ranks, by_hand(case, plan, TWO_STEPS), torch.float64)


@pytest.mark.parametrize("cp", in_quick((1, 2), 2))
@pytest.mark.parametrize("recompute", in_quick(("none", "selective", "full"), "full"))
def test_compiled_dropout_in_parts_of_sequences_equals_that_of_one_rank(thread_ranks, cp, recompute):
    """Also of the weights of attention, which runs between graphs."""
    plan = Plan(cp=cp, microbatches=2, precision="fp64", compile="graphs", recompute=recompute)
    ranks = thread_ranks.run(woven.train, IN_CONTEXTS, plan, TWO_STEPS, ranks=cp)
    compare(ranks, by_hand(IN_CONTEXTS, plan, TWO_STEPS), torch.float64)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("context_parallel", ["ring", "ulysses"])
def test_generated_code_trains_as_one_rank_under_context_parallelism(
    thread_ranks, name, recompute, context_parallel
):
    plan = Plan(cp=2, pp=2, schedule="zb-h1", microbatches=2, precision="fp64", compile=True)
    plan = replace(plan, recompute=recompute, context_parallel=context_parallel)
    check_parity(thread_ranks, MODELS[name](), plan)


@pytest.mark.full
@pytest.mark.transformers
@pytest.mark.parametrize("name", huggingface_cases.MODELS)
def test_compiled_models_of_transformers_train_as_one_rank(thread_ranks, name):
    plan = Plan(pp=2, schedule="zb-h1", microbatches=2, precision="fp64", compile="graphs")
    # Some norms compute in float32, whose rounding depends on how they are divided into operations.
    with huggingface_cases.norms_in_float64():
        check_parity(thread_ranks, huggingface_cases.case(name), plan)


SPARSE = {
    "tp, ep, zb-h1": {"tp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 3},
    "full, recomputed": {"dp": 2, "ep": 2, "strategy": "full", "recompute": "full", "microbatches": 2},
    "one rank": {"microbatches": 2},
    "none": {"dp": 2, "strategy": "none", "microbatches": 2},
    "each": {"dp": 2, "strategy": "gradients", "reduce": "each", "microbatches": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v", "microbatches": 4, "recompute": "selective"},
    "keep": {"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": "keep", "strategy": "full"},
    "regather": {"tp": 2, "sequence_parallel": "regather", "pp": 2, "schedule": "zb-h1", "microbatches": 2},
    "etp": {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "strategy": "full", "recompute": "full"},
    "cp": {"cp": 2, "ep": 2, "dp": 2, "strategy": "optimizer"},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shared", [2, 0])
@pytest.mark.parametrize("name", SPARSE)
def test_compiled_layers_with_experts_train_as_one_rank(thread_ranks, name, shared):
    plan = Plan(precision="fp64", compile="graphs", **SPARSE[name])
    check_parity(thread_ranks, sparse_llama(layers=1, shared=shared), plan)


@pytest.mark.full
@pytest.mark.parametrize("name", list(SPARSE)[:3])
def test_generated_code_around_experts_trains_as_one_rank(thread_ranks, name):
    check_parity(thread_ranks, sparse_llama(shared=2), Plan(precision="fp64", compile=True, **SPARSE[name]))


@pytest.mark.full
@pytest.mark.transformers
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_compiled_mixtures_of_transformers_train_as_one_rank(thread_ranks, name, recompute):
    plan = Plan(dp=2, tp=2, ep=4, strategy="full", microbatches=2, precision="fp64", compile="graphs")
    with huggingface_cases.norms_in_float64():
        check_parity(thread_ranks, huggingface_cases.case(name), replace(plan, recompute=recompute))
