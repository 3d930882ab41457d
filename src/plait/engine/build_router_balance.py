"""Builds the `StepBalance` of a rank's routers; refuses schedules that need token counts too early."""

from __future__ import annotations

from plait.engine.blueprint import Blueprint
from plait.errors import ModelError, PlanError
from plait.plan.axes import DATA_AXES
from plait.ranks.mesh import Mesh
from plait.schedules.action import Kind
from plait.schedules.schedule import Schedule
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import routers_of
from plait.tensor.experts.router_losses_of_step import RouterPlace, StepBalance


def build_step_balance(blueprint: Blueprint, mesh: Mesh) -> StepBalance | None:
    """Return the `StepBalance`: this rank's router losses and expert loads; None for a model without routers.

    Raises ModelError for routers with unlike settings, and PlanError for settings that the schedule does not
    allow. Communication: a group, the first time, over which counts are summed.
    """
    places: dict[str, RouterPlace] = {}
    settings: dict[Balance, str] = {}
    for layer, dims in zip(blueprint.sequence.layers, blueprint.sequence_dims, strict=True):
        for path, router in routers_of([layer]).items():
            settings.setdefault(router.balance, path)
            places[path] = RouterPlace(len(router.weight), in_parts=dims.input is not None)
            if dims.input not in (None, 1):
                raise ModelError(
                    f"{path} is in a layer with the rule sequence along dim {dims.input}: give its layer "
                    "tensors [rows, length, hidden], and the rule dim 1."
                )
    routers_of(blueprint.sequence.layers)  # raises for one in two layers
    if not places:
        return None
    if len(settings) > 1:
        (one, first), (other, second), *_ = settings.items()
        raise ModelError(
            f"the routers {first} and {second} have unlike settings ({one} and {other}): give all the same."
        )
    (balance,) = settings
    require_counts(balance, blueprint.schedule)
    if balance.coupled and len({place.experts for place in places.values()}) > 1:
        raise ModelError(
            "the balance loss is coupled over layers with unlike numbers of experts: set coupled to False."
        )
    axes = _axes(balance, in_parts=any(place.in_parts for place in places.values()))
    return StepBalance(
        *(places, balance, mesh.group(axes), "tp" in axes),
        tp=mesh.group("tp"),
        world=mesh.group("world"),
        device=mesh.device,
    )


def _axes(balance: Balance, *, in_parts: bool) -> tuple[str, ...]:
    """Return the axes whose ranks hold other tokens of the same document, or of the step."""
    if not balance.weight or balance.counts == "previous":
        return ("cp",)  # nothing is summed within the step
    axes: tuple[str, ...] = DATA_AXES if balance.counts == "step" else ("cp",)
    if in_parts:
        axes = (*axes, "tp")
    if balance.counts == "step" and balance.coupled:
        axes = ("pp", *axes)
    return axes


def require_counts(balance: Balance, schedule: Schedule) -> None:
    """Raise PlanError if the backward of a balance loss needs token counts before its rank has them."""
    if not balance.weight:
        return
    if balance.coupled and balance.counts == "document" and schedule.ranks > 1:
        raise PlanError(
            f"the balance loss is coupled over the layers of {schedule.ranks} ranks of pp and counts each "
            'document, which no rank sees whole: set counts to "step" or "previous", or coupled to False.'
        )
    if balance.counts == "step" and not all_forwards_first(schedule):
        raise PlanError(
            "the balance loss counts the whole step, but the first backward of schedule "
            f"{schedule.policy} comes before the last forward: choose the schedule gpipe, or "
            'counts = "document" or "previous", those of the step before.'
        )


def all_forwards_first(schedule: Schedule) -> bool:
    """Return whether each rank runs all forwards before its first backward."""
    for row in schedule.actions:
        kinds = [action.kind for action in row]
        if Kind.F in kinds[kinds.count(Kind.F) :]:
            return False
    return True
