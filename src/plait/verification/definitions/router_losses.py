"""The auxiliary losses of routers and the correction of their biases, from the papers' formulas.

Letters: T tokens, E experts. `p[t, e]`: probabilities of a token's experts, which add up to 1; `f[e]`: the
share of all tokens that chose expert e, which add up to k over the experts.

    balance loss     E Σ_e f_e · mean_t p[t, e]               Fedus et al. 2021, Switch, equations 4 to 6
    sequence-wise    the same of one document, over k         DeepSeek-AI 2024, arXiv:2412.19437, 17 to 20
    z-loss           mean_t (log Σ_e exp(logits[t, e]))²      Zoph et al. 2022, ST-MoE, equation 5
    correction       rate · sign(mean count - own count)      Wang et al. 2024, arXiv:2408.15664, algorithm 1
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from plait.tensor.experts.routing import Routing
from plait.verification.definitions.experts import experts_of_largest, scores_of


def probabilities_of(routing: Routing, logits: Tensor) -> Tensor:
    """Return the softmax of the logits `[T, E]`; of a router with sigmoids, these divided by their sum."""
    if routing.scores != "sigmoid":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def choices_of(routing: Routing, logits: Tensor, indices: Tensor) -> Tensor:
    """Return which experts each token chose, by which losses measure the load: 0 or 1, float64 `[T, E]`.

    `indices [T, k]`: those it was sent to. Neither corrections nor groups count: where the routing has them,
    the choice is that of the k largest scores.
    """
    if routing.corrected or routing.chosen_groups < routing.groups:
        indices, _ = experts_of_largest(Routing(), scores_of(routing, logits), None, indices.shape[-1])
    return one_hot(indices, logits.shape[-1])


def one_hot(indices: Tensor, experts: int) -> Tensor:
    """Return how often each token chose each expert, float64 `[T, E]`; padding (-1) counts for expert 0."""
    return functional.one_hot(indices.clamp(min=0), experts).sum(1).double()


def load_of_documents(choices: Tensor, documents: Tensor) -> Tensor:
    """Return for each token the mean of `choices [T, E]` over its document; `documents [T]` has numbers."""
    loads = torch.zeros_like(choices)
    for number in set(documents.tolist()):
        own = documents == number
        loads[own] = choices[own].mean(0)
    return loads


def summed_balance_loss(probabilities: Tensor, load: Tensor, is_counted: Tensor) -> Tensor:
    """Return T times Switch's load-balancing loss, 0-d: `Σ_t E Σ_e f[t, e] · p[t, e]` over counted tokens.

    `probabilities`, `load`: `[T, E]`; `is_counted [T]`: bool, False for padding.
    """
    of_tokens = load.shape[-1] * (load * probabilities).sum(-1)
    return of_tokens.where(is_counted, 0).sum()


def summed_z_loss(logits: Tensor, is_counted: Tensor) -> Tensor:
    """Return `Σ_t (log Σ_e exp(logits[t, e]))²` over counted tokens, 0-d: T times the z-loss."""
    largest = logits.detach().amax(-1, keepdim=True)  # exp would overflow without it
    of_tokens = largest.squeeze(-1) + (logits - largest).exp().sum(-1).log()
    return of_tokens.square().where(is_counted, 0).sum()


def correction_of(counts: Tensor, rate: float) -> Tensor:
    """Return what a step adds to each expert's bias, rate · sign(mean count - own count), float64 `[E]`.

    `counts [E]`: how many tokens of the whole step were sent to each expert.
    """
    return rate * (counts.double().sum() / len(counts) - counts).sign()
