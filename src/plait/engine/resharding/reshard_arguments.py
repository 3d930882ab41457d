"""The arguments that one rank brings to a reshard: its engine, or the model with which it joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plait.checkpoint.optimizer_set import GivenOptimizers, OptimizerSet, whole_states
from plait.engine.blueprint import chosen_rules
from plait.engine.engine import Engine
from plait.engine.resharding.meta_model import meta_model
from plait.engine.resharding.optimizer_of_new_engine import OptimizerMaker
from plait.engine.resharding.rank_report import RankReport
from plait.errors import PlanError
from plait.models.layers.layer_sequence import sequence_of, without_values
from plait.models.layers.model_validation import refuse_compiled_loss, refuse_lost_settings
from plait.plan.argument_checks import require_instance
from plait.plan.rules import Rules
from plait.proof.optimizer_proof import communicating_class
from plait.tensor.losses import Loss
from plait.tensor.torch_losses import GivenLoss, as_loss


@dataclass(frozen=True)
class ReshardArguments:
    """One rank's arguments of `reshard`: the model, and its engine and optimizers if it has any."""

    model: nn.Module
    """On the meta device."""
    loss: Loss
    rules: Rules | None
    report: RankReport
    engine: Engine | None = None
    """None on a rank that joins."""
    optimizers: tuple[Optimizer, ...] = ()
    makers: tuple[OptimizerMaker, ...] = ()
    """On a rank that joins, what makes its optimizers."""
    is_list: bool = False
    """Whether optimizers were given as a list."""

    @staticmethod
    def of_engine(engine: Engine, optimizer: GivenOptimizers) -> ReshardArguments:
        """Return the arguments of a rank with an engine. Raises PlaitError for state that cannot move."""
        runtime, chosen = engine.runtime, OptimizerSet.of(optimizer)
        optimizers = () if chosen is None else chosen.members
        _refuse_owners(optimizers)
        model = meta_model(engine.blueprint.sequence, runtime.context)
        refuse_lost_settings(model, runtime.loss)
        return ReshardArguments(
            model,
            runtime.loss,
            runtime.rules,
            RankReport.of(engine, optimizers),
            engine=engine,
            optimizers=optimizers,
            is_list=isinstance(optimizer, Sequence),
        )

    @staticmethod
    def joining(
        model: object, maker: Any, device: torch.device, loss: GivenLoss | None, rules: Rules | None
    ) -> ReshardArguments:
        """Return the arguments of a rank without an engine: its model. Raises PlanError or ModelError."""
        if not isinstance(model, nn.Module):
            raise PlanError(
                f"plait.reshard was given a {type(model).__name__} in place of an engine: give the engine, "
                "or on a rank that joins the model."
            )
        if loss is None:
            raise PlanError(
                "plait.reshard was given a model without its loss: give loss=, as to plait.parallelize."
            )
        refuse_compiled_loss(loss)
        refuse_lost_settings(model, as_loss(loss))
        makers = () if maker is None else tuple(maker) if isinstance(maker, list | tuple) else (maker,)
        return ReshardArguments(
            meta_model(without_values(sequence_of(model)), getattr(model, "context", None)),
            as_loss(loss),
            chosen_rules(model, rules),
            RankReport(
                classes=[
                    (communicating_class(make) or type(_tried(make, device))).__name__ for make in makers
                ]
            ),
            makers=makers,
            is_list=isinstance(maker, list | tuple),
        )


def _refuse_owners(optimizers: Sequence[Optimizer]) -> None:
    """Raise PlanError for an optimizer of which single ranks have whole parameters with their state."""
    for one in optimizers:
        if whole_states(one) is not None:
            raise PlanError(
                f"plait.reshard does not move {type(one).__name__}, whose parameters have owners under the "
                "old plan: save a checkpoint, and load it under the new one."
            )


def _tried(make: object, device: torch.device) -> Optimizer:
    """Return the optimizer of one parameter that `make` makes. Raises PlanError where it makes none."""
    if isinstance(make, Optimizer) or not callable(make):
        raise PlanError(
            f"plait.reshard was given a {type(make).__name__} on a rank that joins: give a function that "
            "makes the optimizer of a list of parameter groups."
        )
    made: object = make([{"params": [nn.Parameter(torch.zeros(2, 2, device=device))]}])
    require_instance("what makes the optimizer gives", made, Optimizer, "give one of torch.optim", PlanError)
    assert isinstance(made, Optimizer)
    return made
