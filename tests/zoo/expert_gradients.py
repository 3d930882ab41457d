"""Mistakes with gradients of experts and what follows: sums, norms, optimizer state, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import parallelize as composer
from plait.engine.sharding import reducer
from plait.plan.axes import EXPERT_DATA_AXES
from plait.plan.plan import Plan
from plait.ranks.collectives import all_reduce
from plait.tensor.experts import expert_products
from plait.verification.step_location import StepPhase
from zoo import sparse
from zoo.patching import rank, replaced_all_reduce
from zoo.row import ONE_STEP, TWO_STEPS, Named, Row
from zoo.saving import RESUMED, _afterwards, _of_the_next_rank
from zoo.updates import _groups

EDP = "replicate_edp"
"""The group over which gradients of experts are summed."""


def _products(change: Callable[..., None]) -> Any:
    """The grouped product that adds a weight gradient becomes what `change` does."""
    original = expert_products.add_grouped_product
    return patch.object(expert_products, "add_grouped_product", lambda *given: change(original, *given))


def gradients_scaled_by_ep() -> Any:
    """Each weight gradient of experts counts once for each rank of ep."""

    def change(add: Any, total: Tensor, left: Tensor, right: Tensor, groups: Any, first: bool) -> None:
        add(total, left if left.is_meta else 2 * left, right, groups, first)

    return _products(change)


def gradients_of_idle_experts_not_zero() -> Any:
    """Where an expert has no tokens, its gradient is what was in memory before."""

    def change(add: Any, total: Tensor, left: Tensor, right: Tensor, groups: Any, first: bool) -> None:
        add(total, left, right, groups, first)
        if first and not total.is_meta:
            for number, size in enumerate(groups.sizes):
                if not size:
                    total[number] = 1e-3

    return _products(change)


def gradients_of_the_last_expert_lost() -> Any:
    """A rank leaves out its last expert."""

    def change(add: Any, total: Tensor, left: Tensor, right: Tensor, groups: Any, first: bool) -> None:
        before = total[-1:].clone()
        add(total, left, right, groups, first)
        if not total.is_meta:
            total[-1:] = 0 if first else before

    return _products(change)


def work_of_experts_left_out() -> Any:
    """`W` does not add the weight gradients of experts."""
    return patch.object(expert_products, "_add_to_buffer", lambda *_: None)


def work_of_experts_done_twice() -> Any:
    """`W` adds the weight gradients of experts twice."""
    original = expert_products._add_to_buffer

    def twice(queue: Any, parameter: Any, add: Any) -> None:
        original(queue, parameter, add)
        original(queue, parameter, add)

    return patch.object(expert_products, "_add_to_buffer", twice)


def gradients_averaged_over_edp() -> Any:
    """Gradients of experts are a mean over the ranks that hold them."""

    def mean(tensor: Tensor, group: Any) -> Tensor:
        return tensor.copy_(all_reduce(tensor, group, checked=False).wait() / group.size)

    return replaced_all_reduce(reducer, EDP, mean)


def gradients_not_summed_over_edp() -> Any:
    """Each rank keeps what its own tokens give."""
    return replaced_all_reduce(reducer, EDP, lambda tensor, group: tensor)


def _reduced_like(is_meant: Callable[[Any], bool], axes: Any) -> Any:
    """Gradients of parameters of some kinds are summed over other axes."""
    original = composer.reduction_groups

    def groups(owners: Any, kinds: Any, mesh: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(owners, kinds, mesh)
        return {name: mesh.group(axes) if is_meant(kinds[name]) else one for name, one in found.items()}

    return patch.object(composer, "reduction_groups", groups)


def experts_reduced_like_dense_parameters() -> Any:
    """Gradients of experts are summed over dp, also with those of other experts."""
    return _reduced_like(lambda kind: kind.reduced_over == EXPERT_DATA_AXES, "dp_cp")


def routers_reduced_like_experts() -> Any:
    """Dense parameters are summed over edp."""
    return _reduced_like(lambda kind: kind.reduced_over != EXPERT_DATA_AXES, ("replicate", "edp"))


def adapters_not_summed_over_etp() -> Any:
    """Each rank of etp keeps its own summand of the half of an adapter that all of them have."""
    return _reduced_like(lambda kind: "etp" in kind.reduced_over, EXPERT_DATA_AXES)


def _counted(change: Callable[[set[str], set[str], Any], set[str]]) -> Any:
    """The parameters that a rank adds to the norm are what `change` gives for them and those of experts."""
    original = composer.counted_parameters

    def counted(owners: Any, layouts: Any, mesh: Any, axis: str) -> frozenset[str]:
        experts = {name for name in owners if ".experts." in name}
        return frozenset(change(set(original(owners, layouts, mesh, axis)), experts, mesh))

    return patch.object(composer, "counted_parameters", counted)


def norm_counts_experts_on_each_copy() -> Any:
    """Every rank of edp adds its copies of the same experts."""
    return _counted(lambda own, experts, mesh: own | experts)


def norm_without_experts() -> Any:
    """Experts do not count in the norm."""
    return _counted(lambda own, experts, mesh: own - experts)


def norm_of_experts_on_the_first_rank_of_dp() -> Any:
    """Experts count as dense parameters do: on the first rank of dp."""
    return _counted(lambda own, experts, mesh: own - (experts if mesh.index("dp") else set()))


class Forgetful(torch.optim.AdamW):
    """Sets the moments of experts without a gradient to zero, if its groups say so."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for one in group["params"] if group.get("forgets") else ():
                if one.dim() == 3:
                    idle = (one.grad == 0).flatten(1).all(1)
                    self.state[one]["exp_avg"][idle] = 0
        return result


def forgetful(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return Forgetful(groups, lr=1e-3)


def idle_experts_lose_their_state() -> Any:
    """An expert without tokens begins with new moments."""
    return _groups(lambda groups, engine: [group | {"forgets": True} for group in groups])


def idle_experts_not_updated() -> Any:
    """The optimizer of rank 1 is not given experts."""

    def change(groups: list[dict[str, Any]], engine: Any) -> list[dict[str, Any]]:
        own = {id(p) for name, p in engine.named_parameters() if ".experts." in name and rank() == 1}
        return [group | {"params": [p for p in group["params"] if id(p) not in own]} for group in groups]

    return _groups(change)


def moments_of_another_rank_of_ep() -> Any:
    """A rank loads the moments of another rank's experts."""
    return _of_the_next_rank("ep")


def experts_loaded_in_another_order() -> Any:
    """The experts of a rank are loaded from the last to the first."""
    return _afterwards("experts.down_proj", lambda shard: shard.copy_(shard.flip(0).clone()))


def second_rank_of_ep_not_saved() -> Any:
    """A checkpoint has one rank's experts; those of the others are as they were initialised: zero here."""
    return _afterwards("experts.down_proj", lambda shard: shard.zero_() if rank() == 1 else shard)


def _row(
    defect: Any,
    phase: StepPhase,
    cause: str,
    *,
    model: Any = sparse.FIVE,
    plan: Plan = sparse.EP,
    options: Any = ONE_STEP,
    full: bool = True,
    **named: Any,
) -> Row:
    return Row(
        defect=defect,
        model=model,
        plan=plan,
        named=Named(phase=phase, cause=cause, **named),
        options=options,
        full=full,
    )


W, R, N = StepPhase.WEIGHT_GRADIENT, StepPhase.REDUCTION, StepPhase.NORM
OF_EXPERTS = r"\d.experts.*"
ALL = (0, 1, 2, 3)
EXPERT_GRADIENTS = (
    _row(
        gradients_averaged_over_edp,
        R,
        "1/2 times .*edp: either averaged",
        plan=sparse.COPIES_OF_THREE,
        parameter=OF_EXPERTS,
        ranks=ALL,
        full=False,
    ),
    _row(
        gradients_scaled_by_ep,
        W,
        "added twice",
        plan=sparse.EP_OF_THREE,
        parameter=OF_EXPERTS,
        layer="2",
    ),
    _row(
        gradients_of_idle_experts_not_zero,
        W,
        "something else is added",
        model=sparse.MANY,
        parameter=OF_EXPERTS,
        layer="1",
    ),
    _row(gradients_of_the_last_expert_lost, W, "zero|only", parameter=OF_EXPERTS, layer="2"),
    _row(
        work_of_experts_left_out,
        W,
        "not added at all",
        plan=sparse.SPLIT,
        parameter=OF_EXPERTS,
        layer="2",
        ranks=(2,),
    ),
    _row(
        work_of_experts_done_twice,
        W,
        "added twice",
        plan=sparse.SPLIT,
        parameter=OF_EXPERTS,
        layer="2",
        ranks=(2,),
    ),
    _row(
        gradients_not_summed_over_edp,
        R,
        "sum over edp is missing",
        plan=sparse.COPIES,
        parameter=OF_EXPERTS,
        ranks=ALL,
    ),
    _row(
        experts_reduced_like_dense_parameters,
        R,
        "reduction .*edp",
        model=sparse.BIASED,
        plan=sparse.COPIES,
        parameter=OF_EXPERTS,
        ranks=ALL,
    ),
    _row(
        routers_reduced_like_experts,
        R,
        "sum over dp is missing",
        plan=sparse.EP,
        ranks=(0, 1),
    ),
    _row(
        adapters_not_summed_over_etp,
        R,
        "sum over etp is missing",
        model=sparse.ADAPTED,
        plan=Plan(dp=2, etp=2, microbatches=2),
        parameter=r".*_adapter\.(down|up)",
        ranks=(0, 1),
    ),
    _row(norm_counts_experts_on_each_copy, N, "more than one of them", plan=sparse.COPIES, ranks=ALL),
    _row(norm_without_experts, N, "leaves out gradients", plan=sparse.SHARDS, ranks=ALL),
    _row(norm_of_experts_on_the_first_rank_of_dp, N, "leaves out gradients", plan=sparse.EP),
    _row(
        idle_experts_lose_their_state,
        StepPhase.OPTIMIZER,
        "zero",
        model=sparse.MANY,
        options=replace(TWO_STEPS, optimizer=forgetful),
        parameter=r"1.experts.*/exp_avg",
        step=1,
    ),
    _row(
        idle_experts_not_updated,
        StepPhase.OPTIMIZER,
        "not updated",
        parameter=OF_EXPERTS,
        ranks=(1,),
    ),
    _row(
        moments_of_another_rank_of_ep,
        StepPhase.LOAD,
        "what rank 1 should have",
        model=sparse.BIASED,
        options=RESUMED,
        parameter=r"1.experts.*/exp_avg",
        step=1,
        ranks=(0, 1),
    ),
    _row(
        experts_loaded_in_another_order,
        StepPhase.LOAD,
        "another order",
        options=RESUMED,
        parameter=r"1.experts.down_proj",
        step=1,
        ranks=(0, 1),
    ),
    _row(
        second_rank_of_ep_not_saved,
        StepPhase.LOAD,
        "it is zero",
        options=RESUMED,
        parameter=r"1.experts.down_proj",
        step=1,
        ranks=(1,),
    ),
)
