"""Routers and experts by definition: the experts of a token by repeated maximum, one expert after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing
from plait.verification.definitions.functions import Definitions, Forward


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest in the last dim, largest first; of equal ones the lowest."""
    numbers, left, found = torch.arange(values.shape[-1], device=values.device), values.clone(), []
    for _ in range(count):
        is_largest = left == left.amax(-1, keepdim=True)
        index = numbers.where(is_largest, values.shape[-1]).amin(-1, keepdim=True)
        found.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(found, -1)


def chosen_experts(routing: Routing, scores: Tensor, top_k: int) -> Tensor:
    """Return the experts `[T, k]` for scores `[T, E]`, with their correction: those of the best groups."""
    if routing.chosen_groups < routing.groups:
        size = scores.shape[-1] // routing.groups
        groups = torch.split(scores, size, -1)
        of_groups = [one.gather(-1, largest(one, 2)).sum(-1) for one in groups]
        best = largest(torch.stack(of_groups, -1), routing.chosen_groups)
        outside = [(best != number).all(-1, keepdim=True) for number in range(routing.groups)]
        parts = (one.masked_fill(out, -torch.inf) for one, out in zip(groups, outside, strict=True))
        scores = torch.cat([*parts], -1)
    return largest(scores, top_k)


def _router(book: Definitions, layer: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    routing, wide = layer.routing, torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ layer.weight.to(wide).t()
    if layer.bias is not None:
        logits = logits + layer.bias.to(wide)
    powers = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    scores = 1 / (1 + (-logits).exp()) if routing.scores == "sigmoid" else powers
    if routing.scores == "softmax":
        scores = scores / scores.sum(-1, keepdim=True)
    ordered = logits if routing.scores == "softmax_of_chosen" else scores
    if layer.e_score_correction_bias is not None:
        ordered = ordered + layer.e_score_correction_bias
    with torch.no_grad():
        indices = chosen_experts(routing, ordered, layer.top_k)
    weights = scores.gather(-1, indices)
    if routing.normalized:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
    if book.ids is not None:
        indices = indices.masked_fill(book.ids.reshape(-1, 1) < 0, -1)
    return logits, (routing.scale * weights).to(hidden.dtype), indices


def _experts(book: Definitions, layer: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    result = torch.zeros_like(hidden)
    for expert in range(layer.num_experts):
        tokens = (indices == expert).any(-1).nonzero()[:, 0]
        weight = weights[tokens].masked_fill(indices[tokens] != expert, 0).sum(-1, keepdim=True)
        given = hidden[tokens] * weight if layer.weights_first else hidden[tokens]
        inner = _activated(layer, _multiplied(layer, "gate_up_proj", expert, given))
        output = _multiplied(layer, "down_proj", expert, inner)
        result = result.index_add(0, tokens, output if layer.weights_first else output * weight)
    return result


def _multiplied(layer: Any, name: str, expert: int, given: Tensor) -> Tensor:
    """Return the product of `[tokens, in]` with a matrix of one expert and its adapter, plus its bias."""
    matrix, bias = getattr(layer, name)[expert], getattr(layer, f"{name}_bias")
    adapter = getattr(layer, f"{name}_adapter")
    if layer.transposed:
        matrix = matrix.t()
    if adapter is not None:
        matrix = matrix + adapter.alpha / adapter.rank * (adapter.up[expert] @ adapter.down[expert])
    product: Tensor = given @ matrix.t()
    return product if bias is None else product + bias[expert]


def _activated(layer: Any, gate_up: Tensor) -> Tensor:
    """Return `gate · sigmoid(slope · gate) · (up + offset)`, clamped where there is a limit."""
    kind, half = layer.activation, gate_up.shape[-1] // 2
    gate, up = (
        (gate_up[:, 0::2], gate_up[:, 1::2]) if kind.interleaved else (gate_up[:, :half], gate_up[:, half:])
    )
    if kind.limit is not None:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    result: Tensor = gate / (1 + (-kind.slope * gate).exp()) * (up + kind.offset)
    return result


FORWARDS: dict[type[nn.Module], Forward] = {Router: _router, Experts: _experts}
"""By the type of a module, its forward by definition."""
