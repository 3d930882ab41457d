"""Comparison of the experts that each token is sent to, as whole numbers, with those of the reference run.

Where the scores of an expert that is chosen, and of one that is not, differ by no more than rounding
explains, a token takes the experts that it has in the reference run, so that what follows can be compared. A
token whose experts are not those of the largest scores that its own router has computed is always a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from plait.engine.runner import Runtime
from plait.schedules.action import Action, Kind
from plait.tensor.experts.router import Router
from plait.verification.candidate.local_activations import ActivationParts
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.definitions.experts import experts_of_largest, scores_of
from plait.verification.reference.recorded_routing import MARGIN, ROUTING, call_names
from plait.verification.reference.recording import NO_TOLERANCE
from plait.verification.step_location import Location, RecordKey, RecordScope, StepPhase


@dataclass(frozen=True)
class Routed:
    """The logits and the chosen experts in one call of a router."""

    router: Router
    logits: Tensor
    indices: Tensor


class RoutingChecker:
    """Compares a rank's router choices with the reference run's, which replace them at near ties."""

    def __init__(self, runtime: Runtime, comparison: StepComparison, parts: ActivationParts) -> None:
        self.runtime, self.comparison, self.parts = runtime, comparison, parts
        self._calls: dict[nn.Module, list[Routed]] = {}
        """By layer."""
        self._noting: list[Router] = []
        self._replaying: list[Router] = []
        """Those that are given experts where their scores are near."""

    def begin_step(self, step: int, *, evaluating: bool) -> None:
        """Start to record the calls of routers; at near ties give them the reference run's experts."""
        for stage in self.runtime.pipeline.stages.values():
            numbers = self.runtime.blueprint.stage_layers[stage.number]
            for number, layer in zip(numbers, stage.layers, strict=True):
                for path, module in layer.module.named_modules():
                    if isinstance(module, Router):
                        self._begin(module, layer.module, RecordKey(ROUTING, number, path), step, evaluating)

    def _begin(self, router: Router, layer: nn.Module, key: RecordKey, step: int, evaluating: bool) -> None:
        router.note = partial(self._note, layer, router)
        self._noting.append(router)
        if router.balance.has_losses:
            self.comparison.findings.with_router_losses.add(key.layer)
        scopes = [
            self._scope(step, number, evaluating)
            for number in range(self.runtime.blueprint.plan.microbatches)
        ]
        if router.given is None and any(self._has_near(scope, key) for scope in scopes):
            router.given = partial(self._choose, router, key, step, evaluating)
            self._replaying.append(router)

    def _scope(self, step: int, microbatch: int, evaluating: bool) -> RecordScope:
        first = self.runtime.mesh.index("dp") * self.runtime.blueprint.plan.microbatches
        return RecordScope(step, first + microbatch, evaluating)

    def _has_near(self, scope: RecordScope, key: RecordKey) -> bool:
        """Return whether scores of a token are so near that rounding may change its experts."""
        recording, margin = self.comparison.recording, key._replace(kind=MARGIN)
        margins = recording.find(scope, margin)
        return margins is not None and bool((margins < recording.tolerances[scope][margin].allowed).any())

    def _choose(self, router: Router, key: RecordKey, step: int, evaluating: bool, scores: Tensor) -> Tensor:
        """Return the experts of each token: its own, or at near ties the reference run's."""
        own = router.routing.choose(scores, router.e_score_correction_bias, router.top_k)
        balance, recording = self.runtime.balance, self.comparison.recording
        if balance is None or balance.microbatch is None:
            return own
        scope = self._scope(step, balance.microbatch, evaluating)
        whole, margin = recording.find(scope, key), key._replace(kind=MARGIN)
        if whole is None:
            return own
        box = self.parts.of_tokens(whole.shape, len(own))
        given, margins = box.of(whole), box.of(recording.values[scope][margin])
        by_score, _ = _by_score(router, scores)
        is_replaced = (margins < recording.tolerances[scope][margin].allowed) & (given >= 0)
        is_replaced = is_replaced.all(-1) & (own == by_score).all(-1)  # else it is a mistake
        return torch.where(is_replaced.unsqueeze(-1), given, own)

    def end_step(self) -> None:
        """Stop recording, and let routers choose by themselves again."""
        while self._noting:
            self._noting.pop().note = None
        while self._replaying:
            self._replaying.pop().given = None

    def _note(self, layer: nn.Module, router: Router, logits: Tensor, indices: Tensor) -> None:
        self._calls.setdefault(layer, []).append(Routed(router, logits.detach(), indices))

    def compare(self, action: Action, layer: int, module: nn.Module, scope: RecordScope) -> None:
        """Compare the calls of routers in the latest run of a layer, forward or again in its backward."""
        calls = self._calls.pop(module, [])
        phase = StepPhase.ROUTING if action.kind is Kind.F else StepPhase.RECOMPUTED_ROUTING
        for name, call in zip(call_names(module, [one.router.weight for one in calls]), calls, strict=True):
            location = Location(
                scope.step, phase, layer, scope.microbatch, name=name, evaluating=scope.evaluated
            )
            self._compare(location, scope, RecordKey(ROUTING, layer, name), call)

    def _compare(self, location: Location, scope: RecordScope, key: RecordKey, call: Routed) -> None:
        recording, margin = self.comparison.recording, key._replace(kind=MARGIN)
        whole = recording.find(scope, key)
        if whole is None or call.indices.is_meta:
            return
        box = self.parts.of_tokens(whole.shape, len(call.indices))
        own, expected = call.indices, box.of(whole)
        margins = box.of(recording.values[scope][margin]).flatten()
        rounding = recording.tolerances[scope][margin].allowed
        by_score, own_margins = _by_score(call.router, scores_of(call.router.routing, call.logits))
        is_other = (own != expected).any(-1)
        is_other_set = (own.sort(-1).values != expected.sort(-1).values).any(-1)
        is_misread = is_other & (own != by_score).any(-1)
        actual = torch.where((is_other_set | is_misread).unsqueeze(-1), own, expected)

        def sentence() -> str:
            wrong = (actual != expected).any(-1).nonzero().flatten()
            first = int(wrong[0])
            place = box.of(torch.arange(whole[..., 0].numel()).view(*whole.shape[:-1], 1)).flatten()
            row, *position = torch.unravel_index(place[first], whole.shape[:-1])
            where = f"row {int(row)}" + "".join(f", position {int(one)}" for one in position)
            return (
                f"the first of {len(wrong)} tokens (of {len(own)}) that go to other experts is {where}: to "
                f"{_listed(own[first])} instead of {_listed(expected[first])}, "
                f"{_reason(first, expected, margins, rounding, is_misread, own_margins)}"
            )

        alternatives = ((sentence(), actual) for _ in range(1))
        self.comparison.findings.compare(
            location, actual, expected, NO_TOLERANCE, box=box, alternatives=alternatives
        )


def _by_score(router: Router, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of the largest of these scores, and the margins of the choice, by definition."""
    return experts_of_largest(router.routing, scores, router.e_score_correction_bias, router.top_k)


def _reason(
    first: int,
    expected: Tensor,
    margins: Tensor,
    rounding: float,
    is_misread: Tensor,
    own_margins: Tensor,
) -> str:
    """Return why the first token may have other experts: rounding, its scores, or the choice by them."""
    margin = float(margins[first])
    if bool((expected[first] < 0).any()):
        return "though it is padding, which has none"
    if bool(is_misread[first]):
        if not float(own_margins[first]):
            return "though of equal scores those of the lowest number are to be chosen"
        return "which are not those of its largest scores: experts are chosen otherwise"
    if margin < rounding:
        return (
            f"whose scores differ by {margin:.1e}, within the {rounding:.1e} that rounding explains: no "
            "mistake by itself, and not as it was given"
        )
    return (
        f"whose scores differ by {margin:.1e}, and rounding explains {rounding:.1e}: the scores are others, "
        "by another input of the router or other parameters"
    )


def _listed(experts: Tensor) -> str:
    numbers = [int(one) for one in experts if one >= 0]
    if not numbers:
        return "no expert"
    return f"expert{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
