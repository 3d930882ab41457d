"""Routers and experts by definition: experts one after the other, without an exchange or grouped products.

Letters: T tokens, H hidden features, E experts, F inner features of one expert, k experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from plait.tensor.experts.experts import Experts
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.mixture import MixtureOfExperts, SharedExperts
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing
from plait.verification.definitions.attention_and_dropout import Definitions, Forward


def scores_of(routing: Routing, logits: Tensor) -> Tensor:
    """Return each token's scores of experts, `[T, E]`: softmax or sigmoid of the logits, or the logits."""
    if routing.scores == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if routing.scores == "sigmoid" else logits


def experts_of_largest(
    routing: Routing, scores: Tensor, correction: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return each token's `count` experts of largest scores, `[T, count]`, and the choice's margins, `[T]`.

    int64, by scores plus corrections, in order; of equal ones the lowest number. With groups, among the
    experts of the groups whose two largest add up to most. Margin: how far the least score that is chosen
    exceeds the next; infinite if all are chosen.
    """
    if correction is not None:
        scores = scores + correction
    margins = scores.new_full(scores.shape[:1], torch.inf)
    if routing.chosen_groups < routing.groups:
        grouped = scores.unflatten(-1, (routing.groups, -1))  # type: ignore[no-untyped-call]
        of_groups = grouped.sort(-1).values[..., -2:].sum(-1)
        groups, margins = _largest(of_groups, routing.chosen_groups)
        outside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, groups, value=False)
        scores = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    chosen, own = _largest(scores, count)
    return chosen, torch.minimum(margins, own)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the largest scores, and by how much the least of these exceeds the next."""
    left, chosen, least = scores.clone(), [], scores.new_full(scores.shape[:1], torch.inf)
    for _ in range(count):
        number = left.argmax(-1, keepdim=True)  # the first of equal ones
        least = left.gather(-1, number).squeeze(-1)
        left.scatter_(-1, number, -torch.inf)
        chosen.append(number)
    is_last = count == scores.shape[-1]
    return torch.cat(chosen, -1), torch.full_like(least, torch.inf) if is_last else least - left.amax(-1)


def _router(book: Definitions, layer: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits `[T, E]`, weights `[T, k]` and experts `[T, k]`, of tokens `[T, H]`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ layer.weight.to(wide).T
    if layer.bias is not None:
        logits = logits + layer.bias.to(wide)
    routing, scores = layer.routing, scores_of(layer.routing, logits)
    with torch.no_grad():
        chosen, margins = experts_of_largest(routing, scores, layer.e_score_correction_bias, layer.top_k)
    if book.ids is not None and book.ids.numel() == len(chosen):
        chosen = chosen.masked_fill(book.ids.reshape(-1, 1).to(chosen.device) < 0, -1)  # padding
    indices = book.routing.note(layer.weight, logits, chosen, margins)
    weights = torch.stack([scores[torch.arange(len(scores)), one] for one in indices.unbind(-1)], -1)
    if routing.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif routing.normalized:
        weights = weights_over_their_sum(weights)
    return logits, (routing.scale * weights).to(hidden.dtype), indices


def weights_over_their_sum(weights: Tensor) -> Tensor:
    """Return each token's weights, `[T, k]`, divided by their sum; torch function modes can replace this."""
    if has_torch_function_variadic(weights):
        replaced: Tensor = handle_torch_function(weights_over_their_sum, (weights,), weights)
        return replaced
    return weights / (weights.sum(-1, keepdim=True) + 1e-20)


def _experts(book: Definitions, layer: Experts, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts: `[T, H]`."""
    output = torch.zeros_like(hidden)
    for expert in range(layer.num_experts):
        tokens, slots = (indices == expert).nonzero(as_tuple=True)
        of_token = weights[tokens, slots].unsqueeze(-1).to(hidden.dtype)
        given = hidden[tokens] * of_token if layer.weights_first else hidden[tokens]
        result = _expert(layer, expert, given)
        output = output.index_add(0, tokens, result if layer.weights_first else result * of_token)
    return output


def _expert(layer: Experts, expert: int, x: Tensor) -> Tensor:
    """Return the output of one expert for tokens `[rows, H]`."""
    into, out = (_matrix(layer, name, expert) for name in ("gate_up_proj", "down_proj"))
    both = x @ into
    if layer.gate_up_proj_bias is not None:
        both = both + layer.gate_up_proj_bias[expert]
    result: Tensor = activated(layer.activation, both) @ out
    return result if layer.down_proj_bias is None else result + layer.down_proj_bias[expert]


def _matrix(layer: Experts, name: str, expert: int) -> Tensor:
    """Return the matrix of one expert with its adapter, `[in, out]`."""
    matrix, change = matrix_of(layer, name, expert), change_of(layer, name, expert)
    return matrix if change is None else matrix + change


def matrix_of(layer: Experts, name: str, expert: int) -> Tensor:
    """Return the matrix of one expert, `[in, out]`, without its adapter."""
    matrix: Tensor = getattr(layer, name)[expert]
    return matrix if layer.transposed else matrix.T


def change_of(layer: Experts, name: str, expert: int) -> Tensor | None:
    """Return the adapter's summand of the matrix of one expert, `[in, out]`; None without an adapter."""
    adapter = getattr(layer, f"{name}_adapter")
    if adapter is None:
        return None
    change: Tensor = adapter.alpha / adapter.rank * (adapter.up[expert] @ adapter.down[expert]).T
    return change


def activated(activation: GatedActivation, both: Tensor) -> Tensor:
    """Return `gate · sigmoid(slope · gate) · (up + offset)`, of features of gate and up `[rows, 2F]`.

    A separate function so that modes of torch can replace it.
    """
    if has_torch_function_variadic(both):
        replaced: Tensor = handle_torch_function(activated, (both,), activation, both)
        return replaced
    gate, up = gate_and_up(activation, both)
    result: Tensor = gate * torch.sigmoid(activation.slope * gate) * (up + activation.offset)
    return result


def gate_and_up(activation: GatedActivation, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of gate and of up, clamped to the activation's limit, `[rows, F]` each."""
    half = both.shape[-1] // 2
    pairs = both.unflatten(-1, (half, 2)).mT if activation.interleaved else both.unflatten(-1, (2, half))  # type: ignore[no-untyped-call]
    gate, up = pairs.unbind(-2)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate, up


def _mixture(book: Definitions, layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Return the output of each token's experts plus that of the shared experts, like `x`, `[..., H]`."""
    tokens = x.flatten(0, -2)
    _, weights, indices = layer.router(tokens)
    output: Tensor = layer.experts(tokens, indices, weights).view_as(x)
    if layer.shared is None:
        return output
    shared: Tensor = layer.shared(x)
    return output + (shared if layer.shared_gate is None else layer.shared_gate(x).sigmoid() * shared)


def _shared_experts(book: Definitions, layer: SharedExperts, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, -1)
    output: Tensor = layer.down(functional.silu(gate) * up)
    return output


FORWARDS: dict[type[nn.Module], Forward] = {
    Router: _router,
    Experts: _experts,
    MixtureOfExperts: _mixture,
    SharedExperts: _shared_experts,
}
"""By the type of a module, its forward by definition."""
