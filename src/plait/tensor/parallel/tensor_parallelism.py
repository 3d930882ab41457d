"""The tensor and sequence parallelism of a model: its rules, proved correct and applied to layers.

A layer with the rule `sequence` is given this rank's part and gives one, but for one whose region never ends
(a head: column linears and no row linear), which gives the whole sequence. Any other layer is given the whole
sequence and gives it. Between the two kinds the sequence is split where it is made and gathered where it is
read, so that parts cross the boundary.

Parameters that such a layer has whole see one part each rank: their gradients are summed over `tp`. So are
those of modules with the rule `replicated`, which see one rank's heads or features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from plait.errors import PlanError
from plait.plan.layout.layout import Layout, Shard
from plait.plan.rules import Rule, join
from plait.ranks.group import Group
from plait.tensor.autograd.paired_collectives import to_parts, to_whole
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.experts.expert_layouts import experts_in, place_experts
from plait.tensor.experts.experts import ExpertRanks
from plait.tensor.named_layer import NamedLayer, RunOnParts
from plait.tensor.nested_values import Value, tensors_of, with_tensors
from plait.tensor.parallel.apply_rules import apply_rules
from plait.tensor.parallel.linear import RegionBoundary
from plait.tensor.parallel.partition import AXIS, Layers, Vocabulary


@dataclass(frozen=True)
class SequenceDims:
    """Along which dim activations around a layer are divided over `tp`; None where they are whole."""

    previous: int | None = None
    """Of what the previous stage or layer sends: the `next` of the previous layer."""
    input: int | None = None
    """Of the layer's input."""
    output: int | None = None
    """Of the layer's output."""
    next: int | None = None
    """Of what is sent to the next layer."""


def sequence_dims(layers: Layers, matched: Mapping[str, Rule]) -> tuple[SequenceDims, ...]:
    """Return along which dim the activations of each layer are divided over `tp` (rule `sequence`)."""
    inputs = [_dim(matched.get(path)) for path, _ in layers]
    found: list[SequenceDims] = []
    previous = None
    for (path, module), own, following in zip(layers, inputs, [*inputs[1:], None], strict=True):
        output = own if own is not None and _ends_in_parts(path, module, matched) else None
        last = len(found) == len(layers) - 1
        sent = output if following is None and not last else following
        found.append(SequenceDims(previous, own, output, sent))
        previous = sent
    others = {path for path, rule in matched.items() if rule.kind == "sequence"} - {p for p, _ in layers}
    if others:
        path = min(others)
        raise PlanError(
            f"{path} has the rule sequence, but is no layer of the model: give that rule to a whole layer, "
            f"such as {', '.join(name or 'the model' for name, _ in layers[:3])} …"
        )
    return tuple(found)


def summed_over_tp(
    layers: Layers, matched: Mapping[str, Rule], layouts: Mapping[int, Layout]
) -> dict[int, int]:
    """Return, by the `id` of each parameter, over how many ranks of `tp` its gradient has to be summed.

    Those with the same shard of the parameter; for a whole parameter all ranks, if its layer runs on parts
    of the sequence or its module has the rule `replicated`, else 1. For experts that are not divided all
    ranks, since each sends other tokens to them; for divided ones 1. Raises PlanError for a parameter that is
    whole in layers of both kinds.
    """
    found: dict[int, tuple[str, int]] = {}
    for path, layer in layers:
        on_parts = _dim(matched.get(path)) is not None
        replicated = [name for name, rule in matched.items() if rule.kind == "replicated"]
        of_experts = {id(parameter) for _, module in experts_in(layer) for parameter in module.parameters()}
        for name, parameter in layer.named_parameters():
            layout, full = layouts[id(parameter)], join(path, name)
            if AXIS not in layout.axes:
                found[id(parameter)] = full, 1
                continue
            tp = layout.axes.index(AXIS)
            placement = layout.placements[tp]
            in_region = any(full.startswith(f"{name}.") for name in replicated) or id(parameter) in of_experts
            ranks = layout.degrees[tp] if on_parts or in_region else 1
            if isinstance(placement, Shard):
                ranks = placement.copies
            first, known = found.setdefault(id(parameter), (full, ranks))
            if known != ranks:
                raise PlanError(
                    f"{first} and {full} are one parameter, whole on every rank of tp, but only one of its "
                    "layers has the rule sequence, or of its modules the rule replicated: give it to both, "
                    "or to neither."
                )
    return {parameter: ranks for parameter, (_, ranks) in found.items()}


def _dim(rule: Rule | None) -> int | None:
    """Return the sequence dim of the input of a layer with this rule, or None."""
    return rule.dim if rule is not None and rule.kind == "sequence" else None


def _ends_in_parts(path: str, layer: nn.Module, matched: Mapping[str, Rule]) -> bool:
    """Return whether a layer with rule `sequence` outputs parts of the sequence; a model's head does not."""
    kinds = set()
    for name, module in layer.named_modules(remove_duplicate=False):
        full = join(path, name)
        rule = matched.get(full)
        if rule is not None and rule.kind == "vocabulary" and isinstance(module, nn.Embedding):
            raise PlanError(
                f"{full} is an embedding partitioned by vocabulary, whose ranks all look up the same tokens, "
                "but its layer has the rule sequence: remove that rule."
            )
        if rule is not None:
            kinds.add(rule.kind)
    return "row" in kinds or not kinds & {"column", "vocabulary"}


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
    experts: ExpertRanks | None = None
    """The ranks between which experts and their tokens are divided; None: all are on each rank."""

    def apply(
        self, layers: Sequence[NamedLayer], queue: WeightGradientQueue | None = None
    ) -> list[NamedLayer]:
        """Return the layers with the rules applied: each module that has a rule is made parallel, in place.

        `layers` are private copies with this rank's shards; their modules are altered. `queue` may
        run while the gradient of a region's input is reduced.
        """
        for layer in layers:
            parts = self.sequence_dims[layer.path].input is not None
            place_experts(layer.module, self.experts, has_own_tokens=parts)
        if self.group.size == 1:
            return list(layers)
        dims = [self.sequence_dims[layer.path] for layer in layers]
        # One boundary for all layers that take parts of the same dim: layers may share a module.
        overlap = None if queue is None else queue.overlap
        registry = queue.gathered if queue is not None and self.regathers else None
        boundary_of = {one.input: RegionBoundary(self.group, one.input, overlap, registry) for one in dims}
        boundaries = [boundary_of[one.input] for one in dims]
        modules = apply_rules(named(layers), self.cuts, self.group, boundaries, queue)
        return [
            replace(layer, module=module, run_on_parts=self._run_on_parts(one, boundary))
            for layer, module, one, boundary in zip(layers, modules, dims, boundaries, strict=True)
        ]

    def _run_on_parts(self, dims: SequenceDims, boundary: RegionBoundary) -> RunOnParts | None:
        """Return a function that runs a layer on a partitioned sequence; None where the sequence is whole."""
        if dims == SequenceDims():
            return None

        def run(module: nn.Module, value: Value, length: int) -> tuple[Value, int]:
            value, length = _redistributed(value, self.group, dims.previous, dims.input, length)
            boundary.length = length
            return _redistributed(module(value), self.group, dims.output, dims.next, length)

        return run

    def vocabulary_of(self, last: NamedLayer) -> Vocabulary | None:
        """Return the partitioning of the model's logits by class, or None where they are whole."""
        if self.group.size == 1:
            return None
        for name, linear in last.module.named_modules(remove_duplicate=False):
            rule = self.cuts.get(join(last.path, name))
            by_class = rule is not None and rule.kind == "vocabulary" and not rule.gather_output
            if by_class and isinstance(linear, nn.Linear):
                return Vocabulary(linear.out_features, self.group)
        return None


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
    changed = whole if new is None else to_parts(whole, group, new)
    return with_tensors(value, [changed, *others]), length if new is None else whole.shape[new]
