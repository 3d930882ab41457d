"""Sparse MLPs of transformers (a router, `experts`, perhaps a shared expert) as a layer of plait.

The parameters are those of the model, under their names there. The code of the block, of its router and of
its experts is replaced by plait's, and what a user changed there is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.huggingface.common import ENTRANCE, Branch, add_branch, residual
from plait.models.model_helpers import InitializedLayer
from plait.tensor.call_hooks import is_altered
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router

_LIBRARY = "transformers."
_ROUTERS = ("gate", "router")
"""Names of a router in transformers."""
_SHARED = ("shared_expert", "shared_experts")
"""Names of the expert that every token runs through."""


def is_mixture(mlp: nn.Module) -> bool:
    """Return whether the MLP of a block in transformers has several experts."""
    return hasattr(mlp, "experts")


def has_shared_expert(mlp: nn.Module) -> bool:
    """Return whether the MLP of a block in transformers has an expert that every token runs through."""
    return shared_name(mlp) is not None


def shared_name(mlp: nn.Module) -> str | None:
    """Return the name of the expert that every token runs through, or None if there is none."""
    return next((name for name in _SHARED if hasattr(mlp, name)), None)


def _router_name(mlp: nn.Module) -> str:
    return next(name for name in _ROUTERS if hasattr(mlp, name))


def replaced_modules(mlp: Any) -> Iterator[nn.Module]:
    """Yield the modules of a sparse MLP whose code plait replaces."""
    yield from (mlp, getattr(mlp, _router_name(mlp)), mlp.experts)


class SparseMLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: the residual branch of a mixture of experts."""

    def __init__(self, block: Any, branch: Branch, std: float, *, norm_start: float = 1.0) -> None:
        super().__init__(std, norm_start=norm_start)
        self.branch = add_branch(self, block, branch)
        self.mlp = Mixture(block.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the sum of its experts' outputs. With `tp` above 1, all ranks route alike."""
        return residual(self, x, self.branch, self.mlp)

    def cost(self) -> float:
        """Return the number of multiplications per token, by which layers are divided into stages."""
        experts = self.mlp.experts
        stored = sum(one.numel() for one in experts.parameters() if one.dim() > 2)
        others = sum(one.numel() for one in self.parameters() if one.dim() == 2)
        return float(1 + others + stored // experts.num_experts * self.mlp.router_of_tokens.top_k)


class Mixture(nn.Module):
    """`[batch, length, hidden]` → the same shape: experts chosen by a gate, and perhaps a shared one.

    With a shared expert `s` the output is `experts(x) + sigmoid(shared_expert_gate(x)) · s(x)`.
    """

    def __init__(self, mlp: Any) -> None:
        """Take over the parameters of `mlp`, a sparse MLP of transformers, and its shared expert as it is."""
        super().__init__()
        self.gate, self.experts = _router(mlp.gate), _experts(mlp.experts)
        self.shared_expert: nn.Module | None = None
        self.shared_expert_gate: Any = None
        if has_shared_expert(mlp):
            self.add_module(ENTRANCE, nn.Identity())  # the region of tp has the shared expert only
            self.shared_expert, self.shared_expert_gate = mlp.shared_expert, mlp.shared_expert_gate
        self.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, and of the shared one."""
        tokens = x.flatten(0, 1)
        _, weights, indices = self.gate(tokens)
        routed: Tensor = self.experts(tokens, indices, weights).view_as(x)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(self.get_submodule(ENTRANCE)(x))
        return routed + torch.sigmoid(self.shared_expert_gate(x)) * shared


def _router(gate: Any) -> Router:
    """Return the router with the weight of `gate`; one without `norm_topk_prob` always normalizes."""
    experts, hidden = gate.weight.shape
    normalize = bool(getattr(gate, "norm_topk_prob", True))
    router = Router(hidden, experts, gate.top_k, normalize=normalize, device="meta")
    router.weight = gate.weight
    return router


def _experts(experts: Any) -> Experts:
    """Return plait's experts with the parameters of those of transformers."""
    count, hidden, inner = experts.down_proj.shape
    made = Experts(hidden, inner, count, device="meta")
    made.gate_up_proj, made.down_proj = experts.gate_up_proj, experts.down_proj
    return made


def require_known_mixtures(model: Any, mlps: list[Any]) -> None:
    """Raise ModelError where sparse MLPs compute something that plait's experts do not, or a loss is added.

    The activation has to be SiLU, `experts_implementation` one of transformers' own, and the configuration
    may not ask for the balancing loss, which plait does not add.
    """
    from transformers.activations import SiLUActivation

    config = model.config
    for mlp in mlps:
        act = mlp.experts.act_fn
        if type(act) not in (nn.SiLU, SiLUActivation) or is_altered(act):
            raise ModelError(
                f"the experts' activation is a {type(act).__name__} (hidden_act = {config.hidden_act!r}), "
                "and plait's experts compute silu: set hidden_act to 'silu', and put no hooks on it."
            )
    coefficient = getattr(config, "router_aux_loss_coef", 0)
    if getattr(config, "output_router_logits", False) and coefficient:
        raise ModelError(
            f"the configuration has output_router_logits on and router_aux_loss_coef = {coefficient!r}, by "
            "which transformers adds a balancing loss that plait does not add to the loss of such a model: "
            "set output_router_logits to false, or the coefficient to 0."
        )
    _require_known_implementation(config)


def _require_known_implementation(config: Any) -> None:
    """Raise ModelError for a function of experts that a user registered. Reads a private attribute."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = getattr(config, "_experts_implementation", None)
    function = ALL_EXPERTS_FUNCTIONS.get(name, None)
    home = getattr(function, "__module__", None) or _LIBRARY
    if not home.startswith(_LIBRARY):
        raise ModelError(
            f"the model's experts_implementation is {name!r}, a function of {home}, and plait computes "
            "experts itself: build the model with 'eager' or 'grouped_mm'."
        )
