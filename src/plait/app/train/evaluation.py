"""Evaluation of a checkpoint of `plait train`: loss, perplexity and accuracy on data, under any plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.app.config.config import LIMITS, RANDOM, Config
from plait.app.config.config_parser import config_from_arguments, given_values
from plait.app.config.config_sections import DataConfig
from plait.app.data.batches import NO_TARGET
from plait.app.data.corpus_manifest import is_prepared
from plait.app.data.token_arrays import holds_tokens
from plait.app.data.tokenizer import open_tokenizer
from plait.app.data.tokenizer_json import files_hash
from plait.app.loop.loggers import finite_values
from plait.app.loop.validation import ValidationRows, validation_means
from plait.app.train.data_sources import is_tokenized, prepared_folder
from plait.app.train.run_checkpoints import FOLDER
from plait.app.train.run_data import load_data, opened_validations
from plait.app.train.trained_model import TOKENIZER, vocabulary
from plait.app.train.trainer import build_model
from plait.checkpoint.folders import resolve
from plait.checkpoint.loading import load_checkpoint
from plait.checkpoint.manifest import Manifest, read_manifest, section
from plait.engine.parallelize import parallelize
from plait.errors import ConfigError
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy

FIELDS = ("model.context", "train.batch", "train.microbatches", "train.precision", "train.validate_batches")
"""Fields of the configuration that an evaluation takes, besides those of `data`, `parallel` and `run`."""
RUN_FIELDS = ("run.dir", "run.threads", "run.device", "run.ranks_as", "run.timeout", "run.guard")


@dataclass(frozen=True)
class Evaluation:
    """Loss, perplexity and accuracy of a model on one set of data, the same on every rank."""

    data: str
    """The name or the source of the data; "held out" for that part of the run's own data."""
    loss: float
    """Mean cross-entropy over all targets, in nats."""
    perplexity: float
    """exp(loss)."""
    accuracy: float
    """Share of the targets that have the largest logit."""
    sequences: int
    which: str
    """Which sequences these are, as text."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; one that is not finite is null."""
        return finite_values(asdict(self))


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint `path`, or the newest in that folder or run; CheckpointError if there is none."""
    return resolve(path / FOLDER if (path / FOLDER).is_dir() else path)


def evaluation_config(checkpoint: Path, arguments: Sequence[str], sources: Sequence[str]) -> Config:
    """Return the configuration of the run that wrote `checkpoint`, with `arguments` and data for evaluation.

    The plan is that of `arguments`, by default one rank; `sources` replace the data of the run's validation.
    Raises `PlaitError` for a checkpoint of no run, and for fields that an evaluation does not take.
    """
    manifest = read_manifest(checkpoint)
    given = given_values(arguments)
    for field in given:
        if not field.startswith(("data.", "parallel.")) and field not in (*FIELDS, *RUN_FIELDS):
            raise ConfigError(
                f"{field} is given, which an evaluation does not take: leave it out; it takes the fields of "
                f"data and parallel, {', '.join((*FIELDS, *RUN_FIELDS))}."
            )
    saved = {name: dict(section(manifest.state, "config", name)) for name in ("model", "data", "train")}
    if not saved["model"]:
        raise ConfigError(
            f"{checkpoint} has no configuration of `plait train`: evaluate its model in Python, by "
            "plait.fit(…, validation=…) or engine.evaluate."
        )
    kept = ("seed", "batch", "microbatches", "precision", "validate_batches")
    saved["train"] = {name: one for name, one in saved["train"].items() if name in kept}
    saved["train"] |= _divided(saved["train"], given)
    parent = checkpoint.resolve().parent
    saved["run"] = {"dir": str(parent.parent if parent.name == FOLDER else parent)}  # for prepared data
    config = config_from_arguments(arguments, saved, str(checkpoint))
    return _with_data(config, manifest, sources, given)


def _divided(train: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch and micro-batches close to the run's that the `given` degrees divide."""
    dp, batch, most = given.get("parallel.dp", 1), train.get("batch"), train.get("microbatches")
    if any(name.startswith("train.") for name in given):
        return {}  # the user's own
    if not (isinstance(dp, int) and isinstance(batch, int) and isinstance(most, int)):
        return {}  # refused later
    if min(dp, batch, most) < 1:
        return {}  # likewise
    batch = -(-batch // dp) * dp
    fitting = (count for count in range(min(most, LIMITS["microbatches"]), 0, -1) if not batch % (dp * count))
    return {"batch": batch, "microbatches": next(fitting)}


def _with_data(config: Config, manifest: Manifest, sources: Sequence[str], limits: Collection[str]) -> Config:
    """Return the configuration with `sources` for validation, in the tokens that the model was trained on.

    Of `sources` all sequences are taken, unless `limits`, fields that are given, say otherwise.
    """
    model, data, train = config.model, config.data, config.train
    if model.folder is None:
        model = model.model_copy(update={"vocab": vocabulary(model, manifest)})
    _require_read(data, limits)
    if "data.tokenizer" not in limits:
        _require_same_tokens(config, manifest, sources)
    if sources:
        given = {source: source for source in sources}
        if "train.validate_batches" not in limits:
            train = train.model_copy(update={"validate_batches": None})
        data = data.model_copy(update={"validation_source": given, "tokenizer": config.tokenizer})
    if not data.validation_sources and not data.validation:
        raise ConfigError("the run has no validation data: name data after RUN, such as a text file.")
    return config.model_copy(update={"model": model, "data": data, "train": train})


def _require_read(data: DataConfig, given: Collection[str]) -> None:
    """Raise ConfigError where `data.source` is given but not read, as the run has validation data."""
    for field in ("data.source", "data.mixture"):
        if field in given and data.validation_sources and "data.validation_source" not in given:
            raise ConfigError(
                f"{field} is given, but the run validates on data of its own, data.validation_source = "
                f"{data.validation_source!r}: name the data after RUN, which are evaluated in their place."
            )


def _require_same_tokens(config: Config, manifest: Manifest, sources: Sequence[str]) -> None:
    """Raise ConfigError where data would be tokenized otherwise than what the model was trained on.

    Raises DataError for a tokenizer that cannot be read.
    """
    data, before = config.data, manifest.state.get(TOKENIZER)
    if isinstance(before, str) and before != files_hash(data.known_tokenizer or "bytes"):
        raise ConfigError(
            f"the tokenizer of {', '.join(data.sources)} is not that of the run, or is gone: set "
            "data.tokenizer to the run's."
        )
    if data.known_tokenizer is not None or config.tokenizer != "bytes":
        return
    texts = [one for one in sources if one != RANDOM and not holds_tokens(one) and not is_prepared(one)]
    if texts and all(map(holds_tokens, data.sources)):
        raise ConfigError(
            f"the run was trained on tokens of an unknown tokenizer, and {texts[0]} has none yet: set "
            "data.tokenizer to the run's, or to bytes."
        )


def prepare_data(config: Config) -> None:
    """Tokenize the records to evaluate, unless that was done before. Raises `DataError`; needs no ranks."""
    sources = config.data.validation_sources.values() or config.data.sources
    for source in sources:
        if is_tokenized(source):
            prepared_folder(config, source)


def evaluate(config: Config, checkpoint: Path) -> tuple[Evaluation, ...]:
    """Return the numbers of the model in `checkpoint` on each set of data; called by every rank.

    Communication: that of `load`, and for each batch that of `Engine.evaluate` and `Engine.output`.
    """
    device = None if config.run.device == "auto" else config.run.device
    mesh = Mesh(config.plan(), device=device, timeout=config.run.timeout, guarded=config.run.guard)
    if config.data.validation_sources:  # then the training data are not read
        sets = opened_validations(config, open_tokenizer(config.tokenizer))
    else:
        sets = load_data(config).validations
    vocab = config.model.vocab or 1
    engine = parallelize(build_model(config.model, vocab), config.plan(), mesh, loss=cross_entropy)
    load_checkpoint(engine, None, checkpoint, "given")
    found, source = [], config.data.validation_source
    unnamed = source if source and isinstance(source, str) else "held out"
    for one in sets:
        rows = ValidationRows(one.batches, one.count)
        loss, accuracy = validation_means(rows, engine, {"accuracy": _hits})
        perplexity = math.exp(loss) if loss < 700 else math.inf
        found.append(Evaluation(one.name or unnamed, loss, perplexity, accuracy, rows.count, one.summary))
    return tuple(found)


def _hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return for each target that counts whether it has the largest logit."""
    counted = targets != NO_TARGET
    return (logits.argmax(-1) == targets)[counted]
