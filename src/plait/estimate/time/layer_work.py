"""What predictions read of a layer for one micro-batch: operations, collectives and parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from plait.estimate.time.operation_times import AxisTransfer, DeviceOperation, Elementwise
from plait.plan.decoder_sizes import LayerKind
from plait.plan.parameter_units import (
    BufferKind,
    ModelParameter,
    UnitTiming,
    kind_of,
    shards_of,
    timing_of,
)
from plait.plan.plan import Plan, Precision

Operations: TypeAlias = tuple[DeviceOperation, ...]


@dataclass(frozen=True)
class Recomputation:
    """The part of a layer's forward that its backward runs again."""

    operations: tuple[DeviceOperation, ...] = ()
    transfers: tuple[AxisTransfer, ...] = ()
    """Over `tp`."""
    exchanges: tuple[AxisTransfer, ...] = ()
    """Over `cp`."""
    dispatches: tuple[AxisTransfer, ...] = ()
    """Over `ep` × `etp`."""


@dataclass(frozen=True)
class LayerWork:
    """Operations and collectives of one layer for one micro-batch; only collectives that it waits for."""

    forward: tuple[DeviceOperation, ...] = ()
    backward: tuple[DeviceOperation, ...] = ()
    """Of the input gradient."""
    weights: tuple[DeviceOperation, ...] = ()
    """Of the weight gradient."""
    selective: Recomputation = Recomputation()
    full: Recomputation = Recomputation()
    forward_transfers: tuple[AxisTransfer, ...] = ()
    backward_gathers: tuple[AxisTransfer, ...] = ()
    """Of the output's gradient, which all products of the backward need."""
    backward_transfers: tuple[AxisTransfer, ...] = ()
    """Sums of the input's gradient and gathers of the input, during which products can run."""
    forward_exchanges: tuple[AxisTransfer, ...] = ()
    """Of keys and values between the ranks of `cp`, or of heads: a ring, or all-to-alls."""
    backward_exchanges: tuple[AxisTransfer, ...] = ()
    forward_dispatches: tuple[AxisTransfer, ...] = ()
    """Of tokens to the ranks of their experts and of results back: all-to-alls, and a gather of counts."""
    backward_dispatches: tuple[AxisTransfer, ...] = ()
    """Of the output's gradients to the experts, and of the tokens' back, during which products can run."""


class MicrobatchSizes(ABC):
    """A micro-batch of a model under a plan: sizes and work of its layers, and how parameters are stored."""

    plan: Plan
    rows: float
    """Sequences of a micro-batch on a data-parallel rank."""
    moments: float = 2
    """Tensors of a parameter's size that the optimizer keeps for it, in the mean over elements."""

    @abstractmethod
    def work(self, kind: LayerKind) -> LayerWork:
        """Return the operations and collectives of a layer of `kind`, on the largest rank of `tp`."""

    @abstractmethod
    def parameters(self, kind: LayerKind) -> float:
        """Return the number of parameters of a layer of `kind` on a rank of `tp`."""

    @abstractmethod
    def trained_parameters(self, kinds: Sequence[LayerKind]) -> float:
        """Return how many parameters of several layers train on a rank of `tp`; shared ones count once."""

    def expert_parameters(self, kinds: Sequence[LayerKind], trains: Collection[bool] = (True,)) -> float:
        """Return how many parameters of several layers on a rank belong to experts that the plan divides.

        `trains`: count those that train, or do not, or both.
        """
        return 0.0

    def gathered_item(self, kinds: Sequence[LayerKind] | None = None) -> float:
        """Return the mean bytes of one parameter element when gathered, over some layers or (None) all.

        Less than `item` where weights of linears are gathered in float8.
        """
        return self.item

    @property
    @abstractmethod
    def message_bytes(self) -> float:
        """Bytes of a message between stages."""

    @cached_property
    def kind(self) -> BufferKind:
        """How the plan stores, gathers and reduces parameters that train."""
        return kind_of(self.plan)

    @cached_property
    def timing(self) -> UnitTiming:
        """When the plan gathers parameters and reduces gradients."""
        return timing_of(self.plan)

    @cached_property
    def state_ranks(self) -> int:
        """The number of ranks over which the optimizer's state is sharded."""
        return shards_of(self.kind, self.plan)

    @cached_property
    def expert_state_ranks(self) -> int:
        """The number of ranks over which the optimizer's state of experts is sharded."""
        return shards_of(kind_of(self.plan, ModelParameter(is_expert=True)), self.plan)

    @property
    def precision(self) -> Precision:
        """The precision of matrix products that are not in float8: the plan's, by default fp32."""
        return self.plan.precision or "fp32"

    @property
    def linear_precision(self) -> str:
        """The precision of the products of linears, by whose peak rate utilisation is counted."""
        return self.precision if self.plan.linears is None else "fp8"

    @property
    def item(self) -> int:
        """Bytes of an element of an activation."""
        return self.kind.compute.itemsize

    @property
    def gradient_item(self) -> int:
        """Bytes of an element in which gradients are accumulated."""
        return self.kind.gradient.itemsize


def extrapolated(few: Any, more: Any, rows: float) -> Any:
    """Return `few` plus `rows` times its difference to `more`, for each number in tuples and dataclasses.

    Such as the operations of a layer: `more` are those for one row more. Raises ValueError where the two have
    other parts.
    """
    kind = type(few)
    if kind is not type(more):
        raise ValueError
    if kind is float or kind is int:
        return few + rows * (more - few)
    if kind is tuple:
        return tuple([extrapolated(one, two, rows) for one, two in zip(few, more, strict=True)])
    if is_dataclass(kind):
        names = _field_names(kind)
        return kind(*[extrapolated(getattr(few, name), getattr(more, name), rows) for name in names])
    return few


def with_mean_casts(work: LayerWork, first: LayerWork, microbatches: int) -> LayerWork:
    """Return a micro-batch's mean operations where the `first` of a step casts weights for all the others.

    `work`: of each of the others. Counted is the memory that casts read and write; not, for experts whose
    inner features are divided, the reduction of their scales.
    """

    def mean(own: Operations, with_casts: Operations) -> Operations:
        (nbytes, kernels), (all_bytes, all_kernels) = map(elementwise_totals, (own, with_casts))
        if all_bytes <= nbytes:
            return own
        more_kernels = max(0.0, all_kernels - kernels)
        return (*own, Elementwise((all_bytes - nbytes) / microbatches, more_kernels / microbatches))

    if first == work:
        return work
    return replace(
        work,
        forward=mean(work.forward, first.forward),
        backward=mean(work.backward, first.backward),
        weights=mean(work.weights, first.weights),
        selective=replace(
            work.selective, operations=mean(work.selective.operations, first.selective.operations)
        ),
        full=replace(work.full, operations=mean(work.full.operations, first.full.operations)),
    )


def elementwise_totals(operations: Sequence[DeviceOperation]) -> tuple[float, float]:
    """Return the bytes and kernels of the element-wise operations among `operations`, summed."""
    each = [one for one in operations if isinstance(one, Elementwise)]
    return sum(one.nbytes for one in each), sum(one.kernels for one in each)


@lru_cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
