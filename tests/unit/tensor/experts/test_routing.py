"""`Routing`: which experts are chosen, and what is refused, each in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import ModelError
from plait.tensor.experts.routing import Routing, balanced_indices


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"scores": "topk"}, "scores of a routing is 'topk': choose one of softmax, softmax_of_chosen"),
        ({"normalized": 1}, "normalized of a routing is 1: give True or False"),
        ({"scale": 0}, "scale of a routing is 0: give a number above 0"),
        ({"corrected": None}, "corrected of a routing is None"),
        ({"groups": 0}, "groups of a routing is 0"),
        ({"groups": 2, "chosen_groups": 3}, "chosen_groups = 3 of groups = 2"),
        ({"scores": "softmax_of_chosen", "normalized": False}, "whose weights always add up to 1"),
        ({"capacity_factor": 1.25}, r"capacity_factor = 1\.25.*experts of plait compute every token"),
        ({"jitter": 0.01}, r"jitter = 0\.01, with random factors that would differ between layouts"),
    ],
)
def test_a_routing_that_does_not_exist_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        Routing(**given)


@pytest.mark.parametrize(
    ("routing", "experts", "top_k", "told"),
    [
        (Routing(), 8, 9, "top_k = 9 experts of a token are to be chosen among 8"),
        (Routing(), 8, 0, "top_k is 0"),
        (Routing(), True, 1, "experts is True"),
        (Routing(groups=3), 8, 1, "groups = 3, but there are 8 experts"),
        (Routing(groups=8), 8, 1, "groups = 8, but there are 8 experts: give a multiple .* at least 2"),
        (Routing(groups=4, chosen_groups=1), 8, 3, "chosen among 2: set top_k to at most 2"),
    ],
)
def test_sizes_that_do_not_fit_a_routing_are_refused(
    routing: Routing, experts: int, top_k: int, told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        routing.require_sizes(experts, top_k)


def test_no_option_that_is_refused_is_a_part_of_a_routing() -> None:
    assert Routing(capacity_factor=None, jitter=0.0) == Routing()
    assert "jitter" not in repr(Routing())


@pytest.mark.parametrize("experts", [1, 4, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_experts_of_the_largest_scores_are_the_first_of_a_stable_sort(
    experts: int, dtype: torch.dtype
) -> None:
    """With ties, zeros of both signs, infinities, numbers that differ in one bit, and NaN alone in a row."""
    torch.manual_seed(0)
    drawn = torch.randn(200, experts, dtype=dtype)
    near = torch.full_like(drawn, 0.1).where(
        drawn > 0, torch.nextafter(drawn.new_tensor(0.1), drawn.new_tensor(1))
    )
    signed_zeros = torch.zeros_like(drawn).copysign(drawn)
    infinite = (drawn / 0).where(drawn.abs() > 1, drawn)
    nan = torch.full_like(drawn, torch.nan).copysign(drawn[:, :1])
    rows = [drawn, drawn.round(), -drawn.square().round(), drawn * 1e-42, near, signed_zeros, infinite, nan]
    scores = torch.cat(rows)
    for top_k in {1, min(3, experts), experts}:
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        chosen = Routing().choose(scores, None, top_k)
        assert chosen.dtype == torch.int64
        assert torch.equal(chosen, expected)


def test_an_expert_with_a_score_of_nan_is_chosen_first() -> None:
    scores = torch.tensor([[1.0, 2.0, torch.nan, 3.0]])
    for each in (scores, -scores, scores.double()):
        assert Routing().choose(each, None, 1).item() == 2


@pytest.mark.parametrize(("experts", "top_k"), [(5, 3), (4, 4), (6, 1), (8, 2), (64, 8)])
def test_balanced_experts_load_all_alike_in_each_e_tokens(experts: int, top_k: int) -> None:
    indices = balanced_indices(torch.arange(3 * experts), experts, top_k)
    assert (indices.shape, indices.dtype) == ((3 * experts, top_k), torch.int64)
    assert all(len(set(row)) == top_k for row in indices.tolist())
    for part in indices.split(experts):
        assert part.flatten().bincount(minlength=experts).eq(top_k).all()
    assert balanced_indices(torch.arange(0), experts, top_k).shape == (0, top_k)


def test_a_token_of_balanced_experts_visits_about_as_many_ranks_as_of_uniform_ones() -> None:
    """With 8 experts on two ranks and two a token: 1.57 ranks, where neighbours alone would give 1.25."""
    halves = balanced_indices(torch.arange(1024), 8, 2) // 4
    assert 1.5 < 1 + (halves[:, 0] != halves[:, 1]).double().mean().item() < 1.65
