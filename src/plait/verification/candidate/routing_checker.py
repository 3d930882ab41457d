"""Comparison of the experts that each token is sent to, as whole numbers, with those of the reference run.

Tokens may go to other experts where the scores of an expert that is chosen, and of one that is not, differ by
no more than rounding explains. A token whose experts are not those of the largest scores that its own router
has computed is always a mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
    """What a call of a router has given."""

    router: Router
    logits: Tensor
    indices: Tensor


class RoutingChecker:
    """Compares what the routers of one rank choose with the recording of the reference run."""

    def __init__(self, runtime: Runtime, comparison: StepComparison, parts: ActivationParts) -> None:
        self.runtime, self.comparison, self.parts = runtime, comparison, parts
        self._calls: dict[nn.Module, list[Routed]] = {}
        """By layer."""
        self._handles: list[RemovableHandle] = []

    def begin_step(self) -> None:
        """Note the calls of routers from now on."""
        for stage in self.runtime.pipeline.stages.values():
            for number, layer in zip(
                self.runtime.blueprint.stage_layers[stage.number], stage.layers, strict=True
            ):
                for module in layer.module.modules():
                    if isinstance(module, Router):
                        note = partial(self._note, layer.module)
                        self._handles.append(module.register_forward_hook(note))
                        if module.balance.has_losses:
                            self.comparison.findings.with_router_losses.add(number)

    def end_step(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _note(
        self, layer: nn.Module, router: Router, given: Any, gives: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        logits, _, indices = gives
        routed = Routed(router, logits.detach(), indices)
        self._calls.setdefault(layer, []).append(routed)

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
        by_score, own_margins = experts_of_largest(
            call.router.routing,
            scores_of(call.router.routing, call.logits),
            call.router.e_score_correction_bias,
            call.router.top_k,
        )
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
            "mistake of the layout, so verify it with another seed"
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
