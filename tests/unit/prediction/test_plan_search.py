"""The search of plans against the prediction of every plan, without any bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.prediction.decoder import Decoder
from plait.prediction.hardware import Hardware, load_hardware
from plait.prediction.plan_search import search
from plait.prediction.plan_space import PlanChoices, divisions
from plait.prediction.step_prediction import Prediction, predict

MIXED = Plan(precision="bf16", master_precision="fp32")
LLAMA = Decoder(layers=3, hidden=1024, heads=8, kv_heads=4, vocab=8000, context=512, gated=True, rotary=True)
GPT2 = Decoder(
    layers=2, hidden=768, heads=6, vocab=50000, context=256, biases=True, positions=True, tied=True
)
H100 = load_hardware("h100-sxm")
SLOW = replace(load_hardware("a100-40"), devices=2, oversubscription=8.0)
PIPELINES = PlanChoices(states=(("optimizer", "last"),), recompute=("none", "full"))
STATES = PlanChoices(schedules=(("1f1b", 1), ("zb-v", 2)), recompute=("selective", "none"))


def _every_plan(
    model: Decoder, hardware: Hardware, ranks: int, batch: int, choices: PlanChoices
) -> list[Prediction]:
    plans = [
        replace(plan, schedule=policy, chunks=chunks)
        for division in divisions(model, ranks, batch)[0]
        for plan in division.options(MIXED, choices)
        for policy, chunks in division.schedules(len(model.kinds), choices)
    ]
    return [predict(model, plan, hardware, rows=batch // plan.dp) for plan in plans]


def _compare(
    model: Decoder, hardware: Hardware, ranks: int, batch: int, choices: PlanChoices, most: int
) -> None:
    every = _every_plan(model, hardware, ranks, batch, choices)
    peaks = sorted(max(rank.allocated for rank in one.memory) for one in every)
    for room in (None, peaks[len(peaks) // 3], peaks[0] * 0.99):  # all fit, a third, none
        machine = hardware if room is None else replace(hardware, memory=room + hardware.reserved)
        fitting = [
            one for one in every if max(r.allocated + r.reserved for r in one.memory) <= machine.memory
        ]
        found = search(model, machine, ranks, batch, base=MIXED, choices=choices, most=most)
        expected = sorted(one.step_seconds for one in fitting)[:most]
        assert [one.step_seconds for one in found.best] == expected
        assert {one.plan for one in found.best} <= {one.plan for one in fitting}
        assert found.plans == len(every)
        assert found.too_large <= len(every) - len(fitting)
        assert found.predicted <= len(fitting)
        assert found.plans == found.predicted + found.too_large + found.slower


PROBLEMS = [
    *product((LLAMA, GPT2), (H100,), (1, 2, 3, 4), (6,), (PIPELINES,)),
    *product((LLAMA, GPT2), (SLOW,), (2, 4), (2,), (STATES,)),
]


@pytest.mark.parametrize("problem", range(len(PROBLEMS)))
def test_the_search_finds_what_the_prediction_of_every_plan_finds(problem: int) -> None:
    try:
        _compare(*PROBLEMS[problem], most=1 + problem % 7)
    except PlanError:
        assert not divisions(PROBLEMS[problem][0], *PROBLEMS[problem][2:4])[0]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("hardware", [H100, SLOW], ids=("h100", "slow"))
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=("llama", "gpt2"))
@pytest.mark.parametrize("batch", [3, 8])
def test_the_search_of_all_choices_is_exact(
    model: Decoder, hardware: Hardware, ranks: int, batch: int
) -> None:
    _compare(model, hardware, ranks, batch, PlanChoices(), most=10)


def test_a_bound_saves_most_simulations() -> None:
    found = search(LLAMA, H100, 8, 8, base=MIXED, most=3)
    assert found.predicted < found.plans / 4


def test_divisions_that_are_impossible_are_counted_by_reason() -> None:
    _, impossible = divisions(GPT2, 8, 4)
    assert impossible["tp does not divide the heads"] == 4  # tp 4 with 3 divisions of 2 ranks, and tp 8
    with pytest.raises(PlanError, match="7919 ranks cannot be divided"):
        search(GPT2, H100, 7919, 4)
