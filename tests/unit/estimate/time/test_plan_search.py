"""The search of plans against the prediction of every plan, without any bound."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any

import pytest
from torch import nn

from parity.pairs import in_quick
from plait.engine.blueprint import build_blueprint
from plait.errors import PlanError
from plait.estimate.prediction.predicted_model import DecoderModel
from plait.estimate.prediction.prediction import Prediction, predict
from plait.estimate.search.plan_search import OTHERS, SEARCHES, plan_sort_key, plans, search, search_frontier
from plait.estimate.search.plan_space import PlanChoices, divisions
from plait.estimate.time.hardware import Hardware, load_hardware
from plait.models import llama
from plait.plan.decoder_sizes import Decoder, decoder_of
from plait.plan.plan import Plan

MIXED = Plan(precision="bf16", master_precision="fp32")
H100 = load_hardware("h100-sxm")
SLOW = replace(load_hardware("a100-40"), devices=2, oversubscription=8.0)
LLAMA = Decoder(layers=3, hidden=1024, heads=8, kv_heads=4, vocab=8000, context=512, gated=True, rotary=True)
GPT2 = Decoder(
    layers=2, hidden=768, heads=6, vocab=50000, context=256, biases=True, positions=True, tied=True
)


def _every_plan(
    model: Decoder, hardware: Hardware, ranks: int, batch: int, choices: PlanChoices
) -> list[Prediction]:
    plans = [
        replace(plan, schedule=policy, chunks=chunks)
        for division in divisions(DecoderModel(model), ranks, batch, Plan())[0]
        for plan in division.options(MIXED, choices)
        for policy, chunks in division.schedules(len(model.kinds), choices)
    ]
    return [predict(model, plan, hardware, rows=batch // plan.dp) for plan in plans]


def _rank(one: Prediction) -> tuple[int, int, int]:
    return plan_sort_key(one.step_seconds, one.peak_memory, one.plan)


def _compare(
    model: Decoder, hardware: Hardware, ranks: int, batch: int, choices: PlanChoices, most: int
) -> None:
    every = _every_plan(model, hardware, ranks, batch, choices)
    peaks = sorted(one.peak_memory for one in every)
    for room in (None, peaks[len(peaks) // 3], peaks[0] * 0.99):  # all fit, a third, none
        machine = hardware if room is None else replace(hardware, memory=room + hardware.reserved)
        fitting = [one for one in every if one.peak_memory + machine.reserved <= machine.memory]
        found = search(model, machine, ranks, batch, base=MIXED, choices=choices, most=most)
        assert [_rank(one) for one in found.best] == sorted(map(_rank, fitting))[:most]
        assert {one.plan for one in found.best} <= {one.plan for one in fitting}
        assert found.plans == len(every)
        assert found.too_large <= len(every) - len(fitting)
        assert found.predicted <= len(fitting)
        assert found.plans == found.predicted + found.too_large + found.slower
        assert len(found.best) <= found.predicted <= found.plans


def _compare_at_random(seed: int, ranks: int, schedules: int) -> None:
    random = Random(seed)
    base = PlanChoices()
    choices = PlanChoices(
        schedules=(("1f1b", 1), *random.sample(base.schedules[1:], schedules)),
        states=tuple(random.sample(base.states, 2)),
        recompute=tuple(random.sample(base.recompute, 2)),
        sequence_parallel=("none", *random.sample(("keep", "regather"), 1)),
    )
    model = replace(
        random.choice((LLAMA, GPT2)),
        layers=random.randint(1, 5),
        vocab=random.choice((500, 8000, 60000)),
        context=random.choice((64, 512, 2048)),
    )
    batch = random.choice((2, 3, 4, 6, 8))
    hardware = random.choice((H100, SLOW))
    if divisions(DecoderModel(model), ranks, batch, Plan())[0]:
        _compare(model, hardware, ranks, batch, choices, most=random.randint(1, 12))


@pytest.mark.parametrize("seed", in_quick(range(6), *range(4)))
def test_the_search_finds_what_the_prediction_of_every_plan_finds(seed: int) -> None:
    _compare_at_random(seed, ranks=(1, 2, 2, 3, 4, 4)[seed], schedules=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, 156))
def test_the_plan_search_of_random_problems_is_exact(seed: int) -> None:
    _compare_at_random(seed, ranks=Random(-seed).choice((2, 3, 4, 6, 8)), schedules=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "hardware", "ranks", "batch"),
    [(LLAMA, H100, 8, 8), (GPT2, SLOW, 8, 3), (GPT2, H100, 4, 3), (LLAMA, SLOW, 4, 8), (LLAMA, SLOW, 2, 3)],
    ids=["llama h100 8", "gpt2 slow 8", "gpt2 h100 4", "llama slow 4", "llama slow 2"],
)
def test_the_plan_search_over_all_choices_is_exact(
    model: Decoder, hardware: Hardware, ranks: int, batch: int
) -> None:
    _compare(model, hardware, ranks, batch, PlanChoices(), most=10)


def test_equal_times_are_ordered_by_memory_then_by_axes() -> None:
    plans = [Plan(dp=4), Plan(dp=2, cp=2)]
    assert plan_sort_key(1.0, 5.0, plans[0]) == plan_sort_key(1.0 + 1e-13, 5.0, plans[0])
    assert (
        plan_sort_key(1.0, 5.0, plans[0])
        < plan_sort_key(1.0, 5.0, plans[1])
        < plan_sort_key(1.0, 6.0, plans[0])
    )
    assert plan_sort_key(1.0, 9.0, plans[1]) < plan_sort_key(1.0 + 1e-8, 5.0, plans[0])


def test_a_bound_saves_most_simulations_and_plans_that_are_alike_count_once() -> None:
    gc.enable()
    few = PlanChoices(schedules=PlanChoices().schedules[:2], states=PlanChoices().states[:3])
    found = search(LLAMA, H100, 4, 4, base=MIXED, most=3, choices=few)
    assert found.predicted < found.plans / 4
    assert found.best == tuple(predict(LLAMA, one.plan, H100, rows=4 // one.plan.dp) for one in found.best)
    more = search(
        LLAMA,
        H100,
        4,
        4,
        base=MIXED,
        most=2,
        choices=few,
        alike=lambda one, other: one.plan.dp == other.plan.dp,
    )
    groups = [key for key, _ in groupby(one.plan.dp for one in more.best)]
    assert len(groups) == 3  # the first of those that are unlike the last shows where these end
    assert more.best[-1].plan.dp != more.best[-2].plan.dp
    assert more.best[:3] == found.best
    assert (
        len(search(LLAMA, H100, 4, 4, base=MIXED, most=1, choices=few, alike=lambda one, other: True).best)
        == 10
    )
    assert gc.isenabled()
    gc.disable()
    search(LLAMA, H100, 1, 1, most=1)
    assert not gc.isenabled()
    gc.enable()


def test_no_plan_is_both_faster_and_smaller_than_one_of_the_frontier() -> None:
    model = replace(LLAMA, context=4096, vocab=500)
    every = _every_plan(model, H100, 2, 2, PlanChoices())
    first = search(model, H100, 2, 2, base=MIXED, most=2)
    found = search_frontier(first, 2, base=MIXED)
    assert {one.plan for one in found.best} < {one.plan for one in found.plans} <= {one.plan for one in every}
    assert found.best[0].plan == first.best[0].plan
    assert all(one.hardware == H100 for one in found.plans)
    assert 2 < len(found.best) < len(found.plans) <= 2 + SEARCHES * OTHERS
    for plan, memory, _ in map(_rank, found.best):
        assert not [one for one in map(_rank, every) if one[0] < plan and one[1] <= memory]
        assert not [one for one in map(_rank, every) if one[0] <= plan and one[1] < memory]


def test_divisions_that_are_impossible_are_counted_by_reason() -> None:
    _, impossible = divisions(DecoderModel(GPT2), 8, 4, Plan())
    assert impossible["tp does not divide the heads"] == 4  # tp 4 with 3 divisions of 2 ranks, and tp 8
    message = r"7919 ranks cannot be divided for this model and a batch of 4; change .+: .+ \(\d+\); .+"
    with pytest.raises(PlanError, match=message):
        search(GPT2, H100, 7919, 4)


def test_plans_are_the_best_of_the_search_as_predict_judges_them() -> None:
    model = llama(layers=2, hidden=64, heads=4, vocab=128, context=64)
    found = plans(model, "h100-sxm", ranks=4, batch=8, base=MIXED, most=3)
    assert found == search(decoder_of(model), H100, 4, 8, base=MIXED, most=3).best
    assert [one.plan.world for one in found] == [4, 4, 4]
    assert [one.rows * one.plan.dp for one in found] == [8, 8, 8]
    times = [predict(model, one.plan, H100, rows=one.rows).step_seconds for one in found]
    assert times == [one.step_seconds for one in found] == sorted(times)
    assert plans(model, replace(H100, memory=0.0), ranks=4, batch=8) == ()


def test_a_search_offers_no_plan_that_adds_up_gradients_in_less_precision_than_asked() -> None:
    """Shards in bf16 of gradients in fp32, added up for each micro-batch: parallelize refuses it."""
    base = Plan(precision="bf16", master_precision="bf16", gradient_precision="fp32")
    states = ("none", "last"), ("full", "last"), ("full", "each")
    choices = PlanChoices(schedules=(("1f1b", 1),), states=states, recompute=("none",))
    found = search(GPT2, H100, 2, 2, base=base, choices=choices, most=100)
    assert {(one.plan.strategy, one.plan.reduce) for one in found.best} == {*states[:2]}
    refused, model = replace(base, dp=2, strategy="full", reduce="each"), nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="choose reduce 'last'"):
        build_blueprint(model, refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"most": 0}, "most is 0"),
        ({"base": "fast"}, "base is"),
        ({"base": Plan(memory_limit=3)}, "memory_limit = 3, which a search"),
        ({"ranks": 7, "batch": 3}, "7 ranks cannot be divided"),
    ],
)
def test_what_plans_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plans(GPT2, H100, **({"ranks": 4, "batch": 8} | arguments))
