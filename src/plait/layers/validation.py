"""Modules whose result would depend on the layout, refused before anything runs."""

from __future__ import annotations

from torch import nn

from plait.autograd.dropout import is_plain_dropout
from plait.errors import ModelError
from plait.layers.layer_sequence import LayerSequence
from plait.rules import join

DROPPING = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
TRACKING_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_layout_dependence(sequence: LayerSequence) -> None:
    """ModelError for the first module that would not compute what it computes on a single rank."""
    for layer in sequence.layers:
        for name, module in layer.module.named_modules():
            reason = _reason(module)
            if reason is not None:
                place = join(layer.path, name)
                raise ModelError(f"{place} ({type(module).__name__}) {reason}.")


def _reason(module: nn.Module) -> str | None:
    if module.training and _drop_probability(module):
        return (
            f"drops with p = {_drop_probability(module)}: its random numbers would depend on the layout, "
            "so set p to 0, and use plait.Dropout, or call eval() on it"
        )
    if module.training and isinstance(module, BATCH_NORMS):
        return (
            "normalises over the rows it is shown: its statistics would depend on how the batch is cut, "
            "so use a norm over features or call eval() on it"
        )
    if module.training and isinstance(module, TRACKING_NORMS) and module.track_running_stats:
        return (
            "keeps running statistics: they would depend on how the batch is cut, so set "
            "track_running_stats to False or call eval() on it"
        )
    if module.training and isinstance(module, nn.RReLU):
        return "draws random slopes, which would depend on the layout, so use LeakyReLU or call eval() on it"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return (
            f"changes its weight in the forward (max_norm = {module.max_norm}): data-parallel ranks would "
            "drift apart, so set max_norm to None"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return (
            "scales gradients by how often a token stands in a micro-batch: they would depend on how the "
            "batch is cut, so set scale_grad_by_freq to False"
        )
    return None


def _drop_probability(module: nn.Module) -> float:
    if isinstance(module, DROPPING) and not is_plain_dropout(module):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout)
    return 0.0
