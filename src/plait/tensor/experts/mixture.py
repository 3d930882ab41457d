"""`MixtureOfExperts`: an MLP of many experts, of which a router chooses some for each token.

             ┌─ router ─→ weights, indices
tokens ──────┼─ experts of each token ─────────→ weighted sum ─┐
             └─ shared experts, while tokens travel ───────────┴─→ sum
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.plan.argument_checks import require_flag, require_whole
from plait.tensor.experts.experts import Experts, start_experts
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing


class MixtureOfExperts(nn.Module):
    """A mixture of experts (Shazeer et al. 2017), with gated MLPs; no token is left out.

    Maps `[rows, length, hidden]` to the same shape: of each token, the weighted sum of the outputs of its
    `top_k` experts, `down (silu(gate x) · up x)`, plus that of the shared experts, through which every token
    passes. Parameters, with E experts, H `hidden`, F `inner`, S `shared`: `router.weight [E, H]`;
    `experts.gate_up_proj [E, 2F, H]`, rows of the gate, then those of `up`; `experts.down_proj [E, H, F]`;
    `shared.gate_up.weight [2S, H]`; `shared.down.weight [H, S]`; `shared_gate.weight [1, H]`.

    Rules of tensor parallelism: `column.joined(2)` for `shared.gate_up`, `row` for `shared.down`. The router
    and the gate of the shared experts are whole on every rank; `Plan(ep=…, etp=…)` divides the experts.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        shared: int = 0,
        *,
        shared_gate: bool = False,
        router_bias: bool = False,
        routing: Routing | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`inner`: the width inside each expert; `shared`: inside all shared experts together, 0 for none.

        `shared_gate`: whether the output of the shared experts is multiplied by the sigmoid of a linear of
        the token, as in Qwen2-MoE. `routing`: how experts are chosen and weighted, by default `Routing()`.
        Raises ModelError for sizes that do not fit each other.
        """
        super().__init__()
        require_whole("hidden", hidden, ModelError)
        require_whole("inner", inner, ModelError)
        require_whole("shared", shared, ModelError, least=0)
        require_flag("shared_gate", shared_gate, ModelError)
        if shared_gate and not shared:
            raise ModelError("shared_gate is True, but shared = 0: give the width of the shared experts.")
        self.router = Router(
            hidden, experts, top_k, routing=routing, bias=router_bias, device=device, dtype=dtype
        )
        self.experts = Experts(hidden, inner, experts, device=device, dtype=dtype)
        self.shared = SharedExperts(hidden, shared, device=device, dtype=dtype) if shared else None
        self.shared_gate = (
            nn.Linear(hidden, 1, bias=False, device=device, dtype=dtype) if shared_gate else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs of each token's experts and of the shared experts.

        The shared experts run while tokens travel.
        """
        tokens = x.reshape(-1, x.shape[-1])
        _, weights, indices = self.router(tokens)
        routed = start_experts(self.experts, self.router, tokens, indices, weights)
        if self.shared is None:
            return routed().view(x.shape)
        shared = self._shared_output(self.shared, x)
        return routed().view(x.shape) + shared

    def _shared_output(self, shared: SharedExperts, x: Tensor) -> Tensor:
        """Return the output of the shared experts, like `x`."""
        output: Tensor = shared(x)
        return output if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * output


class SharedExperts(nn.Module):
    """A gated MLP: `[..., hidden]` → `down (silu(gate x) · up x)`, where one linear has gate and up."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shared experts' output, without a residual connection."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        output: Tensor = self.down(functional.silu(gate) * up)
        return output
