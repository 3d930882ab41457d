"""Rules applied to the layers of a model: the layout of each parameter, and the modules that are cut.

layers ─ rules → match_modules → layouts_of → (tensors are made) → apply_rules
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import cast

from torch import Tensor, nn

from plait.autograd.deferred import is_transposed_linear
from plait.autograd.dropout import Dropout, set_region_piece, set_sequence_piece
from plait.autograd.weight_queue import WeightGradientQueue
from plait.comm.group import Group
from plait.errors import ModelError, PlanError
from plait.layout import Layout
from plait.rules import Rule, Rules, entrance, join, match
from plait.tensor.embedding import VocabParallelEmbedding
from plait.tensor.linear import ColumnParallelLinear, RowParallelLinear
from plait.tensor.partition import AXIS, EVEN, UNEVEN, Axes, Layers, Partition, column_layouts, row_layouts
from plait.tensor.region_boundary import RegionBoundary, SequenceBoundary

CUTTABLE: Mapping[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
    "piece": (Dropout, nn.Dropout),
}
"""What each rule can cut, or draws for what is cut; column and row also `Conv1D` of transformers. Subclasses
compute something of their own."""
WITHOUT_LAYOUT = ("entrance", "piece", "sequence")
"""Rules of modules whose parameters stay whole."""


def match_modules(rules: Rules, layers: Layers) -> dict[str, Rule]:
    """The rule of each module's path that has one. PlanError as `match`, and for what a rule cannot cut."""
    modules = {path: module for path, module, _ in _modules(layers)}
    matched = match(rules, modules)
    for path, rule in matched.items():
        kind = type(modules[path])
        if not _is_cuttable(modules[path], rule):
            cuttable = " or ".join(_public_name(one) for one in CUTTABLE[rule.kind])
            raise PlanError(
                f"the rule {rule.kind} is for {cuttable}, but {path} is a {kind.__name__}: "
                "name another module, or leave it whole."
            )
        if rule.kind in CUTTABLE and rule.kind not in WITHOUT_LAYOUT and _is_altered(modules[path]):
            raise PlanError(
                f"{path} has hooks, or a forward of its own, which a parallel module in its place would not "
                "have: take them off, or leave it whole."
            )
    return matched


def layouts_of(layers: Layers, matched: Mapping[str, Rule], axes: Axes) -> dict[int, Layout]:
    """By the `id` of each parameter its layout over `axes`, in which it is whole where no rule cuts it.

    PlanError where it cannot be cut over `tp`, and where two modules that share it cut it differently.
    """
    found: dict[int, tuple[str, Layout]] = {}
    for path, module, parent in _modules(layers):
        layouts = _layouts(path, module, parent, matched[path], axes) if path in matched else {}
        for name, parameter in module.named_parameters(recurse=False):
            layout, full = layouts.get(name, Layout(parameter.shape, axes)), join(path, name)
            first, known = found.setdefault(id(parameter), (full, layout))
            if known != layout:
                raise PlanError(
                    f"{first} and {full} are one parameter, but the rules cut it in two ways "
                    f"({known} and {layout}): give both modules the same rule."
                )
    return {parameter: layout for parameter, (_, layout) in found.items()}


def apply_rules(
    layers: Layers,
    matched: Mapping[str, Rule],
    group: Group,
    boundaries: Sequence[RegionBoundary],
    queue: WeightGradientQueue | None = None,
) -> list[nn.Module]:
    """The layers, whose parameters are this rank's pieces already, with the matched modules made parallel.

    `boundaries` are those of each layer's regions. The layers are altered, and one that is itself matched is
    replaced. Weight work is left with `queue`.
    """
    twins: dict[int, nn.Module] = {}  # what stands in several places is made parallel once
    woven = []
    for (path, layer), boundary in zip(layers, boundaries, strict=True):
        rules = {name: matched[full] for name, full in _names(path, layer) if full in matched}
        rules = {name: rule for name, rule in rules.items() if rule.kind != "sequence"}
        enters = all(rule.kind != "entrance" for rule in rules.values())
        for name, rule in rules.items():
            module, full = layer.get_submodule(name), join(path, name)
            holder = layer.get_submodule(name.rpartition(".")[0])
            if id(module) not in twins and rule.kind == "entrance":
                module.register_forward_hook(partial(_enter, boundary, full))
                twins[id(module)] = module
            elif id(module) not in twins and isinstance(module, Dropout):
                set_region_piece(module, rule.dim, group.index, group.size)
                twins[id(module)] = module
            elif id(module) not in twins:
                twin = _twin(module, rule, group, _partition(full, rule, holder), full)
                twin.queue = queue
                if not isinstance(twin, VocabParallelEmbedding):
                    twin.boundary = boundary
                if isinstance(twin, ColumnParallelLinear):
                    twin.enters = enters
                twins[id(module)] = twins[id(twin)] = twin
            if name:
                setattr(holder, name.rpartition(".")[2], twins[id(module)])
        woven.append(twins.get(id(layer), layer))
        if isinstance(boundary, SequenceBoundary):
            _draw_for_sequence(layer, boundary)
    return woven


def partitioned_classes(layer: tuple[str, nn.Module], matched: Mapping[str, Rule]) -> int | None:
    """How many classes the logits have that the last layer gives in pieces; None where they are whole."""
    path, module = layer
    for name, full in _names(path, module):
        linear, rule = module.get_submodule(name), matched.get(full, entrance)
        if isinstance(linear, nn.Linear) and rule.kind == "vocabulary" and not rule.gather_output:
            return linear.out_features
    return None


def _draw_for_sequence(layer: nn.Module, boundary: SequenceBoundary) -> None:
    """Let the dropouts outside of regions draw for this rank's piece."""
    for module in layer.modules():
        if isinstance(module, Dropout) and not module.in_region:
            set_sequence_piece(module, boundary.dim, boundary.piece)


def _enter(boundary: RegionBoundary, path: str, module: nn.Module, given: object, output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ModelError(
            f"{path} has the rule entrance, but gave a {type(output).__name__}: give that rule to a module "
            "whose output is one tensor."
        )
    return boundary.enter(output)


def _public_name(kind: type[nn.Module]) -> str:
    return f"{'plait' if kind is Dropout else 'nn'}.{kind.__name__}"


def _is_cuttable(module: nn.Module, rule: Rule) -> bool:
    transposed = rule.kind in ("column", "row") and is_transposed_linear(module)
    return transposed or rule.kind not in CUTTABLE or type(module) in CUTTABLE[rule.kind]


def _is_altered(module: nn.Module) -> bool:
    """Whether calling it does more than its class says. Hooks can be read from private attributes only."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, kind) for kind in hooks)


def _twin(
    module: nn.Module, rule: Rule, group: Group, partition: Partition, path: str
) -> ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding:
    """The parallel module on the parameters of `module`, which are pieces already."""
    if isinstance(module, nn.Embedding):
        sizes = module.num_embeddings, module.embedding_dim
        table = VocabParallelEmbedding(*sizes, group, padding_idx=module.padding_idx, device="meta")
        table.weight = cast(nn.Parameter, module.weight)
        return table.train(module.training)
    sizes = _features(module)
    twin: ColumnParallelLinear | RowParallelLinear
    if rule.kind == "row":
        piece = rule.input_is_parallel
        twin = RowParallelLinear(
            *sizes, group, input_is_parallel=piece, partition=partition, path=path, device="meta"
        )
    else:
        whole = rule.gather_output
        twin = ColumnParallelLinear(
            *sizes, group, gather_output=whole, partition=partition, path=path, device="meta"
        )
    twin.weight, twin.bias = cast(nn.Parameter, module.weight), cast(nn.Parameter | None, module.bias)
    if is_transposed_linear(module):
        layouts = row_layouts if rule.kind == "row" else column_layouts
        twin.transposed = True
        twin.layouts = layouts(sizes[1], sizes[0], partition, {AXIS: group.size}, path, transposed=True)
    return twin.train(module.training)


def _layouts(
    path: str, module: nn.Module, parent: nn.Module | None, rule: Rule, axes: Axes
) -> dict[str, Layout]:
    """Of the parameters of a module that a rule cuts."""
    if rule.kind in WITHOUT_LAYOUT:
        return {}
    partition = _partition(path, rule, parent)
    if isinstance(module, nn.Embedding):
        return column_layouts(module.num_embeddings, module.embedding_dim, partition, axes, path)
    inputs, outputs = _features(module)
    layouts = row_layouts if rule.kind == "row" else column_layouts
    return layouts(outputs, inputs, partition, axes, path, transposed=is_transposed_linear(module))


def _features(module: nn.Module) -> tuple[int, int]:
    """Of a whole linear: how many it reads and gives. Its parameters may be pieces already."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return cast(int, module.nx), cast(int, module.nf)


def _partition(path: str, rule: Rule, parent: nn.Module | None) -> Partition:
    if rule.kind == "vocabulary":
        return UNEVEN
    if rule.parts is None:
        return replace(EVEN, blocks=rule.blocks)
    try:
        return Partition(int(attrgetter(rule.parts)(parent)), rule.repeated, blocks=rule.blocks)
    except (AttributeError, TypeError, ValueError):
        raise PlanError(
            f"the rule of {path} cuts by {rule.parts!r}, but the module that holds it has no number of that "
            "name: name an attribute that says how many parts there are."
        ) from None


def _modules(layers: Layers) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """All modules by path, under every name they have, with the module that holds each."""
    for path, layer in layers:
        for name, full in _names(path, layer):
            yield (
                full,
                layer.get_submodule(name),
                layer.get_submodule(name.rpartition(".")[0]) if name else None,
            )


def _names(path: str, layer: nn.Module) -> Iterable[tuple[str, str]]:
    """Of all modules in a layer: the name in the layer and the path in the model."""
    for name, _ in layer.named_modules(remove_duplicate=False):
        yield name, join(path, name)
