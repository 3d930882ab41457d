"""Mistakes behind the gradients: the norm, clipping, the optimizer, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from parity.defects import norm_of_own_stage_only
from parity.tensor_defects import whole_parameters_counted_by_every_rank
from plait.engine import Engine, runner
from plait.engine import engine as gradient_clipping
from plait.engine import parallelize as composer
from plait.engine.sharding.gradient_norm import scale_to, start_norm
from plait.ranks.handle import Handle
from plait.verification.step_location import StepPhase
from zoo import cases, models
from zoo.patching import rank
from zoo.row import ONE_STEP, TWO_STEPS, Named, Row


def tie_counted_by_both_stages() -> Any:
    """The norm counts a parameter of two stages on each of them."""
    original = composer.counted_parameters

    def counted(owners: Any, layouts: Any, mesh: Any, axis: str) -> frozenset[str]:
        own = original(owners, layouts, mesh, axis)
        return own | {name for name, stages in owners.items() if mesh.index("pp") in stages}

    return patch.object(composer, "counted_parameters", counted)


def largest_gradient_for_the_norm() -> Any:
    """The norm is that of the maximum."""

    def largest(units: Any, *_: Any) -> Callable[[], Tensor]:
        found = [buffer.gradient.abs().max() for unit in units for buffer in unit.trainable]
        return lambda: torch.stack(found).max()

    return patch.object(gradient_clipping, "start_norm", largest)


def norm_summed_over_data_ranks() -> Any:
    """Squares are summed over dp as well, where all ranks have the same."""
    return patch.object(
        gradient_clipping, "start_norm", lambda *arguments: lambda: start_norm(*arguments)() * 2**0.5
    )


def clipped_by_own_norm() -> Any:
    """Each rank scales by the norm of its own gradients."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        held = list(units)
        norms = [buffer.gradient.norm() for unit in held for buffer in unit.trainable]
        scale_to(held, torch.stack(norms).norm(), max_norm)

    return patch.object(gradient_clipping, "scale_to", scale)


def clipped_twice() -> Any:
    """Gradients are scaled once by hand and once by the engine."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        held = list(units)
        scale_to(held, norm, max_norm)
        scale_to(held, norm, max_norm)

    return patch.object(gradient_clipping, "scale_to", scale)


def vectors_not_clipped() -> Any:
    """Biases and scales keep their gradients."""

    def scale(units: Any, norm: Tensor, max_norm: float) -> None:
        held = list(units)
        vectors = [p for unit in held for p in unit.parameters.values() if p.dim() < 2]
        before = [vector.grad.clone() for vector in vectors]
        scale_to(held, norm, max_norm)
        for vector, gradient in zip(vectors, before, strict=True):
            vector.grad.copy_(gradient)

    return patch.object(gradient_clipping, "scale_to", scale)


def _groups(change: Any) -> Any:
    """The optimizer is given what `change` makes of the parameter groups."""
    original = Engine.parameter_groups

    def parameter_groups(self: Engine, weight_decay: float) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = change(original(self, weight_decay), self)
        return groups

    return patch.object(Engine, "parameter_groups", parameter_groups)


def vectors_decay() -> Any:
    """Biases and scales decay like matrices."""
    return _groups(lambda groups, engine: [group | {"weight_decay": 0.1} for group in groups])


def copies_are_stepped() -> Any:
    """The optimizer has copies of the parameters, made before the model was woven."""

    def copied(group: dict[str, Any]) -> dict[str, Any]:
        return group | {"params": [nn.Parameter(p.detach().clone()) for p in group["params"]]}

    return _groups(lambda groups, engine: [copied(group) for group in groups])


def _without(name: str) -> Any:
    """Rank 1's optimizer does not know a parameter."""

    def change(groups: list[dict[str, Any]], engine: Engine) -> list[dict[str, Any]]:
        left_out = dict(engine.named_parameters()).get(name) if rank() == 1 else None
        return [group | {"params": [p for p in group["params"] if p is not left_out]} for group in groups]

    return _groups(change)


def one_parameter_not_stepped_on_one_rank() -> Any:
    """Rank 1's copy of the model keeps a norm's weight as it was."""
    return _without("blocks.0.mlp.norm.weight")


def tie_stepped_on_one_stage() -> Any:
    """The last stage keeps the tied table as it was."""
    return _without("embedding.token.weight")


def rate_differs_on_one_rank() -> Any:
    """Rank 1's schedule of the learning rate is ahead."""
    return _groups(lambda groups, engine: [group | {"lr": 1e-3 * (1 + rank())} for group in groups])


def state_forgotten() -> Any:
    """Each step begins with a new optimizer."""
    return _groups(lambda groups, engine: [group | {"forgets": True} for group in groups])


@contextmanager
def step_as_long_as_the_parameter() -> Iterator[None]:
    """No patch: the optimizer looks at norms, of which a rank of tp sees a shard."""
    yield


def evaluated_in_training_mode() -> Any:
    """Layers stay in training mode."""
    return patch.object(gradient_clipping, "evaluating", lambda layers: nullcontext())


@contextmanager
def evaluated_on_own_rows() -> Iterator[None]:
    """Each data-parallel rank gives the mean over its own rows."""
    original = runner.all_reduce

    def own(tensor: Tensor, group: Any, **options: Any) -> Handle[Tensor]:
        if torch.is_grad_enabled():
            return original(tensor, group, **options)
        return Handle.done(tensor, group)

    with patch.object(runner, "all_reduce", own):
        yield


def _row(phase: StepPhase, defect: Any, model: Any, plan: Any, **more: Any) -> Row:
    shown = {key: more.pop(key) for key in ("options", "missed", "unexplained", "full") if key in more}
    return Row(defect=defect, model=model, plan=plan, named=Named(phase=phase, **more), **shown)


BOTH = (0, 1)
VECTORS = ".*(bias|norm.weight)"
NORMS = (
    _row(
        StepPhase.NORM,
        norm_of_own_stage_only,
        cases.GPT2,
        cases.TWO_STAGES,
        ranks=BOTH,
        cause="too small: it leaves out",
    ),
    _row(
        StepPhase.NORM,
        whole_parameters_counted_by_every_rank,
        cases.GPT2,
        cases.TWO_PARTS,
        ranks=BOTH,
        cause="too large",
    ),
    _row(
        StepPhase.NORM,
        tie_counted_by_both_stages,
        cases.GPT2,
        cases.TWO_STAGES,
        ranks=BOTH,
        cause="too large",
        full=True,
    ),
    _row(
        StepPhase.NORM,
        norm_summed_over_data_ranks,
        cases.GPT2,
        cases.TWO_COPIES,
        ranks=BOTH,
        cause="too large",
        full=True,
    ),
    _row(
        StepPhase.NORM,
        largest_gradient_for_the_norm,
        cases.LLAMA,
        cases.TWO_COPIES,
        ranks=BOTH,
        cause="too small",
    ),
    _row(
        StepPhase.CLIP,
        clipped_by_own_norm,
        cases.GPT2,
        cases.TWO_STAGES,
        parameter=".*",
        cause="factor|times",
    ),
    _row(
        StepPhase.CLIP,
        clipped_twice,
        cases.GPT2,
        cases.TWO_COPIES,
        ranks=BOTH,
        cause="scaled twice",
        full=True,
    ),
    _row(
        StepPhase.CLIP,
        vectors_not_clipped,
        cases.GPT2,
        cases.TWO_STAGES,
        parameter=VECTORS,
        cause="not scaled",
    ),
)
STEPS = (
    _row(
        StepPhase.OPTIMIZER,
        vectors_decay,
        cases.GPT2,
        cases.TWO_STAGES,
        parameter=VECTORS,
        cause="setting|times",
    ),
    _row(
        StepPhase.OPTIMIZER,
        copies_are_stepped,
        cases.GPT2,
        cases.TWO_COPIES,
        ranks=BOTH,
        cause="not updated",
        full=True,
    ),
    _row(
        StepPhase.OPTIMIZER,
        one_parameter_not_stepped_on_one_rank,
        cases.GPT2,
        cases.TWO_COPIES,
        parameter="blocks.0.mlp.norm.weight",
        ranks=(1,),
        cause="not updated",
    ),
    _row(
        StepPhase.OPTIMIZER,
        tie_stepped_on_one_stage,
        cases.GPT2,
        cases.TWO_STAGES,
        parameter="embedding.token.weight",
        ranks=(1,),
        cause="not updated",
    ),
    _row(
        StepPhase.OPTIMIZER,
        rate_differs_on_one_rank,
        cases.GPT2,
        cases.TWO_COPIES,
        ranks=(1,),
        cause="dp 0",
        full=True,
    ),
    _row(
        StepPhase.OPTIMIZER,
        state_forgotten,
        cases.LLAMA,
        cases.TWO_COPIES,
        step=1,
        ranks=BOTH,
        cause="state",
        options=replace(TWO_STEPS, optimizer=models.forgetful),
    ),
    _row(
        StepPhase.OPTIMIZER,
        step_as_long_as_the_parameter,
        cases.LLAMA,
        cases.TWO_PARTS,
        parameter=".*(token|attention|mlp).(query|key|value|output|gate|up|down)?.?weight",
        ranks=BOTH,
        cause="elementwise",
        options=replace(ONE_STEP, optimizer=models.Layerwise),
    ),
    _row(StepPhase.FORWARD, evaluated_in_training_mode, models.MOODY, cases.ANY_TWO_STAGES, step=1),
    _row(StepPhase.EVALUATION, evaluated_on_own_rows, cases.GPT2, cases.TWO_COPIES, step=1, ranks=BOTH),
)
UPDATES = NORMS + STEPS
