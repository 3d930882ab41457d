"""Experts that are divided over ranks give what the plain loop gives, in every division."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from divided_cases import Division, Trial, check
from expert_cases import CASES, Case

from plait.plan.layout import divide
from plait.plan.plan import Recompute
from plait.ranks.group import Count

DIVISIONS = [
    Division(ep=2),
    Division(ep=4),
    Division(ep=2, etp=2),
    Division(etp=2),
    Division(ep=2, edp=2),
    Division(ep=2, tokens=2),
    Division(ep=4, tokens=2),
    Division(ep=4, tokens=4),
    Division(ep=2, etp=2, tokens=4),
    Division(edp=2, ep=2, tokens=4),
    Division(edp=2, tokens=2),
]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("experts", [3, 5, 6, 8])
@pytest.mark.parametrize("top_k", [1, 2])
def test_outputs_and_gradients_are_those_of_the_plain_loop(
    thread_ranks: Any, division: Division, experts: int, top_k: int
) -> None:
    check(thread_ranks, Trial(Case(experts=experts, top_k=top_k), division))


@pytest.mark.parametrize("division", [Division(ep=4), Division(ep=2, etp=2), Division(ep=2, etp=2, tokens=2)])
@pytest.mark.parametrize("name", [*(name for name in CASES if name != "odd sizes"), "few tokens"])
def test_every_kind_of_expert_and_routing_can_be_divided(
    thread_ranks: Any, division: Division, name: str
) -> None:
    """Of few tokens the last ranks have none; with one expert of three the last rank has no expert."""
    check(thread_ranks, Trial(CASES.get(name, Case(tokens=7)), division))


def test_odd_sizes_can_be_divided(thread_ranks: Any) -> None:
    check(thread_ranks, Trial(CASES["odd sizes"], Division(ep=4)))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("division", [Division(ep=2), Division(ep=2, etp=2, tokens=4)], ids=str)
def test_weight_gradients_are_computed_while_gradients_travel(
    thread_ranks: Any, division: Division, recompute: Recompute
) -> None:
    trial = Trial(CASES["gpt-oss"], division, recompute, deferred=True)
    check(thread_ranks, trial)
    check(thread_ranks, replace(trial, deferred=False))


def test_ranks_as_processes_give_what_the_plain_loop_gives(rank_pool: Any) -> None:
    check(rank_pool, Trial(Case(experts=6, top_k=2), Division(ep=2, etp=2, tokens=2), deferred=True))


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("division", [Division(ep=2), Division(ep=4), Division(ep=2, etp=2)], ids=str)
def test_traffic_is_what_the_indices_say(thread_ranks: Any, division: Division, top_k: int) -> None:
    """A token travels once to each other rank that has experts of it, and one row comes back from each."""
    trial = Trial(Case(tokens=19, experts=8, top_k=top_k), division)
    rows = rows_between(trial)
    for rank, traffic in enumerate(check(thread_ranks, trial)):
        sent = sum(count for (source, target), count in rows.items() if source == rank != target)
        received = sum(count for (source, target), count in rows.items() if target == rank != source)
        hidden = trial.case.hidden
        there = sent * (hidden + 2 * top_k) + received * hidden  # with weights and numbers, of 8 bytes each
        back = sent * hidden + received * (hidden + top_k)
        assert traffic["ep"] == {
            "all_gather": Count(1, 8 * (division.ep + trial.case.experts)),
            "all_to_all": Count(4, 8 * (there + back)),
        }


def rows_between(trial: Trial) -> dict[tuple[int, int], int]:
    """How many rows each rank sends to each."""
    division, experts = trial.division, trial.case.experts
    holders = [part for part, own in enumerate(divide(experts, division.ep)) for _ in own]
    rows: dict[tuple[int, int], int] = {}
    for source in range(division.ranks):
        for numbers in trial.inputs(source)[1].tolist():
            for part in {holders[number] for number in numbers}:
                for target in range(part * division.etp, (part + 1) * division.etp):
                    rows[source, target] = rows.get((source, target), 0) + 1
    return rows
