"""`Trainer`: the training loop of a configuration, on one rank.

Read this file, and `plait.app.loop.training_loop`, to see how plait is used.
"""

from __future__ import annotations

import math

from plait.app.config.config import Config
from plait.app.loop.meter import flops_per_token
from plait.app.loop.training_loop import TrainingLoop
from plait.app.train.build import (
    build_learning_rate,
    build_optimizer,
    initial_weights,
    run_groups,
    trained_part,
)
from plait.app.train.run_data import Data
from plait.app.train.sample import encode_prompt, sample_text
from plait.engine.parallelize import parallelize
from plait.plan.plan import Plan
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy


class Trainer(TrainingLoop):
    """Trains `config.model` on `data` over `mesh` by `plan`. Every rank makes one with the same arguments."""

    def __init__(self, config: Config, plan: Plan, mesh: Mesh, data: Data) -> None:
        settings, shape = config.train, config.model
        model = trained_part(config, data.vocab)
        parameters = [(one.numel(), one.requires_grad) for one in model.parameters()]
        self.sizes = sum(size for size, _ in parameters), sum(size for size, trains in parameters if trains)
        """The number of parameters of the whole model, and of those that are not frozen."""
        values = initial_weights(shape, model, settings.seed)
        self.has_weights = values is not None
        engine = parallelize(model, plan, mesh, loss=cross_entropy, seed=settings.seed, values=values)
        optimizer = build_optimizer(run_groups(engine, settings), settings)
        engine.check_optimizer(optimizer)
        super().__init__(
            engine,
            optimizer,
            data.training,
            steps=settings.steps,
            learning_rate=build_learning_rate(settings),
            clip=settings.clip or math.inf,
            flops_per_token=flops_per_token(
                model, layers=shape.layers, hidden=shape.hidden, context=shape.context
            ),
            advice="lower train.lr, raise train.warmup",
        )
        self._config, self._data = config, data

    def sample(self) -> str | None:
        """Return a continuation of the prompt `train.sample`; None without one or without a text tokenizer.

        Every rank calls it and gets the same text. Communication: that of `Engine.generate`.
        """
        data = self._data
        if not self._config.train.sample:
            return None
        if data.unreadable:
            self.tell(f"No sample: {data.unreadable}.")
            return None
        prompt = encode_prompt(self._config, data.tokenizer, is_question=data.holds_chats)
        return sample_text(self.engine, self._config, data.tokenizer, prompt) if prompt.tokens else None
