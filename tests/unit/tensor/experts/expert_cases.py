"""Experts by a plain loop, and inputs for them: what each other way to compute them is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensor.experts.experts import ExpertAdapter, Experts
from plait.tensor.experts.gated_activation import GatedActivation

GPT_OSS = GatedActivation(slope=1.702, offset=1.0, limit=0.7, interleaved=True)


@dataclass(frozen=True)
class Case:
    """Tokens, and experts with random parameters."""

    tokens: int = 13
    experts: int = 5
    top_k: int = 2
    hidden: int = 12
    inner: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    routing: str = "random"
    """Or "one": all tokens to the last expert and the one before; "few": the first expert gets none."""
    dtype: torch.dtype = torch.float64
    rank: int = 0
    """Of adapters of both matrices; 0: none."""

    def layer(self) -> Experts:
        made = Experts(self.hidden, self.inner, self.experts, dtype=self.dtype, **self.options)
        if self.rank:
            options: dict[str, Any] = {"transposed": made.transposed, "rank": self.rank, "alpha": 5.0}
            made.gate_up_proj_adapter = ExpertAdapter(made.gate_up_proj, **options)
            made.down_proj_adapter = ExpertAdapter(made.down_proj, **options)
        with torch.no_grad():
            for number, parameter in enumerate(made.parameters()):
                parameter.copy_(self.draw(*parameter.shape, seed=number + 5) * 0.5)
        return made

    def draw(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(
            self.dtype
        )

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.draw(self.tokens, self.hidden, seed=seed)
        scores = torch.rand(self.tokens, self.experts, generator=torch.Generator().manual_seed(seed + 1))
        if self.routing == "one":
            scores = torch.arange(self.experts).expand(self.tokens, -1).float()
        if self.routing == "few":
            scores[:, 0] = -1
        indices = scores.topk(self.top_k).indices
        weights = self.draw(self.tokens, self.top_k, seed=seed + 2).sigmoid()
        return hidden, indices, weights

    def gradient(self, seed: int = 0) -> Tensor:
        return self.draw(self.tokens, self.hidden, seed=seed + 3)


CASES = {
    "plain": Case(),
    "one expert of three": Case(experts=3, top_k=1),
    "eight of eight": Case(experts=8, top_k=8),
    "odd sizes": Case(hidden=7, inner=5, experts=6),
    "all tokens to two": Case(routing="one"),
    "an expert without tokens": Case(routing="few"),
    "no tokens": Case(tokens=0),
    "biases": Case(options={"bias": True}),
    "gpt-oss": Case(options={"bias": True, "activation": GPT_OSS, "transposed": True}),
    "weights first": Case(options={"weights_first": True, "bias": True}),
}
ADAPTED = {
    "adapters": Case(rank=3),
    "adapters of gpt-oss": replace(CASES["gpt-oss"], rank=2),
    "adapters, weights first": replace(CASES["weights first"], rank=4),
    "adapters, an expert without tokens": Case(routing="few", rank=1),
    "adapters, no tokens": Case(tokens=0, rank=1),
}
"""With adapters, whose inner features `etp` does not divide."""


def plain(layer: Experts, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The definition: a loop over experts, in operations of autograd."""
    result = torch.zeros_like(hidden)
    for expert in range(layer.num_experts):
        token, place = (indices == expert).nonzero(as_tuple=True)
        weight, given = weights[token, place, None], hidden[token]
        matrices = by_rows(layer, layer.gate_up_proj, layer.gate_up_proj_adapter)
        gate_up = (given * weight if layer.weights_first else given) @ matrices[expert]
        if layer.gate_up_proj_bias is not None:
            gate_up = gate_up + layer.gate_up_proj_bias[expert]
        output = (
            activation(layer.activation, gate_up)
            @ by_rows(layer, layer.down_proj, layer.down_proj_adapter)[expert]
        )
        if layer.down_proj_bias is not None:
            output = output + layer.down_proj_bias[expert]
        result = result.index_add(0, token, output if layer.weights_first else output * weight)
    return result


def by_rows(layer: Experts, weight: Tensor, adapter: ExpertAdapter | None) -> Tensor:
    weight = weight if layer.transposed else weight.transpose(1, 2)
    if adapter is None:
        return weight
    return weight + torch.einsum("eri,eor->eio", adapter.down, adapter.up) * (adapter.alpha / adapter.rank)


def activation(of: GatedActivation, gate_up: Tensor) -> Tensor:
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if of.interleaved else gate_up.chunk(2, 1)
    if of.limit is not None:
        gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit)
    return gate * torch.sigmoid(gate * of.slope) * (up + of.offset)


@dataclass(frozen=True)
class Answer:
    output: Tensor
    of_hidden: Tensor
    of_weights: Tensor
    of_parameters: dict[str, Tensor]


def answer(run: Any, layer: nn.Module, given: tuple[Tensor, Tensor, Tensor], gradient: Tensor) -> Answer:
    """What `run(hidden, indices, weights)` gives, and its gradients."""
    hidden, indices, weights = given
    hidden, weights = (one.detach().clone().requires_grad_() for one in (hidden, weights))
    output = run(hidden, indices, weights)
    output.backward(gradient)
    assert hidden.grad is not None
    assert weights.grad is not None
    of_parameters = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    return Answer(output.detach(), hidden.grad, weights.grad, of_parameters)


def assert_close(got: Answer, wanted: Answer, tolerance: float = 1e-12) -> None:
    assert got.of_parameters.keys() == wanted.of_parameters.keys()
    for name in ("output", "of_hidden", "of_weights"):
        assert_near(getattr(got, name), getattr(wanted, name), name, tolerance)
    for name, one in wanted.of_parameters.items():
        assert_near(got.of_parameters[name], one, name, tolerance)


def assert_near(got: Tensor, wanted: Tensor, name: str, tolerance: float = 1e-12) -> None:
    assert got.shape == wanted.shape, name
    if wanted.numel():
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max(), name
