"""The callback that resumes a training run from its checkpoints, saves new ones and keeps the last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait.app.config.config import Config
from plait.app.config.config_parser import config_from_arguments
from plait.app.data.tokenizer_json import files_hash
from plait.app.loop.checkpoint_callback import Checkpoints
from plait.app.train.trained_model import TOKENIZER, vocabulary
from plait.app.train.trainer import build_model
from plait.checkpoint.manifest import Manifest, section
from plait.checkpoint.snapshots.snapshots import Snapshots
from plait.engine.blueprint import build_blueprint
from plait.errors import ConfigError
from plait.plan.decoder_sizes import TOP_K
from plait.plan.shard_plan import ShardPlan

FOLDER = "checkpoints"
"""The folder in `run.dir`."""
DATA_FIELDS = (
    "train.seed",
    "train.batch",
    "model.context",
    "data.source",
    "data.mixture",
    "data.tokenizer",
    "data.dtype",
    "data.validation",
    "data.validation_source",
)
"""Fields that decide which tokens a step trains on; a resumed run has the same."""


def run_checkpoints(config: Config) -> Checkpoints:
    """Return the callback that saves and resumes a run as `run` configures."""
    run, tokenizer = config.run, config.data.known_tokenizer or "bytes"
    return Checkpoints(
        run.dir / FOLDER,
        every=run.save_every,
        minutes=run.save_minutes,
        keep_last=run.keep_last,
        keep_every=run.keep_every,
        keep_best=run.keep_best,
        watch=config.train.watch if run.keep_best else None,
        resume=run.resume,
        state={"config": json.loads(config.model_dump_json()), TOKENIZER: files_hash(tokenizer)},
        check=partial(_require_same_fields, config),
        start_over="--run.resume no",
        snapshots=partial(
            Snapshots, every=run.snapshot_steps, name=str(run.dir.resolve()), folder=run.snapshot_folder
        )
        if run.snapshot_steps
        else None,
        require_snapshots=run.snapshot_failure == "stop",
    )


def shard_plan_for(manifest: Manifest, arguments: Sequence[str]) -> ShardPlan:
    """Return the `ShardPlan` by which a run with these `arguments` would shard the checkpoint of `manifest`.

    Fields of the model, data and training that are not given are those of the run that wrote the checkpoint,
    if it was one of `plait train`; degrees, strategy and schedule have their defaults. Raises `PlaitError`
    for an invalid configuration or plan.
    """
    defaults = {name: section(manifest.state, "config", name) for name in ("model", "data", "train")}
    config = config_from_arguments(arguments, defaults, "the checkpoint")
    model = build_model(config.model, vocabulary(config.model, manifest))
    return build_blueprint(model, config.plan()).shard_plan


def _require_same_fields(config: Config, state: Mapping[str, Any], path: Path) -> None:
    """Raise `ConfigError` where a resumed run has other settings of data or model than its checkpoint."""
    now = {"config": json.loads(config.model_dump_json())}
    for what, of in (("data", _data_fields), ("model", _model_fields)):
        before, after = of(state), of(now)
        for field, was in before.items():
            if was is not None and was != after[field]:
                raise ConfigError(
                    f"{field} is {after[field]!r}, and was {was!r} when {path} was written: a resumed run "
                    f"needs the same {what}; give the same, or start over without run.resume."
                )


def _data_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, by field, that decide which tokens a step trains on, from a run's saved state."""
    parts = {field: field.partition(".") for field in DATA_FIELDS}
    return {field: section(state, "config", part).get(name) for field, (part, _, name) in parts.items()}


def _model_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, by field, that change what a model computes but no shape of its parameters."""
    model, lora = (section(state, "config", *names) for names in (("model",), ("model", "lora")))
    heads = model.get("heads")
    return {
        "model.heads": heads,
        "model.kv_heads": model.get("kv_heads") or heads,
        "model.top_k": model.get("top_k") or TOP_K if model.get("experts") else None,
        "model.lora.alpha": lora.get("alpha"),
    }
