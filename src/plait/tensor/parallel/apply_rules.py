"""Application of rules to a model's layers: parameter layouts, and replacement of modules by parallel ones.

layers ─ rules → match_modules → layouts_of → (tensors are made) → apply_rules
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.plan.layout.layout import Layout
from plait.plan.rules import Rule, Rules, join, match
from plait.ranks.group import Group
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import Dropout, set_region_part, set_sequence_part
from plait.tensor.experts.expert_layouts import expert_layouts
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router
from plait.tensor.find_module_hooks import is_altered
from plait.tensor.parallel.embedding_and_norm import ParallelRMSNorm, VocabParallelEmbedding
from plait.tensor.parallel.linear import ColumnParallelLinear, RegionBoundary, RowParallelLinear
from plait.tensor.parallel.partition import (
    AXIS,
    EVEN,
    UNEVEN,
    Axes,
    Layers,
    Partition,
    column_layouts,
    norm_layouts,
    partitioned_layouts,
    row_layouts,
)

APPLICABLE: Mapping[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
    "piece": (Dropout, nn.Dropout),
    "norm": (nn.RMSNorm,),
}
"""The classes to which each rule applies, not their subclasses; column and row also to `Conv1D`."""
WITHOUT_LAYOUT = ("entrance", "piece", "sequence", "replicated")
"""Rules of modules whose parameters stay whole."""


def match_modules(rules: Rules, layers: Layers) -> dict[str, Rule]:
    """Return each matched module's rule, by path. Raises PlanError for a rule without a fitting module."""
    modules = {path: module for path, module, _ in modules_of(layers)}
    matched = match(rules, modules)
    for path, rule in matched.items():
        kind = type(modules[path])
        if not _is_applicable(modules[path], rule):
            named = (f"{'plait' if one is Dropout else 'nn'}.{one.__name__}" for one in APPLICABLE[rule.kind])
            raise PlanError(
                f"the rule {rule.kind} is for {' or '.join(named)}, but {path} is a {kind.__name__}: "
                "let the pattern of the rule match fewer modules, or remove it."
            )
        if rule.kind in APPLICABLE and rule.kind not in WITHOUT_LAYOUT and is_altered(modules[path]):
            raise PlanError(
                f"{path} has hooks, or a forward of its own, which the parallel module that replaces it "
                "would not have: remove them, or remove the rule."
            )
    return matched


def layouts_of(
    layers: Layers, matched: Mapping[str, Rule], axes: Axes, expert_axes: Axes | None = None
) -> dict[int, Layout]:
    """Return the layout over `axes` of each parameter by `id`; replicated where no rule partitions it.

    Experts have layouts over `expert_axes`, by default `axes`. PlanError where a parameter cannot be
    partitioned over `tp` or `etp`, and where two modules that share it have different rules.
    """
    found: dict[int, tuple[str, Layout]] = {}
    within: dict[int, Layout] = {}  # of experts and modules in them
    for path, module, parent in modules_of(layers):
        rule, layouts = matched.get(path), dict[str, Layout]()
        if isinstance(module, Experts):
            layouts = expert_layouts(module, expert_axes or axes, path)
            within |= {id(one): layouts[name] for name, one in module.named_parameters()}
        if rule is not None and rule.kind not in WITHOUT_LAYOUT:
            layouts = _layouts(path, module, partition_of(path, rule, parent), rule, axes)
        for name, parameter in module.named_parameters(recurse=False):
            layout = within.get(id(parameter)) or layouts.get(name, Layout(parameter.shape, axes))
            full = join(path, name)
            first, known = found.setdefault(id(parameter), (full, layout))
            if known != layout:
                raise PlanError(
                    f"{first} and {full} are one parameter, but the rules give it two layouts "
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
    """Return the layers, altered by the rules of their modules, whose parameters must be shards already.

    `boundaries` are those of each layer's regions; `queue` receives deferred weight gradients. A layer
    that is itself matched is replaced.
    """
    parallel: dict[int, nn.Module] = {}  # by `id`: a module may occur in several places
    results = []
    for (path, layer), boundary in zip(layers, boundaries, strict=True):
        rules = {name: matched[full] for name, full in _names(path, layer) if full in matched}
        rules = {name: rule for name, rule in rules.items() if rule.kind != "sequence"}
        enters = all(rule.kind != "entrance" for rule in rules.values())
        for name, rule in rules.items():
            module, parent = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
            if id(module) not in parallel:
                made = _applied(rule, module, parent, join(path, name), group, boundary, queue)
                if isinstance(made, ColumnParallelLinear):
                    made.enters = enters
                parallel[id(module)] = parallel[id(made)] = made
            if name:
                setattr(parent, name.rpartition(".")[2], parallel[id(module)])
        results.append(parallel.get(id(layer), layer))
        if boundary.dim is not None:
            for module in layer.modules():
                if isinstance(module, Dropout) and not module.in_region:
                    set_sequence_part(module, boundary.dim, boundary.part)
                elif isinstance(module, Router):
                    module.sequence_part = boundary.part
    return results


def _applied(
    rule: Rule,
    module: nn.Module,
    parent: nn.Module,
    path: str,
    group: Group,
    boundary: RegionBoundary,
    queue: WeightGradientQueue | None,
) -> nn.Module:
    """Return the parallel form of `module`; where the rule has no layout, `module` itself, modified."""
    if rule.kind == "entrance":
        module.register_forward_hook(partial(_enter, boundary, path))
        return module
    if rule.kind == "partitioned":
        return module
    if rule.kind == "replicated":
        for dropout in (one for one in module.modules() if isinstance(one, Dropout)):
            dropout.in_region = True
        return module
    if isinstance(module, Dropout):
        set_region_part(module, rule.dim, group.index, group.size)
        return module
    if rule.kind == "norm":
        assert isinstance(module, nn.RMSNorm)
        return ParallelRMSNorm(module.weight, module.eps, group)
    made = _parallel(module, rule, group, partition_of(path, rule, parent), path)
    made.queue = queue
    if not isinstance(made, VocabParallelEmbedding):
        made.boundary = boundary
        if queue is not None:
            queue.products.add(id(made.weight))
    return made


def _enter(boundary: RegionBoundary, path: str, module: nn.Module, given: object, output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ModelError(
            f"{path} has the rule entrance, but gave a {type(output).__name__}: give that rule to a module "
            "whose output is one tensor."
        )
    return boundary.enter(output)


def _is_applicable(module: nn.Module, rule: Rule) -> bool:
    transposed = rule.kind in ("column", "row") and is_transposed_linear(module)
    return transposed or rule.kind not in APPLICABLE or type(module) in APPLICABLE[rule.kind]


def _parallel(
    module: nn.Module, rule: Rule, group: Group, partition: Partition, path: str
) -> ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding:
    """Return the parallel module with the parameters of `module`, which must be shards already."""
    if isinstance(module, nn.Embedding):
        sizes = module.num_embeddings, module.embedding_dim
        table = VocabParallelEmbedding(*sizes, group, padding_idx=module.padding_idx, device="meta")
        table.weight = cast(nn.Parameter, module.weight)
        return table.train(module.training)
    is_row = rule.kind == "row"
    kind = RowParallelLinear if is_row else ColumnParallelLinear
    option: dict[str, Any] = {"gather_output": rule.gather_output}
    if is_row:
        option = {"input_is_parallel": rule.input_is_parallel}
    made = kind(*_features(module), group, partition=partition, path=path, device="meta", **option)
    made.weight, made.bias = cast(nn.Parameter, module.weight), cast(nn.Parameter | None, module.bias)
    if is_transposed_linear(module):
        made.transposed = True
        made.layouts = _layouts(path, module, partition, rule, {AXIS: group.size})
    return made.train(module.training)


def _layouts(path: str, module: nn.Module, partition: Partition, rule: Rule, axes: Axes) -> dict[str, Layout]:
    """Return the layouts of a module's parameters, by name."""
    if rule.kind == "partitioned":
        return partitioned_layouts(module, partition, axes, path)
    if isinstance(module, nn.Embedding):
        return column_layouts(module.num_embeddings, module.embedding_dim, partition, axes, path)
    if isinstance(module, nn.RMSNorm):
        return norm_layouts(module.weight.numel(), partition, axes, path)
    inputs, outputs = _features(module)
    layouts = row_layouts if rule.kind == "row" else column_layouts
    return layouts(outputs, inputs, partition, axes, path, transposed=is_transposed_linear(module))


def _features(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of the whole linear, also if its parameters are shards."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return cast(int, module.nx), cast(int, module.nf)


def partition_of(path: str, rule: Rule, parent: nn.Module | None) -> Partition:
    """Return how `rule` divides a linear's features; `parent` has the attributes that the rule names.

    Raises PlanError where `parent` has no such attribute.
    """
    if rule.kind == "vocabulary":
        return UNEVEN
    if rule.parts is None:
        if isinstance(rule.blocks, int):
            return replace(EVEN, blocks=rule.blocks)
        return replace(EVEN, blocks=tuple(number_of(path, name, parent) for name in rule.blocks))
    assert isinstance(rule.blocks, int)
    return Partition(number_of(path, rule.parts, parent), rule.repeated, blocks=rule.blocks)


def number_of(path: str, attribute: str, parent: nn.Module | None) -> int:
    """Return the integer attribute of `parent`, the module around `path`. PlanError if it has none."""
    try:
        return int(attrgetter(attribute)(parent))
    except (AttributeError, TypeError, ValueError):
        raise PlanError(
            f"the rule of {path} partitions by {attribute!r}, but the module around it has no number of "
            "that name: name an attribute that is the number of parts."
        ) from None


def modules_of(layers: Layers) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield path, module and parent of all modules, once per name of each module."""
    for path, layer in layers:
        for name, full in _names(path, layer):
            parent = layer.get_submodule(name.rpartition(".")[0]) if name else None
            yield full, layer.get_submodule(name), parent


def _names(path: str, layer: nn.Module) -> Iterable[tuple[str, str]]:
    """Yield the name in the layer and the path in the model of all modules of a layer."""
    for name, _ in layer.named_modules(remove_duplicate=False):
        yield name, join(path, name)
