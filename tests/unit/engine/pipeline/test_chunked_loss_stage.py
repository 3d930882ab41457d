from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.engine.pipeline.loss_stage import ChunkedLossStage


class Doubling:
    """Logits are twice the features, and the loss is their sum, without any chunks."""

    def total(self, features: Any, targets: Any) -> Tensor:
        return (2 * features - targets).sum()

    def gradient(self, features: Any, targets: Any, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.total(features, targets).detach(), torch.full_like(features, 2 * scale.item())

    def logits(self, features: Any) -> Tensor:
        return 2 * features  # type: ignore[no-any-return]


FEATURES = torch.tensor([1.0, 2.0], requires_grad=True)


def begun() -> ChunkedLossStage:
    end = ChunkedLossStage(Doubling())
    end.begin([torch.zeros(2), torch.ones(2)], torch.tensor(0.5, dtype=torch.float64))
    return end


def test_in_training_a_chunked_loss_is_computed_with_its_gradient() -> None:
    end = begun()
    end.compute(1, FEATURES)
    assert end.totals == []
    assert end.seed(1)[0].tolist() == [1, 1]  # type: ignore[union-attr]
    assert end.total(1) == 4
    with pytest.raises(KeyError):
        end.seed(1)


def test_without_gradients_a_chunked_loss_is_computed_in_the_forward() -> None:
    end = begun()
    with torch.no_grad():
        end.compute(0, FEATURES)
    assert end.totals == [6]


def test_a_chunked_loss_stage_keeps_logits_as_output() -> None:
    end = begun()
    end.keep(0, FEATURES.detach())
    assert [one.tolist() for one in end.take_outputs()] == [[2, 4]]  # type: ignore[union-attr]


def test_clearing_a_chunked_loss_stage_discards_unfinished_micro_batches() -> None:
    end = begun()
    end.compute(0, FEATURES)
    end.clear()
    with pytest.raises(KeyError):
        end.seed(0)
