"""The tensor parallelism of a model: its rules, proved correct and applied to layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from plait.plan.rules import Rule
from plait.ranks.group import Group
from plait.tensor.autograd.paired_collectives import to_pieces, to_whole
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.layer_values import NamedLayer, RunOnPieces, Value, tensors_of, with_tensors
from plait.tensor.parallel.apply_rules import apply_rules, partitioned_classes
from plait.tensor.parallel.region_boundary import RegionBoundary
from plait.tensor.parallel.sequence_dims import SequenceDims
from plait.tensor.parallel.vocabulary_partition import Vocabulary


def named(layers: Iterable[NamedLayer]) -> list[tuple[str, nn.Module]]:
    """Return the layers as pairs of path and module."""
    return [(layer.path, layer.module) for layer in layers]


@dataclass(frozen=True)
class TensorParallelism:
    """The rules that partition modules over `tp`, ready to be applied to layers on one rank."""

    cuts: Mapping[str, Rule]
    sequence_dims: Mapping[str, SequenceDims]
    """By the layer's path."""
    regathers: bool
    """Whether the input of a region is gathered again for weight gradients."""
    group: Group

    def apply(
        self, layers: Sequence[NamedLayer], queue: WeightGradientQueue | None = None
    ) -> list[NamedLayer]:
        """Return the layers with the rules applied: each module that has a rule is made parallel.

        `layers` are private copies with this rank's shards; their modules are altered. `queue` may
        run while the gradient of a region's input is reduced.
        """
        if self.group.size == 1:
            return list(layers)
        dims = [self.sequence_dims[layer.path] for layer in layers]
        # One boundary for all layers that take pieces of the same dim: layers may share a module.
        overlap = None if queue is None else queue.overlap
        registry = queue.gathered if queue is not None and self.regathers else None
        boundary_of = {one.input: RegionBoundary(self.group, one.input, overlap, registry) for one in dims}
        boundaries = [boundary_of[one.input] for one in dims]
        modules = apply_rules(named(layers), self.cuts, self.group, boundaries, queue)
        return [
            replace(layer, module=module, run_on_pieces=self._run_on_pieces(one, boundary))
            for layer, module, one, boundary in zip(layers, modules, dims, boundaries, strict=True)
        ]

    def _run_on_pieces(self, dims: SequenceDims, boundary: RegionBoundary) -> RunOnPieces | None:
        """Return a function that runs a layer on a partitioned sequence; None where the sequence is whole."""
        if dims == SequenceDims():
            return None

        def run(module: nn.Module, value: Value, length: int) -> tuple[Value, int]:
            value, length = _redistributed(value, self.group, dims.previous, dims.input, length)
            boundary.length = length
            return _redistributed(module(value), self.group, dims.output, dims.next, length)

        return run

    def vocabulary_of(self, last: NamedLayer) -> Vocabulary | None:
        """Return the partitioning of the model's logits, or None where they are whole."""
        if self.group.size == 1:
            return None
        classes = partitioned_classes((last.path, last.module), self.cuts)
        return None if classes is None else Vocabulary(classes, self.group)


def _redistributed(
    value: Value, group: Group, old: int | None, new: int | None, length: int
) -> tuple[Value, int]:
    """Return `value`, its first tensor resharded from dim `old` to `new` (None: whole), and its whole length.

    `length` is that of the whole sequence; also returns the length of the sequence in the result.
    """
    if old == new:
        return value, length
    first, *others = tensors_of(value)
    whole = first if old is None else to_whole(first, group, old, length)
    changed = whole if new is None else to_pieces(whole, group, new)
    return with_tensors(value, [changed, *others]), length if new is None else whole.shape[new]
