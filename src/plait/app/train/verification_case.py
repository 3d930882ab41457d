"""What `plait verify` compares for a configuration: model, first batches, optimizer; or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from plait.app.config.config import Config
from plait.app.train.run_data import load_data
from plait.app.train.trainer import model_to_train, optimizer_maker
from plait.checkpoint.huggingface.config_json import config_json
from plait.checkpoint.huggingface.tensor_names import TensorPair, tensor_pairs
from plait.errors import ConfigError
from plait.models.huggingface.pretrained import logits_of, original_in, original_of
from plait.plan.decoder_sizes import Decoder
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.independent_reference import IndependentReference, named_alike
from plait.verification.options import Mode, VerifyOptions, usual_steps


def verification_case(config: Config, *, mode: Mode, steps: int | None, isolate: bool) -> Case:
    """Return the `Case` for `plait verify`: a configuration's model, optimizer and first batches.

    The learning rate stays at its peak. Raises `DataError` and the other errors of `load_data`.
    """
    data, settings, run = load_data(config), config.train, config.run
    if settings.rates:
        raise ConfigError(
            "train.rates is given, and plait verify compares steps with one learning rate: leave it out, as "
            "by --train.rates '[]'."
        )
    steps = usual_steps(mode) if steps is None else steps
    options = VerifyOptions(
        mode=mode,
        steps=steps,
        weight_decay=settings.matrix_decay,
        optimizer=optimizer_maker(settings),
        isolate=isolate,
        resumes=True,
        seed=settings.seed,
    )
    return Case(
        model=model_to_train(config, data.vocab),
        loss=cross_entropy,
        batches=[data.training.batch(step, slice(0, settings.batch)) for step in range(steps)],
        options=options,
        device=run.device,
        timeout=run.timeout,
        ranks_as=run.ranks_as,
        ranks_per_gpu=run.ranks_per_gpu,
    )


ANGLES_IN_FLOAT32 = 1e-6
"""Relative accuracy of rotary angles in transformers; plait's own llama has them in float64 here."""


def transformers_reference(config: Config) -> IndependentReference:
    """Return the model of transformers that computes what the model of the configuration computes.

    For a model in a folder what transformers builds of it; for plait's own the model to which a checkpoint is
    exported. Raises ConfigError for adapters, which transformers does not have.
    """
    if config.model.lora.adapts:
        raise ConfigError("--against transformers compares models without adapters: leave model.lora out.")
    if config.model.folder is not None:
        made = partial(original_in, config.model.folder)
        return IndependentReference(made, "transformers", pairs=named_alike, call=logits_of)
    sizes = config.model.decoder(load_data(config).vocab)
    made = partial(original_of, config_json(sizes, "float32"))
    pairs = partial(_pairs, sizes)
    return IndependentReference(made, "transformers", pairs, logits_of, accuracy=ANGLES_IN_FLOAT32)


def _pairs(sizes: Decoder, *_: Any) -> Sequence[TensorPair]:
    return tensor_pairs(sizes)
