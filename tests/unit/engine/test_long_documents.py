"""Documents beyond a model's context are refused by all ranks, also after steps on shorter ones."""

from __future__ import annotations

import torch

import plait
from plait.errors import ModelError
from plait.ranks.launch.rank_pool import RankPool

CONTEXT, LENGTH = 4, 8


def refused_in_a_rank() -> str:
    """Train on documents that fit, then on one that does not; return what this rank raises."""
    plan = plait.Plan(pp=2)
    model = plait.models.gpt2(layers=2, hidden=8, heads=2, vocab=16, context=CONTEXT)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    for ids in ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 2, 2]):
        engine.forward_backward({"tokens": tokens, "document_ids": torch.tensor([ids])}, tokens)
    try:
        ids = torch.zeros(1, LENGTH, dtype=torch.int64)
        engine.forward_backward({"tokens": tokens, "document_ids": ids}, tokens)
    except ModelError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return ""


def test_every_rank_refuses_a_long_document(thread_ranks: RankPool) -> None:
    for message in thread_ranks.run(refused_in_a_rank, ranks=2):
        assert "longer than the model's context of 4" in message
