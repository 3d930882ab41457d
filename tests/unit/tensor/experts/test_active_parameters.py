"""Of experts count as many elements as a token passes through; of everything else all matrices."""

from __future__ import annotations

import torch
from torch import nn

from plait.models.lora import lora
from plait.tensor.experts.active_parameters import active_elements
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.router import Router


class Block(nn.Module):
    """A router and experts beside each other, as in the blocks of transformers."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts = Router(6, experts, top_k, bias=True), Experts(6, 5, experts, bias=True)


def test_matrices_count_once_embeddings_norms_and_biases_not() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    assert active_elements(model) == 3 * 4 + 4 * 2


def test_experts_count_by_the_share_that_their_own_router_chooses() -> None:
    with torch.device("meta"):
        mixture = MixtureOfExperts(6, 5, 8, 2, shared=7, shared_gate=True)
        assert active_elements(mixture) == 8 * 6 + 2 * 3 * 6 * 5 + 3 * 6 * 7 + 6
        assert active_elements(nn.Sequential(mixture, Block(4, 3))) == (
            active_elements(mixture) + 4 * 6 + 3 * 3 * 6 * 5
        )


def test_adapters_of_experts_count_by_the_share_of_their_experts() -> None:
    with torch.device("meta"):
        block = Block(4, 2)
        before = active_elements(block)
        lora(block, rank=3, targets="experts.down_proj")
    assert active_elements(block) == before + 2 * 3 * (6 + 5)


def test_experts_without_a_router_beside_them_count_all() -> None:
    with torch.device("meta"):
        assert active_elements(nn.Sequential(nn.Sequential(Router(6, 4, 1)), Experts(6, 5, 4))) == (
            4 * 6 + 4 * 3 * 6 * 5
        )
