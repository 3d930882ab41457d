"""`Trainer`: the training loop of a configuration, on one rank.

Read this file, and `plait.loop.training`, to see how plait is used.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from plait.blueprint import shared_blueprint
from plait.comm.mesh import Mesh
from plait.composer import parallelize
from plait.data.tokenizer import printable
from plait.loop.meter import flops_per_token
from plait.loop.training import TrainingLoop
from plait.plan import Plan
from plait.tensor.losses import cross_entropy
from plait.train.build import build_model, build_optimizer, initial_weights, learning_rate
from plait.train.config import Config
from plait.train.run_data import Data


class Trainer(TrainingLoop):
    """Trains `config.model` on `data` over `mesh` by `plan`. Every rank makes one with the same arguments."""

    def __init__(self, config: Config, plan: Plan, mesh: Mesh, data: Data) -> None:
        settings, shape = config.train, config.model
        model = build_model(shape, data.vocab)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        values = initial_weights(shape, model, settings.seed)
        self.has_weights = values is not None
        engine = parallelize(model, plan, mesh, loss=cross_entropy, seed=settings.seed, values=values)
        self.blueprint = shared_blueprint(model, plan, None, mesh.shared_results)
        groups = engine.parameter_groups(weight_decay=settings.weight_decay)
        rate = partial(
            learning_rate,
            steps=settings.steps,
            peak=settings.lr,
            floor=settings.lr * settings.min_lr,
            warmup=settings.warmup,
        )
        super().__init__(
            engine,
            build_optimizer(groups, settings),
            data.training,
            steps=settings.steps,
            learning_rate=rate,
            clip=settings.clip or math.inf,
            flops_per_token=flops_per_token(
                model, layers=shape.layers, hidden=shape.hidden, context=shape.context
            ),
            advice="lower train.lr, raise train.warmup",
        )
        self._settings, self.data = settings, data

    def sample(self) -> str | None:
        """Return a continuation of the prompt `train.sample`; None without one or without a text tokenizer.

        Every rank calls it and gets the same text. Communication: that of `Engine.generate`.
        """
        settings, tokenizer = self._settings, self.data.tokenizer
        prompt = tokenizer.encode([settings.sample.encode()])
        if not self.data.readable or not len(prompt):
            return None
        start = torch.tensor([prompt.tolist()], dtype=torch.int64, device=self.mesh.device)
        tokens = self.engine.generate(start, settings.sample_tokens, temperature=0.8, seed=settings.seed)
        return printable(tokenizer.decode(tokens[0].tolist()))
