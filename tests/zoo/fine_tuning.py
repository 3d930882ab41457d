"""Mistakes of fine-tuning: adapters, what is whole within a region, documents, answers, frozen values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parity import lora_cases
from parity.case import Case
from parity.cases import GPT2_VOCAB, draw_contexts, gpt2, llama
from parity.test_norms_in_regions import RULES, build
from plait.engine import Engine, runner
from plait.engine import parallelize as composer
from plait.models.lora import LoraLinear
from plait.plan.plan import Plan
from plait.rules import column
from plait.tensor.dropout import Dropout, set_region_part
from plait.tensor.nested_values import Value, map_tensors
from plait.tensor.parallel import apply_rules
from plait.tensor.parallel import embedding_and_norm as norm
from plait.tensor.running_sequence import ContextParallelism, DocumentBounds, LocalSequence
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.context import PACKED, RING
from zoo.patching import during, rank
from zoo.row import Named, Row


def _not_summed() -> Any:
    """Gradients are summed over dp and cp, and not over the ranks of tp that have a summand of them."""
    original = composer.reduction_groups

    def groups(owners: Any, kinds: Any, mesh: Any) -> dict[str, Any]:
        return original(owners, {name: replace(kind, summands=1) for name, kind in kinds.items()}, mesh)

    return patch.object(composer, "reduction_groups", groups)


def gradient_of_down_of_own_features() -> Any:
    """An adapter's `down` before a column linear gets the gradient of the rank's own `up`."""
    return _not_summed()


def norm_of_heads_learns_from_own_heads() -> Any:
    """The norm of each head, which all ranks have, gets the gradient of the rank's own heads."""
    return _not_summed()


def _scaled(factor: Any, **where: Any) -> AbstractContextManager[object]:
    """Adapters count `factor(scale)` times in the forward of a stage."""

    def forward(self: LoraLinear, given: Tensor) -> Tensor:
        update: Tensor = self.up(self.down(given))
        return torch.add(self.base(given), update, alpha=factor(self.scale))

    return during("forward", lambda: patch.object(LoraLinear, "forward", forward), **where)


def scale_taken_twice() -> Any:
    """alpha / rank is applied to the adapter's output, which has it already."""
    return _scaled(lambda scale: scale**2)


def scale_of_one_rank_only() -> Any:
    """Rank 1 adds adapters without alpha / rank."""
    return _scaled(lambda scale: 1.0, on_rank=1)


def alpha_without_rank() -> Any:
    """Adapters of the second stage are scaled by alpha."""
    return _scaled(lambda scale: 5.0, layer=cases.MLP)


def mask_of_an_adapter_by_rank() -> Any:
    """The dropout before an adapter, whose input is whole, draws another mask on each rank."""
    original = apply_rules._applied

    def applied(rule: Any, module: nn.Module, parent: Any, path: str, group: Any, *more: Any) -> nn.Module:
        made = original(rule, module, parent, path, group, *more)
        if rule.kind == "replicated" and isinstance(module, Dropout):
            set_region_part(module, -1, group.index, group.size)
        return made

    return patch.object(apply_rules, "_applied", applied)


def mean_square_of_own_features() -> Any:
    """The norm over all heads divides by the mean square of the rank's own."""
    return during(
        "forward", lambda: patch.object(norm, "reduce", lambda mean, group: mean * group.size), layer="block"
    )


def joined_in_equal_thirds() -> Any:
    """The rule of query, key and value in one linear says three, where the queries are half of it."""
    return nullcontext()


def in_thirds() -> nn.Module:
    model = build()
    model.rules = {**RULES, "block.joined": column.joined(3)}  # type: ignore[assignment]
    return model


def documents_not_passed_on() -> Any:
    """The ids of documents stay behind where sequences are divided: each row is one document."""
    original = ContextParallelism.sequence

    def sequence(self: ContextParallelism, length: int, documents: DocumentBounds | None = None) -> Any:
        found: LocalSequence = original(self, length, documents if self.group.size == 1 else None)
        return found

    return patch.object(ContextParallelism, "sequence", sequence)


def answers_one_later() -> Any:
    """Which tokens are answers is that of the tokens before them."""
    original = runner.cut

    def cut(value: Value, *more: Any) -> Value:
        def shifted(labels: Tensor) -> Tensor:
            return labels.clamp(min=0).masked_fill((labels < 0).roll(1, 1), -100)

        return original(map_tensors(shifted, value), *more)

    return patch.object(runner, "cut", cut)


@contextmanager
def frozen_weights_decay() -> Iterator[None]:
    """Frozen matrices decay with the others."""
    original = Engine.step

    def step(self: Engine, *given: Any) -> Tensor:
        norm = original(self, *given)
        with torch.no_grad():
            for one in self.parameters():
                if not one.requires_grad:
                    one.mul_(0.999)
        return norm

    with patch.object(Engine, "step", step):
        yield


@contextmanager
def adapters_of_one_stage_do_not_learn() -> Iterator[None]:
    """The optimizer of rank 1 has no `up`."""
    original = Engine.parameter_groups

    def groups(self: Engine, weight_decay: float) -> list[dict[str, Any]]:
        ups = {id(one) for name, one in self.named_parameters() if name.endswith("up.weight")}
        found = original(self, weight_decay)
        if rank() == 1:
            found = [{**group, "params": [p for p in group["params"] if id(p) not in ups]} for group in found]
        return found

    with patch.object(Engine, "parameter_groups", groups):
        yield


ADAPTED = lora_cases.case(llama(layers=1))
ADAPTED_AND_DROPPING = lora_cases.case(gpt2(layers=1, heads=4), dropout=0.2)
NORMS = Case("norms", build, draw_contexts(GPT2_VOCAB))
THIRDS = Case("thirds", in_thirds, draw_contexts(GPT2_VOCAB))
TWO_PARTS = cases.TWO_PARTS


def _row(
    defect: Any,
    phase: StepPhase,
    layer: str | None,
    *,
    model: Case = ADAPTED,
    plan: Plan = TWO_PARTS,
    **more: Any,
) -> Row:
    of_all = phase in (StepPhase.REDUCTION, StepPhase.OPTIMIZER)
    named = Named(phase=phase, layer=layer, **{"microbatch": None if of_all else 0, "ranks": (0, 1)} | more)
    return Row(defect=defect, model=model, plan=plan, named=named)


FINE_TUNING = (
    _row(
        gradient_of_down_of_own_features,
        StepPhase.REDUCTION,
        None,
        parameter=r".*(query|key|value|gate|up)\.down\.weight",
        cause="sum over tp is missing",
    ),
    _row(scale_taken_twice, StepPhase.FORWARD, cases.ATTENTION, cause="inside, what key gives"),
    _row(scale_of_one_rank_only, StepPhase.FORWARD, cases.ATTENTION, cause="inside, what key gives"),
    _row(
        alpha_without_rank,
        StepPhase.FORWARD,
        cases.MLP,
        plan=cases.TWO_STAGES,
        ranks=(1,),
        cause="inside, what gate gives",
    ),
    _row(
        mask_of_an_adapter_by_rank,
        StepPhase.FORWARD,
        cases.ATTENTION,
        model=ADAPTED_AND_DROPPING,
        cause="inside, what key.dropout gives",
    ),
    _row(
        norm_of_heads_learns_from_own_heads,
        StepPhase.REDUCTION,
        None,
        model=NORMS,
        parameter="block.each.weight",
        cause="sum over tp is missing",
    ),
    _row(
        mean_square_of_own_features, StepPhase.FORWARD, "block", model=NORMS, cause="inside, what joint gives"
    ),
    _row(joined_in_equal_thirds, StepPhase.FORWARD, "block", model=THIRDS, cause="joint is given"),
    _row(
        documents_not_passed_on,
        StepPhase.FORWARD,
        cases.ATTENTION,
        model=PACKED,
        plan=RING,
        cause="for each row as one document",
    ),
    _row(answers_one_later, StepPhase.LOSS, None, model=cases.UNEVEN, cause="the targets"),
    _row(
        frozen_weights_decay,
        StepPhase.OPTIMIZER,
        None,
        plan=cases.TWO_STAGES,
        parameter=r".*(base|norm|embedding|head).*",
        ranks=None,
        cause="the weight decay is another",
    ),
    _row(
        adapters_of_one_stage_do_not_learn,
        StepPhase.OPTIMIZER,
        None,
        plan=cases.TWO_STAGES,
        parameter=r"blocks\.0\.mlp\..*\.up\.weight.*",
        ranks=(1,),
        cause="it was not updated",
    ),
)
