"""Predictions of any model: memory as `plait.memory` has it, times beside those from sizes, and searches."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity.pairs import in_quick, in_turns
from plait.errors import ConfigError, ModelError
from plait.estimate.memory.plan_memories import cut_pipeline
from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.prediction.traced_model import TracedModel, traced_model
from plait.estimate.search.plan_search import plan_sort_key, search
from plait.estimate.search.plan_space import PlanChoices, RankDivision, divisions
from plait.estimate.time.hardware import load_hardware
from plait.models.lora import lora
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan, Strategy

GALLERY = Path(__file__).parents[4] / "examples" / "gallery"
LLAMA = Decoder.of_family("llama", layers=2, hidden=1024, heads=8, kv_heads=4, vocab=8000, context=512)
GPT2 = Decoder.of_family("gpt2", layers=2, hidden=1024, heads=8, vocab=8000, context=512)
WIDE = Decoder.of_family("llama", layers=2, hidden=4096, heads=32, kv_heads=8, vocab=1000, context=4096)
MIXED = {"precision": "bf16", "master_precision": "fp32"}
HALF_BOUND = ({"pp": 2, "microbatches": 2, "schedule": "zb-h1", "recompute": "full"}, 0.6)
"""A plan, and the part of its memory that its bound is at least."""


def llama(**more: Any) -> nn.Module:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "context": 16}
    return plait.models.llama(**{**sizes, **more})


def adapted() -> nn.Module:
    model = llama()
    lora(model, rank=4)  # type: ignore[arg-type]
    return model


def half_frozen() -> nn.Module:
    model = plait.models.gpt2(layers=2, hidden=32, heads=4, vocab=64, context=16)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def perceptron(wide: int = 16) -> nn.Module:
    widths = [16, wide, 16, wide, 16]
    layers = [nn.Sequential(nn.Linear(*sizes), nn.GELU()) for sizes in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


ROWS_OF_16 = {"inputs": torch.empty(1, 16), "targets": torch.empty(1, 3), "loss": nn.MSELoss()}


@pytest.mark.parametrize(
    ("make", "plan", "about"),
    [
        (adapted, Plan(pp=2, dp=2, strategy="full", microbatches=4, **MIXED), {}),
        pytest.param(
            *(adapted, Plan(tp=2, sequence_parallel="keep", microbatches=2, recompute="selective"), {}),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(half_frozen, Plan(pp=2, schedule="zb-h1", microbatches=4), {"moments": 1}),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(llama, Plan(dp=2, strategy="full", offload="full", microbatches=2, **MIXED), {}),
            marks=pytest.mark.full,
        ),
        (perceptron, Plan(pp=2, dp=2, strategy="gradients", microbatches=3), ROWS_OF_16),
    ],
    ids=["lora-sharded", "lora-tp", "frozen", "offload", "sequential"],
)
def test_memory_is_that_of_plait_memory(
    make: Callable[[], nn.Module], plan: Plan, about: dict[str, Any]
) -> None:
    found = predict(make(), plan, "h100-sxm", rows=3 * plan.microbatches, **about)
    given = {
        name: torch.empty(3 * plan.microbatches, *value.shape[1:])
        if isinstance(value, torch.Tensor)
        else value
        for name, value in about.items()
    }
    rows = None if "inputs" in given else 3 * plan.microbatches
    exact = plait.memory(make(), plan, rows=rows, device="cuda", **given)
    assert found.peak_memory == exact.most
    assert [rank.allocated for rank in found.memory] == [rank.most for rank in exact.ranks]
    assert found.layers_per_stage is not None
    assert found.step_seconds > 0
    assert 0 < found.mfu < 1


@pytest.mark.parametrize("schedule", in_quick(("1f1b", "zb-h1", "interleaved"), "zb-h1"))
def test_many_micro_batches_follow_from_fewer(schedule: str) -> None:
    """The peak predicted for 64 micro-batches, of which few are simulated, is that of `plait.memory`."""
    plan = Plan(pp=2, schedule=schedule, microbatches=64, layers_per_stage=None)
    found = predict(adapted(), plan, "h100-sxm")
    assert found.peak_memory == pytest.approx(plait.memory(adapted(), plan, device="cuda").most, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", [path.stem for path in sorted(GALLERY.glob("*.py"))])
def test_models_of_the_gallery_are_predicted(name: str) -> None:
    module = runpy.run_path(str(GALLERY / f"{name}.py"))
    plan, model = module["PLAN"], module["build_model"]()
    if name == "vision_transformer":
        inputs, targets = module["make_images"](16, seed=0)[:]
    elif name == "preferences":
        inputs, targets = module["preference_batch"](module["make_pairs"](0, 16), module["LENGTH"])
    elif name == "packed_fine_tuning":
        inputs, targets = module["pack"](module["make_documents"](0, count=40))
    else:
        inputs, targets = module["make_batch"](0)
    losses = {"diffusion_transformer": nn.MSELoss(), "own_split_backward": nn.MSELoss()}
    loss = module.get("LOSS") or losses.get(name) or module.get("FocalLoss", lambda: plait.cross_entropy)()
    rows = len(targets) if isinstance(targets, torch.Tensor) else len(next(iter(targets.values())))
    about = {"loss": loss, "rules": module.get("RULES"), "inputs": inputs, "targets": targets}
    exact = plait.memory(model, plan, device="cuda", **about)
    found = predict(model, plan, "h100-sxm", rows=rows, **about)
    assert found.peak_memory == pytest.approx(exact.most, rel=0.01)
    assert found.step_seconds > 0


@pytest.mark.parametrize(
    ("plan", "sizes"),
    in_turns(
        {
            "one": Plan(microbatches=2),
            "pp": Plan(pp=2, microbatches=4, recompute="full", **MIXED),
            "tp": Plan(tp=2, sequence_parallel="keep"),
        },
        {"llama": LLAMA, "gpt2": GPT2},
    ),
)
def test_times_are_those_from_sizes(sizes: Decoder, plan: Plan) -> None:
    """On a CPU, where the sizes know that norms and rotations are several operations each.

    Of element-wise operations the sizes have those of which the hardware files' constants were fitted.
    """
    traced, sized = (predict(model, plan, "cpu-two-cores") for model in (traced_model(sizes), sizes))
    for part in ("matrix products", "attention", "optimizer"):
        assert traced.breakdown[part] == pytest.approx(sized.breakdown[part], rel=0.03)
    assert traced.step_seconds == pytest.approx(sized.step_seconds, rel=0.2)
    assert traced.model.operations_per_token == pytest.approx(sized.model.operations_per_token, rel=0.02)
    assert traced.layers_per_stage == sized.layers_per_stage


FEW = PlanChoices(
    schedules=(("1f1b", 1), ("zb-h1", 1)),
    states=(("none", "last"), ("full", "last")),
    recompute=("none",),
    sequence_parallel=("none", "keep"),
)


def least_memory(model: TracedModel, found: Prediction) -> float:
    """The largest of the bounds of a plan's memory: of any schedule, of its schedule, and of its cut."""
    plan, memories = found.plan, model.memories()
    sizes = model.sizes(plan, found.rows / plan.microbatches, on_cpu=not found.hardware.overlaps)
    of_cut = memories.least_of_cut(sizes, cut_pipeline(plan, model.costs_for_cut(plan)))
    return max(of_cut, *(memories.least(sizes, policy) for policy in (None, plan.schedule)))


def search_and_predict_all(
    model: TracedModel, ranks: int, batch: int, choices: PlanChoices = FEW, base: Plan | None = None
) -> list[Prediction]:
    """The predictions of every plan, of which a search returns the best for any memory."""
    h100, base = load_hardware("h100-sxm"), base or Plan()
    every = [
        predict(model, replace(plan, schedule=policy, chunks=chunks), h100, rows=batch // plan.dp)
        for division in divisions(model, ranks, batch, base)[0]
        for plan in division.options(base, choices)
        for policy, chunks in division.schedules(len(model.kinds), choices)
    ]
    for one in every:
        assert least_memory(model, one) <= one.peak_memory, one.plan
    peaks = sorted(one.peak_memory for one in every)
    for room in (peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 8]):
        machine = replace(h100, memory=room + h100.reserved)
        fitting = [one for one in every if one.peak_memory <= room]
        found = search(model, machine, ranks, batch, base=base, choices=choices, most=3)
        assert [*map(_rank, found.best)] == sorted(map(_rank, fitting))[:3]
        assert found.plans == len(every)
    return every


@pytest.mark.parametrize("moments", in_quick((2, "muon"), "muon"))
def test_a_search_returns_what_predicting_every_plan_does(moments: Any) -> None:
    layers = perceptron(wide=256 if moments == "muon" else 16)  # which takes Muon longer than the layers
    model = traced_model(layers, torch.empty(1, 16), torch.empty(1, 3), nn.MSELoss(), moments=moments)
    search_and_predict_all(model, 2, 4)


@pytest.mark.parametrize(
    ("plan", "close"),
    in_quick(
        [
            ({"dp": 2, "strategy": "full", "microbatches": 3}, 0.8),  # whole gradients beside the next loss
            ({"dp": 2, "strategy": "gradients", "reduce": "each", "microbatches": 2}, 0.7),
            ({"pp": 3, "microbatches": 6, "recompute": "selective"}, 0.7),
            HALF_BOUND,
            ({"pp": 2, "dp": 2, "microbatches": 1, "strategy": "full"}, 0.5),
        ],
        HALF_BOUND,
    ),
    ids=str,
)
def test_memory_of_a_plan_is_at_least_its_bound_and_not_far_above_it(
    plan: dict[str, Any], close: float
) -> None:
    model = traced_model(llama(layers=4, vocab=640))
    found = predict(model, Plan(**plan, **MIXED), "h100-sxm", rows=4 * plan["microbatches"])
    assert close * found.peak_memory < least_memory(model, found) <= found.peak_memory


IN_FLOAT8 = Plan(precision="bf16", linears="float8")


@pytest.mark.full
def test_a_search_with_linears_in_float8_returns_what_predicting_every_plan_does() -> None:
    model = traced_model(plait.models.gpt2(layers=2, hidden=64, heads=4, vocab=64, context=16))
    every = search_and_predict_all(model, 2, 4, base=IN_FLOAT8)
    assert {one.plan.linears for one in every} == {"float8"}


def test_linears_in_float8_take_their_own_peak_and_casts_and_are_gathered_in_fewer_bytes() -> None:
    plan = Plan(dp=8, strategy="full", precision="bf16")
    plain, scaled, by_rows = (
        predict(WIDE, replace(plan, linears=linears), "h100-sxm")
        for linears in (None, "float8", "float8-rowwise")
    )
    assert scaled.breakdown["matrix products"] < 0.8 * plain.breakdown["matrix products"]
    assert scaled.breakdown["element-wise"] > plain.breakdown["element-wise"]
    assert scaled.breakdown["attention"] == pytest.approx(plain.breakdown["attention"])
    items = [one.times.timer.shape.gathered_item for one in (scaled, by_rows, plain)]
    embedding, attention, mlp = dict.fromkeys(scaled.model.kinds[:3])
    assert [item((embedding,)) for item in items] == [2, 2, 2]
    weights, norm = 4096 * (2 * 4096 + 2 * 1024), 4096
    assert items[0]((attention,)) == pytest.approx((weights + 2 * norm) / (weights + norm))
    assert [items[0]((mlp,)) < 1.01, items[1]((mlp,))] == [True, 2], "row-wise, weights are cast both ways"
    for one, peak in ((plain, 989.4e12), (scaled, 1978.9e12)):
        needed = one.model.operations_per_token * one.tokens_per_second / 8
        assert one.mfu == pytest.approx(needed / peak)


@pytest.mark.parametrize(("strategy", "is_kept"), [("gradients", True), ("full", False)])
def test_matrices_of_experts_in_float8_are_cast_once_a_step_unless_they_are_freed_after_each_use(
    strategy: Strategy, is_kept: bool
) -> None:
    model = traced_model(llama(layers=1, hidden=1024, experts=8, top_k=1, inner=1024))
    plan = Plan(dp=2, strategy=strategy, precision="bf16", linears="float8")
    one, four = (
        predict(model, replace(plan, microbatches=count), "h100-sxm", rows=count).breakdown["element-wise"]
        for count in (1, 4)
    )
    assert (four < 0.99 * 4 * one) == is_kept
    assert four == pytest.approx(4 * one, rel=0.5 if is_kept else 1e-9)


def test_predictions_refuse_linears_in_float8_on_hardware_without_their_peak() -> None:
    with pytest.raises(ConfigError, match=r"a100-80 has no figure peak_tflops\.fp8"):
        predict(LLAMA, IN_FLOAT8, "a100-80")


SPARSE = {"layers": 1, "experts": 3, "top_k": 2, "inner": 24, "shared": 8}


@pytest.mark.parametrize(
    ("ranks", "tried"),
    [
        pytest.param(2, {(1, 1), (2, 1), (1, 2)}, marks=pytest.mark.full),
        pytest.param(4, {(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)}, marks=pytest.mark.full),
    ],
)
def test_a_search_of_a_sparse_model_divides_experts_in_every_way(
    ranks: int, tried: set[tuple[int, int]]
) -> None:
    every = search_and_predict_all(traced_model(llama(**SPARSE)), ranks, 2)
    assert {(one.plan.ep, one.plan.etp) for one in every} == tried
    # Of several stages the slowest, whose times are told, may have no experts.
    alone = (one for one in every if one.plan.pp == 1 or not one.plan.divides_experts)
    assert all((one.breakdown["ep communication"] > 0) == one.plan.divides_experts for one in alone)


@pytest.mark.full
def test_only_models_with_experts_are_searched_for_their_division() -> None:
    base = Plan()
    dense, sparse = traced_model(llama()), traced_model(llama(**SPARSE))
    assert {(one.ep, one.etp) for one in divisions(dense, 8, 8, base)[0]} == {(1, 1)}
    found, impossible = divisions(sparse, 8, 8, base)
    assert {one.ep for one in found} == {1, 2}  # of the three experts
    assert {one.etp for one in found} == {1, 2, 4}
    deep, undivided = impossible
    assert undivided.startswith(
        "the model allows no tp = 8 with cp = 1: blocks.0.attention.query with a weight"
    )
    assert (deep, {*impossible.values()}) == ("pp is more than the layers", {1})


def test_copies_of_state_are_those_in_which_experts_can_be_divided() -> None:
    copies = {one[2] for one in RankDivision(1, 4, 1, 1, 1, ep=2).states(FEW)}
    assert copies == {1, 2}
    assert {one[2] for one in RankDivision(1, 4, 1, 1, 1, ep=4).states(FEW)} == {1}


@pytest.mark.full
def test_a_sparse_model_does_the_operations_of_its_active_parameters() -> None:
    """Router, top_k of the experts and the shared one, for each token: six operations for each element."""
    one, two, dense = (
        traced_model(llama(**{**SPARSE, **more})).operations_per_token
        for more in ({"top_k": 1}, {"top_k": 2}, {"experts": None, "shared": 0})
    )
    expert = 6 * 3 * 32 * 24
    assert two - one == pytest.approx(expert)
    assert two - dense == pytest.approx(expert + 6 * 32 * (3 + 3 * 8))


@pytest.mark.parametrize(
    "plan",
    [pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.full), {"dp": 2, "ep": 2, "recompute": "full"}],
    ids=str,
)
def test_tokens_travel_once_to_each_rank_that_has_experts_of_them(plan: dict[str, Any]) -> None:
    """Under uniform routing; the results come back likewise, and gradients, and nothing travels again."""
    experts, top_k = 4, 2
    model = traced_model(llama(layers=1, experts=experts, top_k=top_k, inner=24))
    tokens = 2 * 16
    rows = 2 * tokens * (1 - comb(experts // 2, top_k) / comb(experts, top_k))
    work = model.sizes(Plan(**plan), 2, on_cpu=True).work(model.kinds[2])
    counts, there, back = (one.nbytes for one in work.forward_dispatches)
    gradients, returned = (one.nbytes for one in work.backward_dispatches)
    of_indices_and_weights = 2 * top_k * 4
    assert counts == 2 * 8 * (2 + experts)
    assert there == pytest.approx(2 * rows * (32 * 4 + of_indices_and_weights), rel=0.02)
    assert back == gradients == pytest.approx(2 * rows * 32 * 4, rel=0.02)
    assert returned == pytest.approx(2 * rows * (32 + top_k) * 4, rel=0.02)
    assert [one.nbytes for one in work.full.dispatches] == ([there] if "recompute" in plan else [])


def _rank(one: Prediction) -> tuple[int, int, int]:
    return plan_sort_key(one.step_seconds, one.peak_memory, one.plan)


@pytest.mark.full
def test_plans_of_an_adapted_model_fit() -> None:
    base = Plan(**MIXED)
    best, *others = plait.plans(adapted(), "h100-sxm", ranks=2, batch=4, base=base, most=2)
    assert best.fits
    assert best.plan.world == 2
    assert best.step_seconds <= others[0].step_seconds


def test_predictions_of_a_model_with_experts_say_that_routing_is_assumed_to_be_balanced() -> None:
    mixture = plait.MixtureOfExperts(hidden=8, inner=4, experts=4, top_k=2)
    model = nn.Sequential(nn.Embedding(20, 8), mixture, nn.Linear(8, 20))
    inputs = torch.zeros(2, 6, dtype=torch.int64)
    sentence = "Routing is assumed to be balanced: each expert computes equally many tokens."
    for told in (
        plait.memory(model, Plan(), inputs),
        plait.predict(model, Plan(), "h100-sxm", inputs=inputs),
    ):
        assert str(told).splitlines()[-1] == sentence
    for other in (plait.memory(llama(), Plan()), plait.predict(adapted(), Plan(), "h100-sxm")):
        assert "balanced" not in str(other)


def test_a_model_without_known_rows_is_refused() -> None:
    with pytest.raises(ModelError, match="the rows of Sequential are not known: give inputs"):
        predict(perceptron(), Plan(), "h100-sxm")
    with pytest.raises(ModelError, match="the model is a int: give an nn"):
        predict(3, Plan(), "h100-sxm")
