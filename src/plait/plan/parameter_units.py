"""The resolved plan of a model's parameters: how each unit is stored, gathered and reduced, decided here.

A unit is the parameters that are gathered and reduced together: those of a layer, or one that several layers
share. `resolve_units` makes a `UnitSpec` of each, from the plan and what it must know of the parameters. All
else reads these: lowering to programs, groups of ranks, flat buffers, checkpoints, the memory and time of a
plan. Where a gradient is summed, and in which dtype a parameter is gathered, is said nowhere else.

The weight of a linear in float8 with one scale for the whole matrix is cast before it is gathered:

    shard in `master`    →  in `compute`  →  in float8, by the scale  →  all-gather of half the bytes
                                 └ largest value → maximum over all ranks with a part → the scale, once a step

The value that is cast is the parameter in `compute`, whether it is gathered or not: so a run has the same
numbers in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from plait.errors import PlanError
from plait.plan.axes import (
    DATA_AXES,
    EXPERT_DATA_AXES,
    EXPERT_STATE_AXES,
    REPLICA_AXES,
    STATE_AXES,
    size_along,
    sizes_of_plan,
)
from plait.plan.plan import Plan, Precision


class Dtype(NamedTuple):
    """A dtype: its name in torch, and the bytes of an element. Plans are resolved without torch."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


PRECISIONS: dict[Precision, Dtype] = {
    "fp64": Dtype("float64", 8),
    "fp32": Dtype("float32", 4),
    "bf16": Dtype("bfloat16", 2),
    "fp16": Dtype("float16", 2),
}
"""The dtype of each precision of a plan."""
FLOAT32, FLOAT16 = PRECISIONS["fp32"], PRECISIONS["fp16"]
FLOAT8 = Dtype("float8_e4m3fn", 1)
"""The dtype in which the weights of linears in float8 are gathered."""


@dataclass(frozen=True)
class ModelParameter:
    """What a plan must know of a parameter: its dtype, whether it trains, how many `tp` ranks repeat it."""

    dtype: Dtype = PRECISIONS["fp32"]
    """In the model, before the plan's precisions."""
    is_floating: bool = True
    trains: bool = True
    summands: int = 1
    """How many neighbours along `tp` hold the same part of it, and each a summand of its gradient."""
    is_expert: bool = False
    """Whether it belongs to experts, which a plan may divide over `ep` and `etp`."""
    is_summed_over_etp: bool = False
    """Whether each rank of `etp` has it whole, and a summand of its gradient."""
    takes_float8: bool = False
    """Whether all that read it are linears that cast it to float8 with one scale for the whole matrix."""


@dataclass(frozen=True)
class BufferKind:
    """How the parameters of one flat buffer are stored, gathered and reduced; the same for all of them."""

    compute: Dtype
    """Layers compute with it."""
    master: Dtype
    """The optimizer updates it."""
    gradient: Dtype
    """Gradients are accumulated in it."""
    reduce: Dtype
    """Gradients are reduced in it."""
    trains: bool = True
    sharded_over: tuple[str, ...] = ()
    """The axes over which parameters, gradients and optimizer state are cut, each rank owning a shard. Their
    ranks hold summands of the gradient, which the reduce-scatter adds. Empty: every rank has them whole."""
    reduced_over: tuple[str, ...] = DATA_AXES
    """The axes over which gradients are all-reduced, after the reduce-scatter if there is one."""
    summands: int = 1
    """How many neighbours along `tp` hold a summand of the gradient each."""
    scaled: bool = False
    """Whether layers have matrices in float8, cast from `compute`, and a scale for each.

    They are in a buffer of their own: an all-gather takes as many bytes of each rank, and shards of as many
    elements would not have as many bytes where some take one byte and others two."""
    keeps_parameters: bool = True
    """Whether whole parameters keep their values between the layers that use them."""
    keeps_gradients: bool = True
    """Whether whole gradients keep their values between the layers that add to them."""
    static: bool = False
    """Whether whole parameters and gradients stay allocated where they are: recorded graphs use them."""
    offloads_parameters: bool = False
    """Whether shards are on the CPU during a step. Between steps they are where their gradients are."""
    offloads_gradients: bool = False
    """Whether reduced gradients are on the CPU, and so the optimizer's state and the shards between steps."""

    @cached_property
    def sharded(self) -> bool:
        """Whether the optimizer updates a shard, or an offloaded copy, of the layers' parameters."""
        return bool(self.sharded_over)

    @property
    def gather(self) -> Dtype:
        """The dtype in which parameters are gathered, and in which layers have them."""
        return FLOAT8 if self.scaled else self.compute

    @property
    def has_master(self) -> bool:
        """Whether the optimizer's parameters have another dtype than the layers'."""
        return self.master != self.gather

    @property
    def adds_up_in_less(self) -> bool:
        """Whether shards of reduced gradients are summed in less precision than gradients have.

        Sums over micro-batches that are reduced one by one would lose it: such a plan is refused.
        """
        return self.trains and self.sharded and self.gradient.itemsize > self.master.itemsize

    @cached_property
    def reduced_neighbours(self) -> int:
        """Number of neighbouring `tp` ranks over which the gradient's all-reduce sums too; 1: over none."""
        return 1 if "tp" in self.sharded_over else self.summands


@dataclass(frozen=True)
class UnitTiming:
    """When a unit (parameters gathered together) is gathered, released and reduced."""

    gathers: Literal["never", "once", "each use"] = "never"
    """Whether parameters are gathered once per step, or before each use and released after it."""
    scatters: Literal["never", "last", "each"] = "never"
    """Whether gradients are reduce-scattered, after the last micro-batch or after each."""
    allocates: bool = False
    """Whether the whole gradient is allocated only while it is accumulated."""
    scales: bool = False
    """Whether a step computes scales before the first gather: some of its matrices are gathered in float8."""


@dataclass(frozen=True)
class UnitSpec:
    """How one unit of parameters (gathered and reduced together) is stored, gathered and reduced."""

    name: str
    kinds: Mapping[str, BufferKind]
    """The kind of each parameter, by its name. Parameters of one kind share a flat buffer."""
    users: tuple[int, ...]
    """The layers of the model that use it, by number."""
    timing: UnitTiming

    def __post_init__(self) -> None:
        sharded = [kind for kind in self.kinds.values() if kind.sharded]
        assert not sharded or self.timing.gathers != "never", "shards would never be gathered"
        trains = any(kind.trains for kind in sharded)
        assert not trains or self.timing.scatters != "never", "gradients would never be scattered"


def resolve_units(
    plan: Plan,
    parameters: Mapping[str, ModelParameter],
    members: Mapping[str, Sequence[str]],
    users: Mapping[str, Sequence[int]],
) -> dict[str, UnitSpec]:
    """Return by name how each unit (parameters gathered together) is sharded, gathered and reduced.

    `members`: the parameters of each unit. `users`: the numbers of the layers that use each unit. Raises
    PlanError where a parameter would be trained in fp16, and where sharded gradients would be accumulated in
    less precision than the plan asks.
    """
    timing = timing_of(plan)
    units = {}
    for unit, names in members.items():
        kinds = {name: kind_of(plan, parameters[name]) for name in names}
        scales = any(kind.scaled for kind in kinds.values())
        units[unit] = UnitSpec(unit, kinds, tuple(users[unit]), replace(timing, scales=scales))
        _require_wide_masters(units[unit])
        if timing.scatters == "each":
            _check_accumulation_dtype(units[unit])
    return units


def _require_wide_masters(unit: UnitSpec) -> None:
    """Raise PlanError where an optimizer would update float16 parameters, in which small updates are lost."""
    narrow = [name for name, kind in unit.kinds.items() if kind.trains and kind.master == PRECISIONS["fp16"]]
    if narrow:
        raise PlanError(
            f"the model's {narrow[0]} is float16, in which small steps of an optimizer are lost: set "
            "plan.master_precision to 'fp32', which keeps a copy for the optimizer, or call "
            "model.requires_grad_(False) if it is not trained."
        )


def kind_of(plan: Plan, parameter: ModelParameter | None = None) -> BufferKind:
    """Return how `plan` stores, gathers and reduces `parameter`, by default one in fp32 that trains."""
    given = parameter or ModelParameter()

    def chosen(asked: Precision | None, default: Dtype) -> Dtype:
        return default if asked is None or not given.is_floating else PRECISIONS[asked]

    compute = chosen(plan.precision, given.dtype)
    master = chosen(plan.master_precision, compute) if given.trains else compute
    gradient = chosen(plan.gradient_precision, master)
    keeps_parameters = not plan.shards or plan.strategy != "full"
    # A frozen parameter has neither gradient nor state: it is sharded only where parameters are.
    sharded = plan.shards and (given.trains or not keeps_parameters)
    # Tokens of all ranks of `ep` and `etp` reach an expert: its gradient is summed over the others.
    apart = given.is_expert and plan.divides_experts
    state_axes: tuple[str, ...] = EXPERT_STATE_AXES if apart else STATE_AXES
    data_axes: tuple[str, ...] = EXPERT_DATA_AXES if apart else DATA_AXES
    copies = ("etp",) if given.is_summed_over_etp and plan.etp > 1 else ()
    # What the optimizer updates is copied for the layers in any case: then copied in 8 bits.
    scaled = given.takes_float8 and (sharded or master != compute)
    return BufferKind(
        compute=compute,
        master=master,
        gradient=gradient,
        reduce=chosen(plan.reduce_precision, gradient),
        trains=given.trains,
        sharded_over=state_axes if sharded else (),
        reduced_over=(*(REPLICA_AXES if sharded else data_axes), *copies),
        summands=given.summands,
        scaled=scaled,
        keeps_parameters=keeps_parameters,
        keeps_gradients=not plan.shards or plan.strategy == "optimizer",
        static=plan.cuda_graphs,
        offloads_parameters=plan.offload != "none",
        offloads_gradients=plan.offload == "full",
    )


def timing_of(plan: Plan) -> UnitTiming:
    """Return when a plan's units (parameters gathered together) are gathered, released and reduced.

    A strategy that keeps whole gradients gains nothing by reducing them early: they are reduced last.
    """
    if not plan.shards:
        return UnitTiming(gathers="never" if plan.master_precision in (None, plan.precision) else "once")
    allocates = plan.strategy in ("gradients", "full")
    return UnitTiming(
        gathers="each use" if plan.strategy == "full" else "once",
        scatters=plan.reduce if allocates else "last",
        allocates=allocates,
    )


def shards_of(kind: BufferKind, plan: Plan) -> int:
    """Return over how many ranks a flat buffer of this kind is sharded; 1 where it is not sharded."""
    return size_along(kind.sharded_over, sizes_of_plan(plan))


def replicas_of(kind: BufferKind, plan: Plan) -> int:
    """Return the number of ranks of a stage over which gradients of this kind are all-reduced."""
    return size_along(kind.reduced_over, sizes_of_plan(plan)) * kind.reduced_neighbours


def _check_accumulation_dtype(unit: UnitSpec) -> None:
    """Raise PlanError where gradients would be accumulated in less precision than the plan asks."""
    for kind in unit.kinds.values():
        if kind.adds_up_in_less:
            raise PlanError(
                f"plan.gradient_precision asks for sums in {kind.gradient}, but with plan.reduce 'each' "
                f"the shards of {unit.name or 'the model'} add up in the {kind.master} of its parameters: "
                "choose reduce 'last', or set plan.master_precision to the same."
            )
