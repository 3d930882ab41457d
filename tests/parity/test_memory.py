"""What `memory` foretells, against the bytes that are alive in a real step: after each instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import pytest
import torch

import plait
from parity.case import Batch, Case
from parity.cases import USER_CASES, with_values
from parity.dropping import dropping
from parity.live_bytes import LiveBytes
from parity.pairs import in_quick
from plait.engine.engine import Engine
from plait.estimate.memory.memory_report import RankMemory
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.estimate.memory.whole_parameter_owners import Moments
from plait.models.result_cache import ResultCache, result_caches
from plait.plan.plan import Plan
from plait.tensor.attention.key_exchange_plan import remembered_plan
from plait.tensor.nested_values import tensors_of

ROWS, CONTEXT, VOCAB = 16, 64, 256
TOLERANCE = 0.02
"""What is claimed, of the peak; and of the most that is alive within instructions."""
CLOSE = 0.003
"""Of the peak, at every moment: steps of optimizers and weights of micro-batches are not foretold, and norms
in half precision keep less on a CPU."""


def draw(rows: int, generator: torch.Generator) -> Batch:
    """Full contexts of random tokens, the next token as the target."""
    tokens = torch.randint(VOCAB, (rows, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


FEW = 512
"""Bytes, of models whose tensors have about as many: scalars of a step, and of the user's own model."""
OTHERWISE = ("attention", "recurrent")
"""What PyTorch runs in another way on meta: attention inside of `nn.MultiheadAttention`, recurrent layers."""
BY_NAME = {case.name: case for case in USER_CASES if case.name not in OTHERWISE}
QUICK = (
    *("in_place", "tuples", "frozen_first", "half_frozen", "crossing_ties", "tied_table"),
    *("unused", "views", "recomputed"),
)
"""Of the users' models; the full run has all."""
DROPPING: list[dict[str, Any]] = [
    {},
    {"pp": 2},
    {"tp": 2, "recompute": "selective"},
    {"tp": 2, "recompute": "selective", "sequence_parallel": "regather"},
]
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "vocab": VOCAB, "context": CONTEXT}
GPT2 = Case("gpt2", partial(plait.models.gpt2, **SIZES), draw)
WIDER = Case("gpt2 of 128", partial(plait.models.gpt2, **SIZES | {"hidden": 128}), draw)
"""Beside whose tensors factors of weights, of which each step's first micro-batch makes its own, are few."""
LLAMA = Case("llama", partial(plait.models.llama, **SIZES, kv_heads=2), draw)

make = partial(Plan, microbatches=4, precision="fp32")
SIX = {
    "none": make(dp=2),
    "optimizer": make(dp=2, strategy="optimizer"),
    "gradients": make(dp=2, strategy="gradients", reduce="each"),
    "full-last": make(dp=2, strategy="full"),
    "full-each": make(dp=2, strategy="full", reduce="each"),
    "full-zb-h1": make(pp=2, dp=2, strategy="full", schedule="zb-h1"),
}
"""The configurations that the claim is about."""
OTHERS = {
    "alone": make(),
    "zb-h2": make(pp=4, schedule="zb-h2"),
    "tied-in-a-v": make(pp=2, schedule="zb-v"),
    "tied-in-a-v-each": make(pp=2, dp=2, schedule="zb-v", strategy="full", reduce="each"),
    "gpipe": make(pp=2, schedule="gpipe"),
    "tp": make(tp=2, dp=2, strategy="full", reduce="each"),
    "sequence-keep": make(tp=2, sequence_parallel="keep"),
    "sequence-regather": make(tp=2, sequence_parallel="regather"),
    "sequence-four": make(tp=4, sequence_parallel="regather"),
    "sequence-halves": make(pp=2, tp=2, sequence_parallel="regather", schedule="zb-h1"),
    "sequence-recomputed": make(tp=2, sequence_parallel="regather", recompute="selective"),
    "hybrid": make(dp=4, replicate=2, strategy="gradients"),
    "offload-parameters": make(dp=2, strategy="full", offload="parameters"),
    "offload-full": make(dp=2, strategy="optimizer", offload="full"),
    "selective": make(recompute="selective"),
    "recomputed": make(pp=2, schedule="zb-h1", recompute="full"),
    "recomputed-tp": make(tp=2, recompute="selective"),
    "context-ring": make(cp=2, context_parallel="ring"),
    "context-keep": make(cp=2, context_parallel="ring", sequence_parallel="keep"),
    "context-ulysses": make(cp=2, context_parallel="ulysses", strategy="optimizer"),
    "context-full": make(cp=2, dp=2, context_parallel="ring", strategy="full", reduce="each"),
    "context-four": make(cp=4, context_parallel="ring", context_layout="striped"),
    "context-halves": make(pp=2, cp=2, context_parallel="ring", schedule="zb-h1"),
    "context-sequence": make(cp=2, tp=2, context_parallel="ring", sequence_parallel="regather"),
    "context-recomputed": make(cp=2, context_parallel="ring", recompute="selective"),
    "chunked-loss": make(pp=2, tp=2, schedule="zb-h1", strategy="full", loss_rows=48),
    "chunked-loss-each": make(dp=2, strategy="full", reduce="each", loss_rows=48),
    "chunked-loss-sequence": make(tp=2, sequence_parallel="regather", loss_rows=256),
    "chunked-loss-context": make(pp=2, cp=2, context_parallel="ring", schedule="zb-h1", loss_rows=40),
    "chunked-loss-mixed": Plan(
        dp=2,
        microbatches=4,
        precision="bf16",
        master_precision="bf16",
        gradient_precision="fp32",
        loss_rows=100,
    ),
    "offload-alone": make(strategy="full", offload="full"),
    "sums": Plan(dp=2, microbatches=4, precision="bf16", master_precision="bf16", gradient_precision="fp32"),
    "mixed": Plan(dp=2, microbatches=4, precision="bf16"),
    "mixed-full": Plan(
        dp=2,
        microbatches=4,
        precision="bf16",
        master_precision="fp32",
        reduce_precision="bf16",
        strategy="full",
        reduce="each",
    ),
}


half = partial(Plan, microbatches=4, precision="bf16")
IN_FLOAT8 = {
    "full": half(dp=2, strategy="full", linears="float8"),
    "tp": half(tp=2, dp=2, strategy="full", reduce="each", linears="float8"),
    "alone": half(linears="float8"),
    "zb-h1": half(pp=2, dp=2, strategy="optimizer", schedule="zb-h1", linears="float8"),
    "fp32": make(dp=2, strategy="full", linears="float8"),
    "fp32-whole": make(dp=2, linears="float8"),
    "offload": half(dp=2, strategy="full", offload="parameters", linears="float8"),
    "selective": half(dp=2, strategy="full", recompute="selective", linears="float8"),
    "sequence-keep": half(tp=2, sequence_parallel="keep", linears="float8"),
    "sequence-regather": half(tp=2, pp=2, sequence_parallel="regather", schedule="zb-h1", linears="float8"),
    "context": half(cp=2, context_parallel="ring", strategy="full", linears="float8"),
    "compiled": half(dp=2, strategy="full", compile="graphs", linears="float8"),
    "compiled-tp": half(tp=2, sequence_parallel="keep", compile="graphs", linears="float8"),
    "compiled-regather": half(tp=2, sequence_parallel="regather", compile="graphs", linears="float8"),
    "rowwise": half(dp=2, strategy="full", linears="float8-rowwise"),
    "rowwise-gw": half(dp=2, strategy="full", linears="float8-rowwise-gw"),
    "rowwise-tp": half(tp=2, linears="float8-rowwise"),
}


@dataclass(frozen=True)
class Counted:
    """Of one rank, in its second step."""

    after: list[tuple[str, int]]
    """Per instruction."""
    most: int
    """Within operations too."""
    at_rest: int

    @property
    def peak(self) -> int:
        return max(alive for _, alive in self.after)


def adamw(engine: Engine) -> torch.optim.Optimizer:
    return torch.optim.AdamW(engine.parameters())


def sgd_with_momentum(engine: Engine) -> torch.optim.Optimizer:
    return torch.optim.SGD(engine.parameters(), lr=1e-3, momentum=0.9)


MakeOfEngine = Callable[[Engine], torch.optim.Optimizer]


def count_in_a_rank(
    case: Case, plan: Plan, make: MakeOfEngine, rows: int = ROWS, *, observes: bool = True
) -> Counted:
    live = LiveBytes()
    remembered_plan.cache_clear()
    with live:
        engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss)
        for unit in engine.runtime.units.values():
            for buffer in unit.trainable:
                live.own(buffer.gradient)
        optimizer = make(engine)
        ((inputs, targets),) = case.batches(rows, 1, torch.float32)
        engine.forward_backward(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        after: list[tuple[str, int]] = []
        count = live.settled if plan.cp > 1 else live.count
        if observes:
            engine.observe(lambda instruction, _: after.append((str(instruction), count())))
        live.most = 0
        engine.forward_backward(inputs, targets)
        most = live.most
        optimizer.zero_grad()
        batch = sum(tensor.nbytes for tensor in tensors_of((inputs, targets)))
        return Counted(after, most, live.count() - batch)


def foretold(
    case: Case, plan: Plan, moments: Moments, rows: int = ROWS
) -> tuple[list[RankMemory], list[list[tuple[str, int]]]]:
    """Per rank of `pp`: the answer, and what is held after each instruction."""
    ((inputs, targets),) = case.batches(rows, 1, torch.float32)
    estimator = MemoryEstimator(case.build(), inputs, targets, loss=case.loss, moments=moments, device="cpu")
    watched: list[list[tuple[str, int]]] = [[] for _ in range(plan.pp)]

    def watch(rank: int, moment: Any) -> None:
        watched[rank].append((str(moment.after), moment.total))

    return list(estimator.ranks(plan, watch)), watched


def last_of_cp(plan: Plan) -> int:
    """The index along `cp` of the rank that has the last position."""
    return 0 if plan.context_layout == "zigzag" else plan.cp - 1


def check(rank_pool: Any, case: Case, plan: Plan, *, momentum: bool = False) -> None:
    make = sgd_with_momentum if momentum else adamw
    counted = rank_pool.run(count_in_a_rank, case, plan, make, ranks=plan.world)
    ranks, moments = foretold(case, plan, 1 if momentum else 2)
    for rank, foreseen in enumerate(ranks):
        found = counted[rank * plan.dp * plan.cp * plan.tp + last_of_cp(plan) * plan.tp]
        assert foreseen.peak == pytest.approx(found.peak, rel=TOLERANCE)
        assert foreseen.most == pytest.approx(found.most, rel=TOLERANCE)
        assert foreseen.at_rest == pytest.approx(found.at_rest, rel=TOLERANCE)
        assert [name for name, _ in moments[rank]] == [name for name, _ in found.after]
        for (name, held), (_, alive) in zip(moments[rank], found.after, strict=True):
            assert held == pytest.approx(alive, abs=CLOSE * found.peak), f"rank {rank} after {name}"


@pytest.mark.parametrize("name", in_quick(SIX, "full-zb-h1"))
def test_predicted_memory_of_gpt2_is_what_ranks_allocate_in_six_configurations(
    rank_pool: Any, name: str
) -> None:
    check(rank_pool, GPT2, SIX[name])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_logits_are_freed_before_the_other_layers_backward_also_where_layers_share_a_graph(
    recompute: Any,
) -> None:
    """An observer would look between layers, which then run one by one."""
    case = Case("many classes", partial(plait.models.gpt2, **SIZES | {"vocab": 1024, "tied": False}), draw)
    plan = make(recompute=recompute)
    counted = count_in_a_rank(case, plan, adamw, observes=False)
    ((foreseen,), _) = foretold(case, plan, 2)
    assert foreseen.most == pytest.approx(counted.most, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_predicted_memory_of_gpt2_is_what_ranks_allocate_in_other_configurations(
    rank_pool: Any, name: str
) -> None:
    check(rank_pool, GPT2, OTHERS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", IN_FLOAT8)
def test_predicted_memory_of_linears_in_float8_is_what_ranks_allocate(rank_pool: Any, name: str) -> None:
    """`test_expert_memory.py` has a sparse model in the quick run."""
    check(rank_pool, WIDER, IN_FLOAT8[name])


COMPILED: dict[str, dict[str, Any]] = {
    "alone": {},
    "zb-h1": {"pp": 2, "schedule": "zb-h1", "dp": 2, "strategy": "full"},
    "each": {"dp": 2, "strategy": "full", "reduce": "each"},
    "selective": {"recompute": "selective"},
    "recomputed": {"pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "tp-selective": {"tp": 2, "recompute": "selective"},
    "sequence-recomputed": {"tp": 2, "sequence_parallel": "keep", "recompute": "full"},
    "regather": {"tp": 2, "pp": 2, "schedule": "zb-h1", "sequence_parallel": "regather"},
    "regather-selective": {"tp": 2, "sequence_parallel": "regather", "recompute": "selective"},
    "ring": {"cp": 2, "context_parallel": "ring"},
    "ring-recomputed": {"cp": 2, "context_parallel": "ring", "recompute": "full"},
    "ulysses-selective": {"cp": 2, "context_parallel": "ulysses", "recompute": "selective"},
}


@pytest.mark.full
@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=lambda one: one.name)
@pytest.mark.parametrize("name", COMPILED)
def test_predicted_memory_of_compiled_layers_is_what_ranks_allocate(
    rank_pool: Any, case: Case, name: str
) -> None:
    """What their graphs save and allocate; without generated code, whose allocations cannot be counted."""
    check(rank_pool, case, make(compile="graphs", **COMPILED[name]))


@pytest.mark.full
def test_predicted_memory_of_llama_with_momentum_is_what_ranks_allocate(rank_pool: Any) -> None:
    check(rank_pool, LLAMA, make(pp=2, dp=2, strategy="optimizer", schedule="zb-h1"), momentum=True)


def draw_packed(rows: int, generator: torch.Generator) -> Batch:
    """Each row the same documents, which alternate with cuts of ranks."""
    tokens, targets = draw(rows, generator)
    ids = torch.tensor([0] * 5 + [1] * 30 + [2] * (CONTEXT - 35)).repeat(rows, 1)
    return {"tokens": tokens, "document_ids": ids}, targets


@pytest.mark.full
@pytest.mark.parametrize("compile", [False, "graphs"])
@pytest.mark.parametrize("cp", [1, 2])
def test_predicted_memory_with_packed_documents_is_what_ranks_allocate(
    rank_pool: Any, cp: int, compile: Any
) -> None:
    case = Case("packed", LLAMA.build, draw_packed)
    check(rank_pool, case, make(cp=cp, context_parallel="ring", compile=compile))


@pytest.mark.parametrize("settings", in_quick(DROPPING, DROPPING[0]), ids=str)
def test_predicted_memory_with_dropout_is_what_ranks_allocate(
    rank_pool: Any, settings: dict[str, Any]
) -> None:
    """Its masks, and what it takes to make them."""
    case = Case("dropping", with_values(partial(dropping, hidden=64, vocab=VOCAB)), draw)
    check(rank_pool, case, make(**settings))


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_predicted_memory_of_compiled_dropout_is_what_ranks_allocate(rank_pool: Any, recompute: Any) -> None:
    case = Case("dropping", with_values(partial(dropping, hidden=64, vocab=VOCAB)), draw)
    check(rank_pool, case, make(tp=2, recompute=recompute, compile="graphs"))


@pytest.mark.parametrize(
    ("name", "compile"),
    in_quick(product(BY_NAME, (False, "graphs")), *product(QUICK, (False,)), ("frozen_first", "graphs")),
)
def test_predicted_memory_of_users_models_is_what_a_rank_allocates_after_each_instruction(
    name: str, compile: Any
) -> None:
    """Layers in place, of several tensors, frozen, tied, with views, recomputed: to a few numbers."""
    case, plan = BY_NAME[name], Plan(microbatches=2, precision="fp32", overlap=False, compile=compile)
    counted = count_in_a_rank(case, plan, sgd_with_momentum, rows=4)
    ((foreseen,), (moments,)) = foretold(case, plan, 1, rows=4)
    assert foreseen.peak == pytest.approx(counted.peak, abs=FEW)
    for (name, held), (other, alive) in zip(moments, counted.after, strict=True):
        assert name == other
        assert held == pytest.approx(alive, abs=FEW), f"after {name}"


@pytest.mark.parametrize(
    ("plan", "stages"), [(make(), 1), (make(pp=2, schedule="zb-v"), 2)], ids=["1f1b", "zb-v"]
)
def test_rotary_angles_count_once_for_each_stage_in_predicted_memory(
    thread_ranks: Any, plan: Plan, stages: int
) -> None:
    """The angles of a model of rotary positions: of each stage once, between steps, too."""
    angles = 2 * CONTEXT * (SIZES["hidden"] // SIZES["heads"] // 2) * 4
    assert thread_ranks.run(cached_in_a_rank, plan, ranks=plan.world) == [[angles] * stages] * plan.pp
    with_angles, _ = foretold(LLAMA, plan, 2)
    with patch.object(ResultCache, "nbytes", 0):
        without, _ = foretold(LLAMA, plan, 2)
    for one, other in zip(with_angles, without, strict=True):
        assert one.at_rest - other.at_rest == one.peak - other.peak == stages * angles


def cached_in_a_rank(plan: Plan) -> list[int]:
    """The bytes in each cache of this rank after a step."""
    engine = plait.parallelize(LLAMA.build(), plan, plait.Mesh(plan), LLAMA.loss)
    ((inputs, targets),) = LLAMA.batches(plan.microbatches, 1, torch.float32)
    for _ in range(2):
        engine.forward_backward(inputs, targets)
    caches = {id(cache): cache for module in engine._runner.modules for *_, cache in result_caches(module)}
    return [cache.nbytes for cache in caches.values()]


@pytest.mark.full
def test_predictions_of_different_strategies_differ_by_more_than_the_tolerance() -> None:
    """Else the count could not tell them apart."""
    alike = [plan for plan in SIX.values() if plan.pp == 1]
    peaks = [plait.memory(GPT2.build(), plan, rows=ROWS, device="cpu").peak for plan in alike]
    assert all(abs(one - other) > TOLERANCE * max(one, other) for one, other in combinations(peaks, 2))
