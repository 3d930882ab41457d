"""Finds the hidden matrices of a model's parameters, which Muon updates; AdamW updates the others.

By the kind of parameter, as Jordan et al. and Kimi choose: weights of linears, also of experts, but neither
embeddings nor the output layer, whose rows are used one at a time, nor vectors. A linear that joins several
(query, key and value; gate and up) is divided into their matrices by its layer's declaration: a rule of
tensor parallelism, `column.joined(3)`, or experts' own. Under every plan the matrices are the same.

Jordan et al. 2024, "Muon" (https://kellerjordan.github.io/posts/muon); Kimi Team 2025, "Kimi K2"
(arXiv:2507.20534), section 2.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from plait.errors import PlanError
from plait.models.layers.layer_sequence import LayerSequence
from plait.models.lora import LoraLinear
from plait.optimizers.matrix_parts import MatrixPart, divided_matrix
from plait.plan.rules import Rule, Rules, match
from plait.tensor.autograd.deferred_weight_gradients import is_transposed_linear
from plait.tensor.experts.experts import ExpertAdapter, Experts
from plait.tensor.experts.mixture import SharedExperts
from plait.tensor.experts.router import Router
from plait.tensor.parallel.apply_rules import modules_of, number_of, partition_of
from plait.tensor.parallel.tensor_parallelism import named

WEIGHTS_OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Those of `nn.MultiheadAttention` beside its output linear; the first joins query, key and value."""


@dataclass(frozen=True)
class ParameterMatrices:
    """The matrices into which a parameter is divided for Muon, or why AdamW updates it."""

    shape: tuple[int, ...]
    parts: tuple[MatrixPart, ...] = ()
    """What single ranks orthogonalize; none: AdamW updates the parameter."""
    reason: str = ""
    """Why AdamW updates it, such as "an embedding"."""


@dataclass(frozen=True)
class Holder:
    """A module that holds a parameter, with its path, its parent and the parameter's attribute name."""

    path: str
    module: nn.Module
    parent: nn.Module | None
    attribute: str


def parameter_matrices(
    sequence: LayerSequence, rules: Rules, *, per_head: bool = False, routers: bool = False
) -> dict[str, ParameterMatrices]:
    """Return by name the matrices of each trainable parameter, or why it has none.

    `rules`: those of tensor parallelism, by patterns. `per_head`: whether each head of a query, key or value
    is a matrix of its own. `routers`: whether the weights of routers are matrices. Raises PlanError for rules
    that do not fit the model.
    """
    modules = list(modules_of(named(sequence.layers)))
    matched = match(rules, (path for path, _, _ in modules))
    outputs = _output_linears(sequence, matched)
    holders: dict[int, list[Holder]] = {}
    for path, module, parent in modules:
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(Holder(path, module, parent, attribute))
    found = {}
    for name, parameter in sequence.parameters.items():
        if parameter.requires_grad:
            held = holders[id(parameter)]
            reasons = (_reason(one, parameter, outputs, routers=routers) for one in held)
            reason = next(filter(None, reasons), "")
            parts = () if reason else tuple(_parts(held[0], parameter, matched, per_head=per_head))
            found[name] = ParameterMatrices(tuple(parameter.shape), parts, reason)
    return found


def _output_linears(sequence: LayerSequence, matched: dict[str, Rule]) -> set[str]:
    """Return the paths of output layers: linears with the rule `vocabulary`, else the model's last linear."""
    linears = [path for path, module, _ in modules_of(named(sequence.layers)) if _is_linear(module)]
    by_rule = {path for path in linears if path in matched and matched[path].kind == "vocabulary"}
    return by_rule or set(linears[-1:])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def _reason(holder: Holder, parameter: Tensor, outputs: set[str], *, routers: bool) -> str:
    """Return why AdamW updates a parameter that `holder` has, or "" where Muon does."""
    module, name = holder.module, holder.attribute
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if parameter.dim() < 2:
        return "a vector"
    if isinstance(module, ExpertAdapter) or isinstance(holder.parent, LoraLinear):
        return "a factor of LoRA"
    if isinstance(module, Router):
        return "" if routers else "a router"
    if isinstance(module, Experts):
        return "" if parameter.dim() == 3 else "a vector of each expert"
    if isinstance(module, nn.MultiheadAttention) and name in WEIGHTS_OF_ATTENTION:
        return ""
    if not _is_linear(module) or name != "weight":
        return "no weight of a linear"
    if holder.path in outputs:
        return "the output layer"
    return "a single row or column" if 1 in parameter.shape else ""


def _parts(
    holder: Holder, parameter: Tensor, matched: dict[str, Rule], *, per_head: bool
) -> Iterator[MatrixPart]:
    """Yield the matrices of a parameter that Muon updates."""
    module, shape = holder.module, tuple(parameter.shape)
    if isinstance(module, Experts):
        yield from _parts_of_experts(module, holder.attribute, shape)
        return
    sizes, transposed = (shape[0], shape[1]), is_transposed_linear(module)
    outputs = sizes[1] if transposed else sizes[0]
    blocks, heads, sections = _declared_blocks(holder, matched.get(holder.path), outputs)
    if per_head:
        blocks = [block // count for block, count in zip(blocks, heads, strict=True) for _ in range(count)]
    yield from divided_matrix((), sizes, blocks, sections, transposed=transposed)


def _parts_of_experts(module: Experts, attribute: str, shape: tuple[int, ...]) -> Iterator[MatrixPart]:
    """Yield the gate, up or down of each expert; gate and up in one part where their features alternate."""
    experts, sizes = shape[0], (shape[1], shape[2])
    outputs = sizes[1] if module.transposed else sizes[0]
    blocks, sections = [outputs], tuple[int, ...]()
    if attribute == "gate_up_proj" and module.activation.interleaved:
        sections = (1, 1)
    elif attribute == "gate_up_proj":
        blocks = [outputs // 2] * 2
    for expert in range(experts):
        yield from divided_matrix((expert,), sizes, blocks, sections, transposed=module.transposed)


def _declared_blocks(
    holder: Holder, rule: Rule | None, outputs: int
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Return a linear's blocks of out features, the heads of each, and its alternating rows (`sections`)."""
    if isinstance(holder.module, nn.MultiheadAttention):
        count = 3 if holder.attribute == "in_proj_weight" else 1
        return [outputs // count] * count, [holder.module.num_heads] * count, ()
    if isinstance(holder.parent, SharedExperts) and holder.module is holder.parent.gate_up:
        return [outputs // 2] * 2, [1, 1], ()
    if rule is None or rule.kind != "column":
        return [outputs], [1], ()
    partition = partition_of(holder.path, rule, holder.parent)
    if isinstance(partition.blocks, tuple):
        size = outputs // sum(partition.blocks)
        return [size * heads for heads in partition.blocks], list(partition.blocks), ()
    count, heads = partition.blocks, partition.parts or 1
    sections = _sections(holder, rule, outputs // (count * heads))
    return [outputs // count] * count, [heads] * count, sections


def _sections(holder: Holder, rule: Rule, rows: int) -> tuple[int, ...]:
    """Return how many of a head's `rows` each matrix has, for a rule that is interleaved, else nothing."""
    if isinstance(rule.interleaved, int):
        sections = (rows // rule.interleaved,) * rule.interleaved
    else:
        sections = tuple(number_of(holder.path, name, holder.parent) for name in rule.interleaved)
    if sum(sections) != rows:
        raise PlanError(
            f"the rule of {holder.path} has interleaved = {rule.interleaved!r}, which does not divide the "
            f"{rows} rows of each of its parts: give numbers of rows that add up to {rows}."
        )
    return sections if len(sections) > 1 else ()


def listed_matrices(found: Mapping[str, ParameterMatrices]) -> list[str]:
    """Return lines of text on each parameter: Muon with its matrices, or AdamW and the reason.

    One for parameters whose names differ in numbers only and that are alike.
    """
    alike: dict[tuple[str, str], int] = {}
    for name, one in found.items():
        line = re.sub(r"(?<![^.])\d+(?![^.])", "*", name), _described(one)
        alike[line] = alike.get(line, 0) + 1
    rows = [(name, f"{count} ×" if count > 1 else "", text) for (name, text), count in alike.items()]
    widths = [max(map(len, column), default=0) for column in zip(*(row[:2] for row in rows), strict=True)]
    return [f"{name:<{widths[0]}}  {count:>{widths[1]}}  {text}" for name, count, text in rows]


def _described(one: ParameterMatrices) -> str:
    if not one.parts:
        return f"AdamW  {one.reason} {' × '.join(map(str, one.shape))}"
    counts: dict[tuple[int, int], int] = {}
    for part in one.parts:
        for shape in part.shapes:
            counts[shape] = counts.get(shape, 0) + 1
    sizes = (f"{count} of {rows} × {columns}" for (rows, columns), count in counts.items())
    return f"Muon   {', '.join(sizes)}"
