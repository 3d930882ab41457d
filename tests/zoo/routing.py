"""Mistakes of routers: the experts of a token, their weights, and the gradient that comes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parity.case import Case
from parity.cases import sparse_llama
from plait.plan.plan import Plan
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.experts import router, routing
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import Named, Row

GROUPED = Routing(scores="sigmoid", corrected=True, groups=3, chosen_groups=2, scale=2.5)
EXPERTS = 6
CORRECTIONS = (0.03, -0.05, 0.01, -0.02, 0.05, -0.03)


@cache
def routed(kind: Routing, *, top_k: int = 2, draws: bool = True) -> Case:
    """A sparse Llama of one block; `draws`: whether its router starts at random values, else at zeros."""
    sparse = sparse_llama(layers=1, experts=EXPERTS, top_k=top_k)

    def build() -> nn.Module:
        model = sparse.build()
        for mixture in (one for one in model.modules() if isinstance(one, MixtureOfExperts)):
            width = mixture.router.weight.shape[1]
            mixture.router = Router(width, EXPERTS, top_k, routing=kind, device="meta")
            if not draws:
                mixture.router.weight = nn.Parameter(torch.zeros(EXPERTS, width))
            if kind.corrected:
                mixture.router.e_score_correction_bias = torch.tensor(CORRECTIONS)
        return model

    return Case("routed", build, sparse.draw)


def weights_not_normalized() -> Any:
    """A token's weights are its scores."""
    right = Routing.weights

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        return scores.gather(-1, indices) if self.normalized else right(self, scores, indices)

    return patch.object(Routing, "weights", weights)


def weights_over_the_largest() -> Any:
    """A token's weights are its scores over the largest of them, not over their sum."""

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        chosen = scores.gather(-1, indices)
        return chosen / chosen.amax(-1, keepdim=True)

    return patch.object(Routing, "weights", weights)


def softmax_over_tokens() -> Any:
    """Scores are the softmax of an expert's logits over all tokens."""

    def scores_of(self: Routing, logits: Tensor) -> Tensor:
        return logits.softmax(0)

    return patch.object(Routing, "scores_of", scores_of)


def smallest_scores_chosen() -> Any:
    """Experts in the wrong order."""
    right = routing._largest
    return patch.object(routing, "_largest", lambda scores, count: right(-scores, count))


def correction_left_out() -> Any:
    """Experts are chosen by their scores alone."""
    right = Routing.choose

    def choose(self: Routing, scores: Tensor, correction: Tensor | None, top_k: int) -> Tensor:
        return right(self, scores, None, top_k)

    return patch.object(Routing, "choose", choose)


def correction_in_the_weights() -> Any:
    """Weights are those of the corrected scores."""
    right = Routing.weights

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        return right(self, scores + torch.tensor(CORRECTIONS).to(scores), indices)

    return patch.object(Routing, "weights", weights)


def experts_of_all_groups() -> Any:
    """Groups are not limited."""
    return patch.object(Routing, "_within_groups", lambda self, scores: scores)


def groups_by_their_largest_score() -> Any:
    """A group's score is that of its best expert."""

    def within(self: Routing, scores: Tensor) -> Tensor:
        grouped = scores.view(*scores.shape[:-1], self.groups, -1)
        chosen = torch.zeros_like(grouped[..., 0], dtype=torch.bool)
        chosen.scatter_(-1, grouped.amax(-1).topk(self.chosen_groups).indices, True)
        return grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).view(scores.shape)

    return patch.object(Routing, "_within_groups", within)


def scaled_twice() -> Any:
    """The factor of all weights counts twice."""
    right = Routing.weights

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        return self.scale * right(self, scores, indices)

    return patch.object(Routing, "weights", weights)


def logits_in_single_precision() -> Any:
    """The router's product is computed in float32."""
    right = router.wide_linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return right(input.float(), weight.float(), bias).to(input.dtype)

    return patch.object(router, "wide_linear", linear)


def gradient_of_the_router_lost() -> Any:
    """Weights of experts have no gradient."""
    right = Routing.weights

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        return right(self, scores.detach(), indices)

    return patch.object(Routing, "weights", weights)


def weights_of_the_next_token() -> Any:
    """Each token has the weights of the one after it."""
    right = Routing.weights

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        return right(self, scores, indices).roll(-1, 0)

    return patch.object(Routing, "weights", weights)


def other_experts_in_the_second_run() -> Any:
    """Recomputation chooses again, and otherwise."""
    right = router.computed_once

    def computed_once(compute: Callable[[], Tensor]) -> Tensor:
        run, first = RECOMPUTED_RUN.get(), right(compute)
        return first if run is None or not run.is_second else (first + 1) % EXPERTS

    return patch.object(router, "computed_once", computed_once)


PLAIN, CORRECTED = routed(Routing()), routed(GROUPED)
TIED = routed(Routing(), draws=False)
RECOMPUTED = Plan(microbatches=2, recompute="full")


def _row(defect: Any, model: Case, plan: Plan, phase: StepPhase = StepPhase.FORWARD, **more: Any) -> Row:
    ranks = tuple(range(plan.world))
    named = Named(phase=phase, layer=cases.MLP, microbatch=0, ranks=ranks, **more)
    return Row(defect=defect, model=model, plan=plan, named=named)


ROUTER = "what mixture.router gives is the first to differ, and what it is given is equal"
ROUTING = (
    _row(weights_not_normalized, PLAIN, cases.TWO_PARTS, cause=ROUTER),
    _row(weights_over_the_largest, PLAIN, cases.TWO_PARTS, cause=ROUTER),
    _row(softmax_over_tokens, PLAIN, cases.TWO_PARTS, StepPhase.ROUTING, cause="chosen otherwise"),
    _row(smallest_scores_chosen, PLAIN, cases.TWO_PARTS, StepPhase.ROUTING, cause="chosen otherwise"),
    _row(correction_left_out, CORRECTED, cases.TWO_PARTS, StepPhase.ROUTING, cause="chosen otherwise"),
    _row(correction_in_the_weights, CORRECTED, cases.TWO_PARTS, cause=ROUTER),
    _row(experts_of_all_groups, CORRECTED, cases.TWO_PARTS, StepPhase.ROUTING, cause="chosen otherwise"),
    _row(
        groups_by_their_largest_score, CORRECTED, cases.TWO_PARTS, StepPhase.ROUTING, cause="chosen otherwise"
    ),
    _row(scaled_twice, CORRECTED, cases.TWO_PARTS, cause=ROUTER),
    _row(logits_in_single_precision, PLAIN, cases.TWO_PARTS, cause=ROUTER),
    _row(weights_of_the_next_token, PLAIN, cases.TWO_PARTS, cause=ROUTER),
    _row(gradient_of_the_router_lost, PLAIN, cases.TWO_PARTS, StepPhase.INPUT_GRADIENT),
    _row(
        other_experts_in_the_second_run,
        PLAIN,
        RECOMPUTED,
        StepPhase.RECOMPUTED_ROUTING,
        cause="chosen otherwise",
    ),
)
