"""Memory of a rank's parameters, gradients and optimizer state, from sizes, as a strategy shards them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from plait.estimate.time.layer_work import MicrobatchSizes
from plait.plan.decoder_sizes import LayerKind
from plait.schedules.action import Kind


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a rank of `pp`, before sharding: all, tied ones, its two largest layers'."""

    whole: float
    twice: float
    """Those that two of its stages use, which have a gradient for each: a tied table."""
    pair: float
    """The most of two layers that follow each other."""


def rank_parameter_counts(shape: MicrobatchSizes, stages: Sequence[Sequence[LayerKind]]) -> ParameterCounts:
    """Return the parameter counts of a rank of `pp`; `stages`: the kinds of the layers of its stages."""
    whole = shape.trained_parameters([*chain(*stages)])
    twice = sum(map(shape.trained_parameters, stages)) - whole
    each = {kind: shape.parameters(kind) for kind in {*chain(*stages)}}
    pairs = (each[one] + each[other] for kinds in stages for one, other in pairwise(kinds))
    return ParameterCounts(whole, twice, max([*each.values(), *pairs]))


def state_bytes(
    shape: MicrobatchSizes,
    sizes: ParameterCounts,
    ranks: int | None = None,
    layers: Sequence[LayerKind] | None = None,
) -> tuple[float, float, float, float]:
    """Return a rank's bytes of parameters, kept gradients, optimizer state, and gathered parameters.

    `ranks`: between which state is sharded, by default `shape.state_ranks`. `layers`: those whose parameters
    these are, if not of all.
    """
    kind, count, ranks = shape.kind, sizes.whole, ranks or shape.state_ranks
    compute, master = shape.gathered_item(layers), kind.master.itemsize
    optimizer = count / ranks * shape.moments * master
    gradients = (count + sizes.twice if kind.keeps_gradients else count / ranks) * shape.gradient_item
    if kind.keeps_parameters:
        masters = count / ranks * master if kind.has_master else 0
        return count * compute, gradients, optimizer + masters, 0.0
    # Shards are kept in the optimizer's precision alone; the layer that runs and the next one are whole.
    return count * master / ranks, gradients, optimizer, sizes.pair * compute


@dataclass(frozen=True)
class WholeGradients:
    """Bytes of whole gradients beside the rank's shards of them, where gradients are sharded."""

    always: float
    """Once allocated: those of all layers where they are reduced after the last micro-batch."""
    layer: float
    """While weight gradients are computed: of a layer, and of the one before, which is being reduced."""
    inputs_add: bool
    """Whether input gradients add to weight gradients, as those of biases and norms."""

    def of_layers(self, kind: Kind) -> float:
        """Return the bytes of whole gradients in an action of `kind` up to the end of the first backward."""
        adds = kind in (Kind.W, Kind.B) or (kind is Kind.I and self.inputs_add)
        return self.layer if adds else 0.0

    def after_backward(self, kind: Kind) -> float:
        """Return the bytes of whole gradients during an action of `kind`, after the first backward."""
        return max(self.always, self.of_layers(kind))


def whole_gradients(shape: MicrobatchSizes, sizes: ParameterCounts, *, splits: bool) -> WholeGradients:
    """Return the bytes of whole gradients beside a rank's shards; zero where gradients are not sharded.

    `splits`: whether its backwards are split. Then those of one micro-batch are all whole at once, too.
    """
    plan, item = shape.plan, shape.gradient_item
    if shape.kind.keeps_gradients:
        return WholeGradients(0.0, 0.0, False)
    at_end = shape.timing.scatters == "last"
    together = plan.microbatches > 1 or splits or plan.sends_inputs_first
    added_up = sizes.whole if at_end and together else 0.0
    return WholeGradients((added_up + sizes.twice) * item, (sizes.pair + sizes.twice) * item, at_end)
