"""A model's layers as a rank of `tp` holds them: the rules applied, and proved to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from plait.autograd.deferred import Keeper
from plait.autograd.dropout import Dropout, names_of
from plait.comm.group import Group
from plait.comm.mesh import Mesh
from plait.layout import Layout
from plait.pipeline.boundary import infer
from plait.pipeline.precision import DTYPES
from plait.pipeline.sequence import LayerSequence, NamedLayer, on_meta, private_copy
from plait.pipeline.values import Value, tensors_of
from plait.plan import Plan
from plait.rules import Rule
from plait.tensor.cutting import is_cut
from plait.tensor.regions import prove_layer
from plait.tensor.vocabulary import Vocabulary
from plait.tensor.weave import cut_classes, weave


def named(layers: Iterable[NamedLayer]) -> list[tuple[str, nn.Module]]:
    """The layers as pairs of path and module."""
    return [(layer.path, layer.module) for layer in layers]


@dataclass(frozen=True)
class Weaving:
    """The rules of the modules that are cut over `tp`, applied to layers."""

    cuts: Mapping[str, Rule]
    group: Group

    def weave(self, layers: Sequence[NamedLayer], keeper: Keeper | None = None) -> list[NamedLayer]:
        """The layers, private copies on this rank's pieces, with their matched modules made parallel."""
        if self.group.size == 1:
            return list(layers)
        woven = weave(named(layers), self.cuts, self.group, keeper)
        return [NamedLayer(layer.path, module) for layer, module in zip(layers, woven, strict=True)]

    def vocabulary_of(self, last: NamedLayer) -> Vocabulary | None:
        """What the model's logits are pieces of, if they are."""
        if self.group.size == 1:
            return None
        classes = cut_classes((last.path, last.module), self.cuts)
        return None if classes is None else Vocabulary(classes, self.group)


def build_skeleton(
    sequence: LayerSequence, layouts: Mapping[str, Layout], weaving: Weaving, plan: Plan, mesh: Mesh
) -> list[NamedLayer]:
    """All layers of the model as this rank would hold them, on the meta device."""
    shapes = {name: layout.local_shape(mesh.coordinate) for name, layout in layouts.items()}
    empty = on_meta(sequence, DTYPES[plan.precision], shapes)
    return weaving.weave(private_copy(sequence.layers, empty))


def _draws_for_pieces(layer: nn.Module) -> bool:
    return any(isinstance(module, Dropout) and module.in_region for module in layer.modules())


Prove = Callable[[Value], None]
"""Given a micro-batch, raises ModelError where the rules do not fit the model."""


def prover(
    sequence: LayerSequence,
    layouts: Mapping[str, Layout],
    skeleton: Sequence[NamedLayer],
    *,
    ends_inside: bool,
) -> Prove | None:
    """Proves that every parameter and every input of a layer gets its whole gradient, on the meta device.

    Of all that could be trained, frozen or not: what is frozen shapes the values of the rest. `skeleton` is
    altered, and belongs to the prover. None where nothing is cut, and so nothing is to be proved.
    """
    cut = {id(sequence.parameters[name]) for name, layout in layouts.items() if is_cut(layout)}
    if not cut and not any(_draws_for_pieces(layer.module) for layer in skeleton):
        return None
    names_cut, names_frozen = [], []
    for layer, twin in zip(sequence.layers, skeleton, strict=True):
        parameters = dict(layer.module.named_parameters(remove_duplicate=False))
        names_cut.append({name for name, one in parameters.items() if id(one) in cut})
        names_frozen.append({name for name, one in parameters.items() if not one.requires_grad})
        for parameter in twin.module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())

    def inspect(number: int, given: Value, output: Value) -> None:
        layer = skeleton[number]
        prove_layer(
            layer.path,
            tensors_of(given),
            tensors_of(output),
            dict(layer.module.named_parameters(remove_duplicate=False)),
            names_cut[number],
            frozen=names_frozen[number] - names_cut[number],
            dropouts=names_of(layer.module),
            ends_inside=ends_inside and layer is skeleton[-1],
        )

    def prove(microbatch: Value) -> None:
        infer(skeleton, microbatch, input_gradients=True, inspect=inspect)

    return prove
