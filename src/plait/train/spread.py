"""How a run would spread the model of a checkpoint over its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from plait.blueprint import build_blueprint
from plait.checkpoint.manifest import Manifest, section
from plait.layout.shard_plan import ShardPlan
from plait.train.model import build_model
from plait.train.settings import config_from_arguments

_TOKENS = "model.embedding.token.weight"
"""Of plait's own models: a row for each token."""
_KEPT = ("model", "data", "train")


def spread_for(manifest: Manifest, arguments: Sequence[str]) -> ShardPlan:
    """The shard plan of the run that `arguments` (as `plait train` takes them) describe.

    What they do not say of the model and of training is what the run was told that wrote the checkpoint, as
    far as it was one of `plait train`; degrees, strategy and schedule have their defaults. Raises
    `PlaitError` for what is no configuration or no plan.
    """
    usual = {name: section(manifest.state, "config", name) for name in _KEPT}
    config = config_from_arguments(arguments, usual, "the checkpoint")
    tokens = manifest.tensors.get(_TOKENS)
    vocab = config.model.vocab or (tokens.shape[0] if tokens and tokens.shape else 1)
    return build_blueprint(build_model(config.model, vocab), config.plan()).shard_plan
