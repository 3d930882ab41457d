"""Mistakes on four ranks, where two ways of cutting a model meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from parity.cases import llama
from parity.defects import norm_of_own_stage_only, tie_not_reduced, weight_work_twice
from parity.tensor_defects import bias_added_by_every_rank, copies_not_summed, entrance_without_sum
from plait.engine import parallelize as composer
from plait.plan.plan import Plan
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.backward import gradient_of_another_microbatch
from zoo.forward import mask_missing_on_one_rank, message_of_another_microbatch
from zoo.losses import mean_counted_by_every_rank
from zoo.row import Named, Row
from zoo.updates import one_parameter_not_stepped_on_one_rank

STAGES_OF_SHARDS = Plan(pp=2, tp=2, microbatches=2, layers_per_stage=(2, 2))
STAGES_OF_COPIES = Plan(pp=2, dp=2, microbatches=2, layers_per_stage=(2, 2))
COPIES_OF_SHARDS = Plan(dp=2, tp=2, microbatches=2)
FOUR_STAGES = Plan(pp=4, microbatches=4, layers_per_stage=(1, 1, 1, 1))
FOUR_PARTS = Plan(tp=4, microbatches=2)
ALL = (0, 1, 2, 3)


def reduced_over_the_wrong_axis() -> Any:
    """Gradients are summed over tp where dp is meant."""
    original = composer.reduction_groups

    def groups(owners: Any, kinds: Any, mesh: Any) -> dict[str, Any]:
        found = original(owners, kinds, mesh)
        return {name: mesh.group("tp") if group.name == "dp" else group for name, group in found.items()}

    return patch.object(composer, "reduction_groups", groups)


FOUR = (
    Row(
        defect=reduced_over_the_wrong_axis,
        model=cases.EVEN,
        plan=COPIES_OF_SHARDS,
        named=Named(phase=StepPhase.REDUCTION, ranks=ALL),
    ),
    Row(
        defect=tie_not_reduced,
        model=cases.GPT2,
        plan=STAGES_OF_COPIES,
        named=Named(
            phase=StepPhase.REDUCTION,
            parameter="embedding.token.weight",
            ranks=ALL,
            cause="sum over dp and pp is missing",
        ),
        full=True,
    ),
    Row(
        defect=copies_not_summed,
        model=llama(layers=1, heads=4, kv_heads=2),
        plan=FOUR_PARTS,
        named=Named(
            phase=StepPhase.REDUCTION,
            parameter=r"blocks.0.attention.(key|value).weight",
            ranks=ALL,
            cause="sum over tp is missing",
        ),
        full=True,
    ),
    Row(
        defect=bias_added_by_every_rank,
        model=cases.GPT2,
        plan=STAGES_OF_SHARDS,
        named=Named(phase=StepPhase.FORWARD, layer=cases.ATTENTION, microbatch=0, ranks=(0, 1), cause="bias"),
        full=True,
    ),
    Row(
        defect=entrance_without_sum,
        model=cases.GPT2,
        plan=STAGES_OF_SHARDS,
        named=Named(
            phase=StepPhase.INPUT_GRADIENT,
            layer="head",
            microbatch=0,
            ranks=(2, 3),
            cause="over tp is missing",
        ),
        full=True,
    ),
    Row(
        defect=mask_missing_on_one_rank,
        model=cases.GPT2,
        plan=STAGES_OF_COPIES,
        named=Named(phase=StepPhase.FORWARD, layer=cases.ATTENTION, microbatch=2, ranks=(1,)),
        full=True,
    ),
    Row(
        defect=message_of_another_microbatch,
        model=cases.LLAMA,
        plan=FOUR_STAGES,
        named=Named(
            phase=StepPhase.MESSAGE,
            layer="embedding",
            microbatch=1,
            ranks=(1,),
            cause="that of micro-batch 0",
        ),
        full=True,
    ),
    Row(
        defect=gradient_of_another_microbatch,
        model=cases.LLAMA,
        plan=replace(FOUR_STAGES, schedule="zb-h2"),
        named=Named(
            phase=StepPhase.GRADIENT_MESSAGE,
            layer=cases.MLP,
            microbatch=1,
            ranks=(2,),
            cause="that of micro-batch 0",
        ),
        full=True,
    ),
    Row(
        defect=weight_work_twice,
        model=cases.UNTIED,
        plan=replace(STAGES_OF_SHARDS, schedule="zb-h1"),
        named=Named(
            phase=StepPhase.WEIGHT_GRADIENT,
            layer="head",
            parameter="head.output.weight",
            microbatch=0,
            ranks=(2, 3),
            cause="twice",
        ),
        full=True,
    ),
    Row(
        defect=norm_of_own_stage_only,
        model=cases.GPT2,
        plan=STAGES_OF_SHARDS,
        named=Named(phase=StepPhase.NORM, ranks=ALL, cause="too small"),
        full=True,
    ),
    Row(
        defect=mean_counted_by_every_rank,
        model=cases.GPT2,
        plan=STAGES_OF_SHARDS,
        named=Named(phase=StepPhase.MEAN_LOSS, ranks=ALL),
        full=True,
    ),
    Row(
        defect=one_parameter_not_stepped_on_one_rank,
        model=cases.GPT2,
        plan=COPIES_OF_SHARDS,
        named=Named(
            phase=StepPhase.OPTIMIZER, parameter="blocks.0.mlp.norm.weight", ranks=(1,), cause="not updated"
        ),
        full=True,
    ),
)
