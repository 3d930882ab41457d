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
from plait.tensor.experts.experts import Experts, start_experts
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing, Scores
from plait.tensor.find_module_hooks import is_altered

_LIBRARY = "transformers."
_ROUTERS = ("gate", "router")
"""Names of a router in transformers."""
_SHARED = ("shared_expert", "shared_experts")
"""Names of the expert that every token runs through."""
_SHARED_GATE = "shared_expert_gate"
_MATRICES = ("gate_up_proj", "down_proj")
"""The parameters of all experts together."""


def is_mixture(mlp: nn.Module) -> bool:
    """Return whether the MLP of a block in transformers has several experts."""
    return hasattr(mlp, "experts")


def shared_name(mlp: nn.Module) -> str | None:
    """Return the name of the expert that every token runs through, or None if there is none."""
    return next((name for name in _SHARED if hasattr(mlp, name)), None)


def _router_name(mlp: nn.Module) -> str:
    return next(name for name in _ROUTERS if hasattr(mlp, name))


def replaced_modules(mlp: Any) -> Iterator[nn.Module]:
    """Yield the modules of a sparse MLP whose code plait replaces. Raises ModelError for other modules."""
    parts, known = dict(mlp.named_children()), {*_ROUTERS, *_SHARED, "experts", _SHARED_GATE}
    joined = all(isinstance(getattr(mlp.experts, name, None), Tensor) for name in _MATRICES)
    if not joined or not parts.keys() & {*_ROUTERS} or parts.keys() - known:
        raise ModelError(
            f"a {type(mlp).__name__} has {', '.join(parts)}, and plait computes an MLP of "
            f"{' or '.join(_ROUTERS)}, experts with {' and '.join(_MATRICES)}, and perhaps "
            f"{' or '.join(_SHARED)}: write an nn.Sequential of the model's layers."
        )
    yield from (mlp, getattr(mlp, _router_name(mlp)), mlp.experts)


class SparseMLP(InitializedLayer):
    """`[batch, length, hidden]` → the same shape: x + mixture of experts(x), with its norms."""

    def __init__(
        self, block: Any, branch: Branch, scores: Scores, std: float, *, norm_start: float = 1.0
    ) -> None:
        """`scores`: of the router, see `Routing`."""
        # As in transformers: experts start without biases, a router that has one with a random one.
        biases = {"gate_up_proj_bias": 0.0, "down_proj_bias": 0.0, "bias": std}
        super().__init__(std, biases, norm_start=norm_start)
        self.branch = add_branch(self, block, branch)
        self.mlp = Mixture(block.mlp, scores)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the sum of its experts' outputs. With `tp` above 1, all ranks route alike."""
        return residual(self, x, self.branch, self.mlp)


class Mixture(nn.Module):
    """`[batch, length, hidden]` → the same shape: experts chosen by a router, and perhaps a shared one.

    With a shared expert `s` the output is `experts(x) + s(x)`, or, with a gate of it as in Qwen2-MoE,
    `experts(x) + sigmoid(shared_expert_gate(x)) · s(x)`.
    """

    def __init__(self, mlp: Any, scores: Scores) -> None:
        """Take over the parameters of `mlp`, a sparse MLP of transformers, and its shared expert as it is."""
        super().__init__()
        self.router_name, self.shared_name = _router_name(mlp), shared_name(mlp)
        router = _router(getattr(mlp, self.router_name), scores)
        self.add_module(self.router_name, router)
        self.top_k, self.experts = router.top_k, _experts(mlp.experts)
        self.shared_expert_gate: Any = getattr(mlp, _SHARED_GATE, None)
        if self.shared_name is not None:
            self.add_module(ENTRANCE, nn.Identity())  # the region of tp has the shared expert only
            self.add_module(self.shared_name, getattr(mlp, self.shared_name))
        self.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, and of the shared one.

        The shared one runs while tokens travel.
        """
        tokens = x.flatten(0, 1)
        router = self.get_submodule(self.router_name)
        _, weights, indices = router(tokens)
        routed = start_experts(self.experts, router, tokens, indices, weights)
        if self.shared_name is None:
            return routed().view_as(x)
        shared: Tensor = self.get_submodule(self.shared_name)(self.get_submodule(ENTRANCE)(x))
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return routed().view_as(x) + shared


def _router(router: Any, scores: Scores) -> Router:
    """Return plait's router with the parameters, and the correction, of one of transformers."""
    (experts, hidden), bias = router.weight.shape, getattr(router, "bias", None)
    routing = _routing(router, scores)
    made = Router(hidden, experts, router.top_k, routing=routing, bias=bias is not None, device="meta")
    made.weight, made.bias = router.weight, bias
    if routing.corrected:
        made.e_score_correction_bias = router.e_score_correction_bias
    return made


def _routing(router: Any, scores: Scores) -> Routing:
    """Return the `Routing` of a router of transformers; one without `norm_topk_prob` always normalizes."""
    normalized = bool(getattr(router, "norm_topk_prob", True))
    if scores != "sigmoid":
        return Routing(scores=scores, normalized=normalized)
    return Routing(
        scores=scores,
        normalized=normalized,
        scale=float(router.routed_scaling_factor),
        corrected=True,
        groups=router.num_group,
        chosen_groups=router.topk_group,
    )


def _experts(experts: Any) -> Experts:
    """Return plait's experts with the parameters of those of transformers."""
    count, *sizes = experts.down_proj.shape
    hidden, inner = sizes[::-1] if experts.is_transposed else sizes
    activation = GatedActivation()
    if _is_clamped(experts):
        interleaved = not experts.is_concatenated
        activation = GatedActivation(float(experts.alpha), 1.0, float(experts.limit), interleaved)
    options: dict[str, Any] = {"bias": experts.has_bias, "transposed": experts.is_transposed}
    made = Experts(hidden, inner, count, activation=activation, device="meta", **options)
    for name, parameter in experts.named_parameters():
        setattr(made, name, parameter)
    return made


def _is_clamped(experts: Any) -> bool:
    """Return whether experts compute the clamped SwiGLU of GPT-OSS."""
    return hasattr(experts, "alpha") and hasattr(experts, "limit")


def require_known_mixtures(model: Any, mlps: list[Any]) -> None:
    """Raise ModelError where sparse MLPs compute something that plait's experts do not.

    The activation has to be SiLU or that of GPT-OSS, `experts_implementation` one of transformers' own.
    """
    from transformers.activations import SiLUActivation

    config = model.config
    for mlp in (one for one in mlps if not _is_clamped(one.experts)):
        act = mlp.experts.act_fn
        if type(act) not in (nn.SiLU, SiLUActivation) or is_altered(act):
            raise ModelError(
                f"the experts' activation is a {type(act).__name__} (hidden_act = {config.hidden_act!r}), "
                "and plait's experts compute silu: set hidden_act to 'silu', and put no hooks on it."
            )
    _require_known_implementation(config)


def balance_weight(model: Any) -> float:
    """Return the factor of the balance loss that transformers adds to the loss; 0 where it adds none."""
    adds = getattr(model.config, "output_router_logits", False)
    return float(getattr(model, "router_aux_loss_coef", 0.0)) if adds else 0.0


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
