"""Experts that are divided over ranks: what one rank computes, and what the plain loop gives there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from expert_cases import Answer, Case, answer, assert_close, plain
from torch import Tensor

from plait.engine.pipeline.recompute import recomputing
from plait.plan.layout import divide
from plait.plan.layout.shards import shard
from plait.plan.plan import Recompute
from plait.ranks.group import Count
from plait.ranks.mesh import GridMesh
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WEIGHTS_NEXT, WeightGradientQueue
from plait.tensor.experts.expert_layouts import expert_layouts
from plait.tensor.experts.experts import ExpertRanks, Experts


@dataclass(frozen=True)
class Division:
    """Of the ranks: `edp × ep × etp` as experts see them, `sources × tokens` as the tokens do."""

    ep: int = 1
    etp: int = 1
    edp: int = 1
    tokens: int = 1
    """How many ranks give the same tokens."""

    @property
    def ranks(self) -> int:
        return self.edp * self.ep * self.etp

    @property
    def sources(self) -> int:
        return self.ranks // self.tokens


@dataclass(frozen=True)
class Trial:
    case: Case
    division: Division
    recompute: Recompute = "none"
    deferred: bool = False
    uneven: bool = True
    """Whether later sources have fewer tokens."""

    def case_of(self, source: int) -> Case:
        fewer = 5 * source if self.uneven else 0
        return replace(self.case, tokens=max(0, self.case.tokens - fewer))

    def inputs(self, source: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.case_of(source).inputs(10 * source)

    def gradient(self, source: int) -> Tensor:
        return self.case_of(source).gradient(10 * source)


def divided(trial: Trial) -> tuple[Experts, GridMesh]:
    """This rank's experts: parts of the parameters, and the groups."""
    division = trial.division
    mesh = GridMesh(edp=division.edp, ep=division.ep * division.etp)
    of_tokens = GridMesh(dp=division.sources, tp=division.tokens)
    layer = trial.case.layer()
    part = divmod(mesh.index("ep"), division.etp)
    for name, layout in expert_layouts(layer, {"ep": division.ep, "etp": division.etp}, "").items():
        parameter = layer.get_parameter(name)
        parameter.data = shard(parameter.detach(), layout, part)
    layer.ranks = ExpertRanks(mesh.group("ep"), division.etp, of_tokens.group("tp"))
    return layer, mesh


def answer_of_a_rank(trial: Trial) -> tuple[Answer, dict[str, dict[str, Count]]]:
    layer, mesh = divided(trial)
    source = mesh.rank // trial.division.tokens
    queue = WeightGradientQueue(mode=WEIGHTS_NEXT)
    if trial.deferred:
        defer_weight_gradients(layer, queue)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    found = answer(recomputed(layer, trial), layer, trial.inputs(source), trial.gradient(source))
    queue.run()
    return found, mesh.traffic.snapshot()


def recomputed(layer: Experts, trial: Trial) -> Callable[..., Tensor]:
    """The layer between operations that save tensors, so that its results are needed again."""
    if trial.recompute == "none":
        return layer

    def run(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        def compute(given: list[Tensor]) -> Tensor:
            return layer(given[0] * 1.0, indices, given[1] * 1.0) * 1.0

        result: Any = recomputing(trial.recompute, compute, decides=True)([hidden, weights])
        assert isinstance(result, Tensor)
        return result

    return run


def wanted(trial: Trial) -> list[Answer]:
    """What each rank should give: of the plain loop, with gradients of all tokens that reach its experts."""
    division, layer = trial.division, trial.case.layer()
    each = []
    for source in range(division.sources):
        full = copy.deepcopy(layer)
        run = lambda *given, full=full: plain(full, *given)  # noqa: E731
        each.append(answer(run, full, trial.inputs(source), trial.gradient(source)))
    answers = []
    size = division.ep * division.etp
    for rank in range(division.ranks):
        replica, part = rank // size, divmod(rank % size, division.etp)
        # A token is given by several ranks, of which each sends a slice.
        totals = {name: torch.zeros_like(one) for name, one in layer.named_parameters()}
        for other in range(replica * size, (replica + 1) * size):
            for name, one in sliced(trial, other).of_parameters.items():
                totals[name] += one
        layouts = expert_layouts(layer, {"ep": division.ep, "etp": division.etp}, "")
        own = {name: shard(totals[name], layout, part) for name, layout in layouts.items()}
        answers.append(replace(each[rank // division.tokens], of_parameters=own))
    return answers


def summed_over_etp(answers: list[Answer], etp: int) -> list[Answer]:
    """The answers, with the sums of those gradients of which each rank of `etp` has a summand."""
    sums = []
    for rank, own in enumerate(answers):
        first = rank // etp * etp
        together = [one.of_parameters for one in answers[first : first + etp]]
        total = {name: sum(one[name] for one in together) for name in own.of_parameters}
        whole = {name: total[name] for name in Experts.summed_over_etp if name in total}
        sums.append(replace(own, of_parameters=own.of_parameters | whole))
    return sums


def sliced(trial: Trial, rank: int) -> Answer:
    """The plain loop's answer for the slice of tokens that a rank sends."""
    source, place = divmod(rank, trial.division.tokens)
    given, layer = trial.inputs(source), trial.case.layer()
    own = divide(len(given[0]), trial.division.tokens)[place]
    cut: Any = tuple(one[own.start : own.stop] for one in given)
    return answer(lambda *all: plain(layer, *all), layer, cut, trial.gradient(source)[own.start : own.stop])


def check(ranks: Any, trial: Trial) -> list[dict[str, dict[str, Count]]]:
    """Every rank's output and gradients are those of the plain loop; return each rank's traffic."""
    found = ranks.run(answer_of_a_rank, trial, ranks=trial.division.ranks)
    answers = [got for got, _ in found]
    for got, one in zip(summed_over_etp(answers, trial.division.etp), wanted(trial), strict=True):
        assert_close(got, one)
    return [traffic for _, traffic in found]
