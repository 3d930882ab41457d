"""The auxiliary losses of routers, and the correction of their bias: what each is by definition.

Letters: T tokens, E experts, k experts of a token, D documents, L layers with experts; `s(t)` is the document
of token t. Of a set of N tokens, `c_e` are those that chose expert e, `f_e = c_e / N` is its load (so
`Σ_e f_e = k`) and `p[t, e]` are the router's probabilities, `Σ_e p[t, e] = 1`.

    balance loss      E Σ_e f_e · mean_t p[t, e]             Fedus et al. 2021, Switch, equation 4
    z-loss            mean_t (log Σ_e exp(logits[t, e]))²    Zoph et al. 2022, ST-MoE, equation 5
    corrected bias    b_e + rate · sign(Σ_i c_i / E - c_e)   Wang et al. 2024, arXiv:2408.15664, algorithm 1

The balance loss of a router that loads all experts alike is k. The set of tokens is a document or the whole
step. Of documents the losses are averaged by their tokens, so that each token counts once, as in the mean of
the main loss:

    Σ_s N_s / N · E Σ_e f[s, e] · mean_{t in s} p[t, e]   =   mean_t E Σ_e f[s(t), e] · p[t, e]

With documents of one length that is their plain mean, k times the sequence-wise loss of DeepSeek-V3
(arXiv:2412.19437, equations 17 to 20). The last form is what `token_balance` sums: given the load, each token
has its own gradient, and only counts, which are integers, are summed over ranks.

The losses of all layers are added, each with the weight. `coupled` losses have one set of counts and
probabilities for all layers, as `load_balancing_loss_func` of transformers, and their sum is that function's
value. Weights of others for the same loss:

    transformers   router_aux_loss_coef c    counts = "step", coupled, weight c
    Megatron-Core  moe_aux_loss_coeff c      aux_loss: "step", weight c / k;  seq_aux_loss: "document", c / k
    DeepSeek-V3    α of the sequence-wise    counts = "document", weight α / k
    torchtitan     load_balance_coeff        bias_rate, but that a bias keeps its mean there
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.plan.argument_checks import require_choice, require_flag, require_number

Counts = Literal["document", "step", "previous"]


@dataclass(frozen=True)
class Balance:
    """Settings by which routers keep the load of their experts even; by default nothing does.

    `counts`: the tokens whose choices make the load: those of a document; of the whole step, over all
    micro-batches and ranks, for which all forwards have to precede the first backward; or of the step before.
    `coupled`: one load for all layers together. Padding counts nowhere.
    """

    weight: float = 0.0
    """Factor of the balance loss of each layer; 0: no such loss."""
    z_weight: float = 0.0
    """Factor of the z-loss of each layer."""
    bias_rate: float = 0.0
    """Amount by which a step corrects the bias of routers that have one."""
    counts: Counts = "document"
    coupled: bool = False
    forced_routing: bool = False
    """Whether training steps send tokens to the experts of `balanced_indices`, for timings."""

    def __post_init__(self) -> None:
        for name in ("weight", "z_weight", "bias_rate"):
            require_number(f"balance.{name}", getattr(self, name), ModelError)
        require_choice("balance.counts", self.counts, get_args(Counts), ModelError)
        require_flag("balance.coupled", self.coupled, ModelError)
        require_flag("balance.forced_routing", self.forced_routing, ModelError)

    @property
    def has_losses(self) -> bool:
        """Whether an auxiliary loss is added to the main one."""
        return bool(self.weight or self.z_weight)


def count_choices(indices: Tensor, documents: Tensor, count: int, experts: int) -> Tensor:
    """Return how many tokens of each document have chosen each expert: int64 `[D, E]`.

    `indices [T, k]`: the experts of each token; of padding any. `documents [T]`: the number of its document,
    of `count` ones; `count` itself for padding, which is not counted.
    """
    places = documents[:, None] * experts + indices.clamp(min=0)
    counts = torch.zeros((count + 1) * experts, dtype=torch.int64, device=indices.device)
    counts.index_add_(0, places.flatten(), torch.ones_like(places.flatten()))
    return counts.view(count + 1, experts)[:count]


def token_balance(probabilities: Tensor, load: Tensor, documents: Tensor) -> Tensor:
    """Return the balance loss times the number of tokens, 0-d: `Σ_t E Σ_e load[s(t), e] · p[t, e]`.

    `probabilities [T, E]`; `load [D, E]`: the share of each document's tokens that chose each expert.
    `documents [T]` as for `count_choices`: padding adds nothing.
    """
    padding = load.new_zeros(1, load.shape[1])
    loads = torch.cat([load, padding]).to(probabilities.dtype)[documents]
    return load.shape[1] * (loads * probabilities).sum()


def token_z(logits: Tensor, counted: Tensor) -> Tensor:
    """Return the z-loss times the number of tokens, 0-d: `Σ_t (log Σ_e exp(logits[t, e]))²`.

    `logits [T, E]`; `counted [T]`: bool, False for padding, which adds nothing.
    """
    return logits.logsumexp(-1).square().where(counted, 0).sum()


def corrected_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Return the bias of a router after a step: higher by `rate` for experts with less than the mean load.

    Lower for those with more. `bias [E]`; `counts [E]`: int64, the tokens of the whole step that chose each
    expert. The mean is compared in whole numbers, so that all ranks get the same bits.
    """
    return bias + rate * (counts.sum() - len(counts) * counts).sign().to(bias.dtype)
