"""A model's layers as a rank of `tp` holds them: the rules applied, and proved to fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from plait.autograd.paired_collectives import to_pieces, to_whole
from plait.autograd.weight_queue import WeightGradientQueue
from plait.comm.group import Group
from plait.layers.layer_sequence import NamedLayer, RunOnPieces
from plait.layers.nested import Value, tensors_of, with_tensors
from plait.rules import Rule, join
from plait.tensor.apply_rules import apply_rules, partitioned_classes
from plait.tensor.region_boundary import RegionBoundary, SequenceBoundary, WholeBoundary
from plait.tensor.sequence_dims import SequenceDims
from plait.tensor.vocabulary import Vocabulary


def named(layers: Iterable[NamedLayer]) -> list[tuple[str, nn.Module]]:
    """The layers as pairs of path and module."""
    return [(layer.path, layer.module) for layer in layers]


@dataclass(frozen=True)
class TensorParallelism:
    """The rules of the modules that are cut over `tp`, applied to layers."""

    cuts: Mapping[str, Rule]
    sequence_dims: Mapping[str, SequenceDims]
    """How the sequence flows through each layer."""
    regathers: bool
    """Whether what enters a region in pieces is gathered again for weight gradients."""
    group: Group

    def apply(
        self, layers: Sequence[NamedLayer], queue: WeightGradientQueue | None = None
    ) -> list[NamedLayer]:
        """The layers, private copies on this rank's pieces, with their matched modules made parallel.

        `queue` may do weight work while the gradient of what enters a region is summed.
        """
        if self.group.size == 1:
            return list(layers)
        dims = [self.sequence_dims[layer.path] for layer in layers]
        # One boundary for all layers that take pieces of the same dim: layers may share a module.
        boundary_of = {one.input: self._boundary(one, queue) for one in dims}
        boundaries = [boundary_of[one.input] for one in dims]
        modules = apply_rules(named(layers), self.cuts, self.group, boundaries, queue)
        return [
            replace(layer, module=module, run_on_pieces=self._run_on_pieces(one, boundary))
            for layer, module, one, boundary in zip(layers, modules, dims, boundaries, strict=True)
        ]

    def _boundary(self, dims: SequenceDims, queue: WeightGradientQueue | None) -> RegionBoundary:
        overlap = None if queue is None else queue.overlap
        if dims.input is None:
            return WholeBoundary(self.group, overlap)
        registry = queue.gathered if queue is not None and self.regathers else None
        return SequenceBoundary(self.group, dims.input, overlap, registry)

    def _run_on_pieces(self, dims: SequenceDims, boundary: RegionBoundary) -> RunOnPieces | None:
        """Return how a layer runs that takes, makes or passes on pieces of a sequence; None for any other."""
        if dims == SequenceDims():
            return None

        def run(module: nn.Module, value: Value, length: int) -> tuple[Value, int]:
            value, length = _redistributed(value, self.group, dims.previous, dims.input, length)
            if isinstance(boundary, SequenceBoundary):
                boundary.length = length
            return _redistributed(module(value), self.group, dims.output, dims.next, length)

        return run

    def rule_of(self, layer: NamedLayer, name: str) -> Rule | None:
        """Return the rule of the module `name` in a layer, or None."""
        return self.cuts.get(join(layer.path, name))

    def vocabulary_of(self, last: NamedLayer) -> Vocabulary | None:
        """What the model's logits are pieces of, if they are."""
        if self.group.size == 1:
            return None
        classes = partitioned_classes((last.path, last.module), self.cuts)
        return None if classes is None else Vocabulary(classes, self.group)


def _redistributed(
    value: Value, group: Group, now: int | None, then: int | None, length: int
) -> tuple[Value, int]:
    """Return `value`, whose first tensor is a piece along dim `now` (None: whole), with one along `then`.

    `length` is that of the whole sequence; also returns that of the one of which the result holds a piece.
    """
    if now == then:
        return value, length
    first, *others = tensors_of(value)
    whole = first if now is None else to_whole(first, group, now, length)
    changed = whole if then is None else to_pieces(whole, group, then)
    return with_tensors(value, [changed, *others]), length if then is None else whole.shape[then]
