"""A model's layers as a rank of `tp` holds them: the rules applied, and proved to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from plait.autograd.dropout import Dropout, names_of
from plait.autograd.paired_collectives import to_pieces, to_whole
from plait.autograd.weight_queue import WeightGradientQueue
from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.layers.layer_sequence import LayerSequence, NamedLayer, RunOnPieces, on_meta, private_copy
from plait.layers.nested import Value, tensors_of, with_tensors
from plait.layers.precision import DTYPES
from plait.layers.shape_inference import infer
from plait.layout import Layout
from plait.plan import Plan
from plait.rules import Rule
from plait.tensor.apply_rules import apply_rules, partitioned_classes
from plait.tensor.partition import is_cut
from plait.tensor.proof import Claims, prove_layer
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

    def skeleton(
        self, sequence: LayerSequence, layouts: Mapping[str, Layout], plan: Plan, mesh: Mesh
    ) -> list[NamedLayer]:
        """Return all layers of the model as this rank would hold them, on the meta device."""
        shapes = {name: layout.local_shape(mesh.coordinate) for name, layout in layouts.items()}
        empty = on_meta(sequence, DTYPES[plan.precision], shapes)
        return self.apply(private_copy(sequence.layers, empty))

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


def _draws_for_pieces(layer: nn.Module) -> bool:
    return any(isinstance(module, Dropout) and module.in_region for module in layer.modules())


Prove = Callable[[Value], None]
"""Given a micro-batch, raises ModelError where the rules do not fit the model."""


def build_prover(
    sequence: LayerSequence,
    layouts: Mapping[str, Layout],
    summed: Mapping[str, int],
    skeleton: Sequence[NamedLayer],
    sequence_dims: Sequence[SequenceDims],
    *,
    ends_inside: bool,
) -> Prove | None:
    """Proves that every parameter and every input of a layer gets its whole gradient, on the meta device.

    Of all that could be trained, frozen or not: what is frozen shapes the values of the rest. `skeleton` is
    altered, and belongs to the proof. None where nothing is cut, and so nothing is to be proved.
    """
    cut = {id(sequence.parameters[name]) for name, layout in layouts.items() if is_cut(layout)}
    in_pieces = any(dims.input is not None for dims in sequence_dims)
    if not cut and not in_pieces and not any(_draws_for_pieces(layer.module) for layer in skeleton):
        return None
    in_sum = {id(sequence.parameters[name]) for name, ranks in summed.items() if ranks > 1} - cut
    claims: list[Claims] = []
    for layer, twin in zip(sequence.layers, skeleton, strict=True):
        parameters = dict(layer.module.named_parameters(remove_duplicate=False))
        for parameter in twin.module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        dims = sequence_dims[len(claims)]
        names_cut = {name for name, one in parameters.items() if id(one) in cut}
        claims.append(
            Claims(
                cut=names_cut,
                frozen={name for name, one in parameters.items() if not one.requires_grad} - names_cut,
                summed={name for name, one in parameters.items() if id(one) in in_sum},
                begins_in_pieces=dims.previous is not None,
                ends_in_pieces=dims.next is not None,
                dropouts=names_of(twin.module),
                ends_inside=ends_inside and twin is skeleton[-1],
            )
        )

    def inspect(number: int, given: Value, output: Value) -> None:
        layer = skeleton[number]
        parameters = dict(layer.module.named_parameters(remove_duplicate=False))
        prove_layer(layer.path, tensors_of(given), tensors_of(output), parameters, claims[number])

    def prove(microbatch: Value) -> None:
        infer(skeleton, microbatch, input_gradients=True, inspect=inspect)

    return prove
