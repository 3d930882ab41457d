"""What would depend on the layout is refused, with its path and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError
from plait.models.layers.layer_sequence import sequence_of
from plait.models.layers.model_validation import refuse_layout_dependence


def test_a_module_that_draws_random_numbers_is_refused_with_its_path() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": nn.Dropout1d(0.1)}))
    with pytest.raises(ModelError, match=r"^1\.inner \(Dropout1d\) drops with p = 0\.1: "):
        refuse_layout_dependence(sequence_of(model))


@pytest.mark.parametrize(
    "layer", [nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(2, 2, num_layers=2, dropout=0.5)]
)
def test_dropout_inside_a_composite_module_of_torch_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ModelError, match="drops with p = "):
        refuse_layout_dependence(sequence_of(nn.Sequential(layer)))


def test_plain_dropout_that_plait_replaces_is_accepted() -> None:
    refuse_layout_dependence(sequence_of(nn.Sequential(nn.Dropout(0.5), plait.Dropout(0.5))))


class Scaled(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_dropout_subclass_with_its_own_forward_is_refused() -> None:
    altered = nn.Dropout(0.5)
    setattr(altered, "forward", torch.relu)  # noqa: B010
    for layer in (Scaled(0.5), altered):
        with pytest.raises(ModelError, match=r"drops with p = 0\.5"):
            refuse_layout_dependence(sequence_of(nn.Sequential(layer)))


@pytest.mark.parametrize("layer", [nn.Dropout1d(0.0), nn.Dropout1d(0.5).eval(), nn.AlphaDropout(0.0)])
def test_dropout_with_p_zero_is_accepted(layer: nn.Module) -> None:
    refuse_layout_dependence(sequence_of(nn.Sequential(layer)))


@pytest.mark.parametrize(
    "kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
)
def test_every_kind_of_dropout_that_plait_does_not_replace_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match=kind.__name__):
        refuse_layout_dependence(sequence_of(nn.Sequential(kind(0.5))))


def test_batch_norm_in_training_mode_is_refused() -> None:
    tracking = nn.InstanceNorm1d(2, track_running_stats=True)
    for layer, reason in [
        (nn.BatchNorm1d(2), "normalises over the rows"),
        (tracking, "keeps running statistics"),
        (nn.RReLU(), "draws random slopes"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm = 1.0"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "set scale_grad_by_freq to False"),
    ]:
        with pytest.raises(ModelError, match=reason):
            refuse_layout_dependence(sequence_of(nn.Sequential(layer)))
    evaluated = nn.BatchNorm1d(2).eval(), tracking.eval(), nn.RReLU().eval()
    refuse_layout_dependence(sequence_of(nn.Sequential(*evaluated, nn.InstanceNorm1d(2), nn.Embedding(3, 2))))
