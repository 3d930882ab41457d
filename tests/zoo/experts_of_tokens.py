"""Mistakes of routing: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from plait.plan.plan import Plan
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.experts import router as routers
from plait.tensor.experts import routing
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing
from plait.verification.step_location import StepPhase
from zoo import sparse
from zoo.patching import rank
from zoo.row import Named, Row


def _of_scores(change: Any) -> Any:
    """The choice of the largest scores becomes what `change` gives for scores and count."""
    original = routing._largest
    return patch.object(routing, "_largest", lambda scores, count: change(original, scores, count))


def ties_to_the_highest_number_on_one_rank() -> Any:
    """Of equal scores rank 1 takes the last."""

    def change(largest: Any, scores: Tensor, count: int) -> Tensor:
        if rank() == 0:
            return largest(scores, count)  # type: ignore[no-any-return]
        return scores.shape[-1] - 1 - largest(scores.flip(-1), count)  # type: ignore[no-any-return]

    return _of_scores(change)


def chosen_by_scores_in_bfloat16() -> Any:
    """Scores pass through bfloat16 before the choice, and many are equal then."""
    original = Routing.choose

    def choose(self: Routing, scores: Tensor, *more: Any) -> Tensor:
        return original(self, scores.bfloat16().to(scores), *more)

    return patch.object(Routing, "choose", choose)


@contextmanager
def router_given_the_next_token() -> Iterator[None]:
    """The router looks at tokens one later."""
    original = Router.forward

    def forward(self: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return original(self, hidden.roll(-1, 0))

    with patch.object(Router, "forward", forward):
        yield


@contextmanager
def router_of_one_rank_scaled() -> Iterator[None]:
    """The parameters of one rank's router are others, by a row."""
    original = routers.wide_linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return original(input, weight.roll(1, 0) if rank() == 1 else weight, bias)

    with patch.object(routers, "wide_linear", linear):
        yield


@contextmanager
def routed_otherwise_when_recomputed() -> Iterator[None]:
    """The second run of a layer chooses anew, from scores that are jittered otherwise."""
    original = Router._choose

    def choose(self: Router, scores: Tensor) -> Tensor:
        run = RECOMPUTED_RUN.get()
        is_second = run is not None and run.is_second
        return original(self, scores.roll(1, -1) if is_second else scores)

    with (
        patch.object(routers, "computed_once", lambda compute: compute()),
        patch.object(Router, "_choose", choose),
    ):
        yield


@contextmanager
def tokens_beyond_a_capacity_dropped() -> Iterator[None]:
    """An expert takes no more than eight tokens of a rank."""
    original = Experts.start

    def start(self: Experts, hidden: Tensor, indices: Tensor, weights: Tensor) -> Any:
        if indices.is_meta:
            return original(self, hidden, indices, weights)
        kept = indices.clone()
        for expert in range(self.num_experts):
            tokens, slots = (indices == expert).nonzero(as_tuple=True)
            kept[tokens[8:], slots[8:]] = -1
        return original(self, hidden, kept, weights)

    with patch.object(Experts, "start", start):
        yield


def weights_in_the_order_of_experts() -> Any:
    """The weights of a token are sorted by their experts' numbers, and its experts are not."""
    original = Routing.weights

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        return original(self, scores, indices.sort(-1).values)

    return patch.object(Routing, "weights", weights)


@contextmanager
def gradient_of_chosen_scores_only() -> Iterator[None]:
    """The sum of a token's weights is taken for a constant."""

    def weights(self: Routing, scores: Tensor, indices: Tensor) -> Tensor:
        chosen = scores.gather(-1, indices)
        return chosen / chosen.sum(-1, keepdim=True).detach()

    with patch.object(Routing, "weights", weights):
        yield


def _row(
    defect: Any,
    phase: StepPhase = StepPhase.ROUTING,
    *,
    model: Any = sparse.FIVE,
    plan: Plan = sparse.EP,
    full: bool = True,
    layer: str = "1",
    **named: Any,
) -> Row:
    named = {"microbatch": 0, "ranks": (0,)} | named
    return Row(
        defect=defect, model=model, plan=plan, named=Named(phase=phase, layer=layer, **named), full=full
    )


OTHERWISE, OTHERS = "chosen otherwise", "the scores are others"
EXPERTS_OF_TOKENS = (
    _row(
        ties_to_the_highest_number_on_one_rank,
        model=sparse.TIED,
        layer="0",
        microbatch=2,
        ranks=(1,),
        cause="row 0, position 2: to experts 4, 3 instead of experts 0, 1, .* equal scores",
        full=False,
    ),
    _row(chosen_by_scores_in_bfloat16, microbatch=None, ranks=None, layer=None, cause=OTHERWISE),
    _row(router_given_the_next_token, cause=OTHERS),
    _row(router_of_one_rank_scaled, ranks=(1,), microbatch=2, cause=OTHERS),
    _row(
        routed_otherwise_when_recomputed,
        StepPhase.RECOMPUTED_ROUTING,
        plan=sparse.RECOMPUTED,
        layer="2",
        cause=OTHERWISE,
    ),
    _row(tokens_beyond_a_capacity_dropped, StepPhase.FORWARD, cause="what experts gives"),
    _row(weights_in_the_order_of_experts, StepPhase.FORWARD, cause="what router gives"),
    _row(gradient_of_chosen_scores_only, StepPhase.INPUT_GRADIENT, layer="2", cause="its backward"),
)
