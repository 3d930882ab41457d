"""How many elements of matrices a token is multiplied by: of experts, those that are chosen for it."""

from __future__ import annotations

from torch import nn

from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router


def active_elements(module: nn.Module) -> float:
    """Return how many matrix elements in `module` multiply a token, of experts those that are chosen for it.

    Embeddings have none. Experts count by the share that their router, beside them in one module, chooses for
    a token.
    """
    shares = _shares(module)
    found = 0.0
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            continue
        least = 3 if isinstance(child, Experts) else 2  # a bias of all experts has two dims
        elements = sum(one.numel() for one in child.parameters(recurse=False) if one.dim() >= least)
        found += elements * shares.get(id(child), 1.0)
    return found


def _shares(module: nn.Module) -> dict[int, float]:
    """Return the share of each module of experts that a token passes through, with its adapters, by `id`."""
    shares: dict[int, float] = {}
    for parent in module.modules():
        children = list(parent.children())
        for router in children:
            if isinstance(router, Router):
                share = router.top_k / router.weight.shape[0]
                experts = (one for one in children if isinstance(one, Experts))
                shares |= {id(part): share for one in experts for part in one.modules()}
    return shares
